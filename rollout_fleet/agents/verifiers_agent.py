"""Environments of the `verifiers` library (0.1 to 0.3): SingleTurnEnv, MultiTurnEnv, ToolEnv and what is built on them.

The library talks to the policy through the node's OpenAI-compatible endpoint and judges with its own rubric. The
endpoint records the sampled tokens, so no environment can change them.

verifiers needs other versions of openai and mcp than vLLM. Install it apart (launch/setup.sh adapters) and name its
interpreter in `tasks.limits.python`. This module then runs in that interpreter; until then it imports only the standard
library.

verifiers 0.4 is refused, because it has none of these classes: its tasksets run programs behind a server.

    tasks:
      environment: verifiers
      options: {env_id: my-env, arguments: '{"difficulty": 2}'}
      dataset: runs/my-env.jsonl          # rows of the environment: export_rows, once
      limits: {python: .venv-adapters/bin/python}
"""

import functools
import json
from pathlib import Path
from typing import Any

from rollout_fleet.environments.protocol import Limits

ROW_KEYS = ("prompt", "answer", "info", "task", "example_id")


async def agent(
    problem: dict[str, Any], *, base_url: str, api_key: str, model: str, seed: int, env_id: str, arguments: str = "{}"
) -> dict[str, Any]:
    """One rollout of `env_id`, scored by its rubric; `problem` is a row as export_rows writes it.

    The environment must be installed beside verifiers; `arguments` is a JSON object of its keyword arguments. Raises
    RuntimeError when the rollout ends with an error of the environment's, or verifiers is not one that can be used.
    """
    environment = _environment(env_id, arguments)
    from openai import AsyncOpenAI
    from verifiers.clients.openai_chat_completions_client import (  # pyright: ignore[reportMissingImports]
        OpenAIChatCompletionsClient,
    )

    row = {"example_id": 0, **problem}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        found = await environment.run_rollout(row, OpenAIChatCompletionsClient(client), model, {})
    if found.get("error"):
        raise RuntimeError(f"the rollout of {env_id} failed: {found['error']}")
    metrics = {name: float(value) for name, value in (found.get("metrics") or {}).items() if value is not None}
    return {"reward": float(found["reward"] or 0.0), "metrics": metrics}


# verifiers brings datasets, pyarrow and more: address space, not memory in use
agent.LIMITS = Limits(process=True, memory_mib=16384, cpu_s=600)  # type: ignore[attr-defined]
agent.PRELOAD = ("verifiers",)  # type: ignore[attr-defined]


def export_rows(env_id: str, path: Path, arguments: str = "{}", rows: int = -1) -> int:
    """Write the environment's first `rows` training rows, -1 for all, as the JSONL file of tasks.dataset.

    Returns how many. Needs verifiers.
    """
    dataset = _environment(env_id, arguments).get_dataset(n=rows)
    with path.open("w", encoding="utf-8") as file:
        for row in dataset:
            kept = {key: row[key] for key in ROW_KEYS if row.get(key) is not None}
            file.write(json.dumps(kept, ensure_ascii=False, default=str) + "\n")
    return len(dataset)


@functools.cache
def _environment(env_id: str, arguments: str) -> Any:
    import verifiers  # pyright: ignore[reportMissingImports]

    if not hasattr(verifiers, "load_environment"):
        expected = "expected 0.1 to 0.3 under tasks.limits.python (launch/setup.sh adapters installs one)"
        raise RuntimeError(f"verifiers {verifiers.__version__} has no load_environment: {expected}")
    return verifiers.load_environment(env_id, **json.loads(arguments))
