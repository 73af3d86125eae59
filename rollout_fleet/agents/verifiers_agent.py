"""Environments of the `verifiers` library (0.4): tasksets with their rewards, tool servers, and environments of roles.

The library's own chat program talks to the policy through the node's OpenAI-compatible endpoint, and its tasks give the
reward. The endpoint records the sampled tokens, so no environment can change them.

verifiers needs other versions of openai and mcp than vLLM. Install it apart (launch/setup.sh adapters) and name its
interpreter in `tasks.limits.python`. This module then runs in that interpreter; until then it imports only the standard
library.

    tasks:
      environment: verifiers
      options: {env_id: my-taskset, arguments: '{"taskset": {"difficulty": 2}, "agent": {"max_turns": 4}}'}
      dataset: runs/my-taskset.jsonl      # tasks of the taskset: export_rows, once
      limits: {python: .venv-adapters/bin/python}
"""

import functools
import hashlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from rollout_fleet.environments.protocol import Limits

KEY = "SLIPSTREAM_API_KEY"  # verifiers takes keys from variables; tool servers do not inherit names with API_KEY


async def agent(
    problem: dict[str, Any], *, base_url: str, api_key: str, model: str, seed: int, env_id: str, arguments: str = "{}"
) -> dict[str, Any]:
    """One episode of the taskset `env_id`, scored by its tasks; `problem` is a row as export_rows writes it.

    The taskset must be installed beside verifiers. `arguments` is a JSON object of the environment's config, as in
    vf-eval's `[env]`. Raises RuntimeError when the episode ends with an error, or trains several roles.
    """
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    environment = _environment(env_id, arguments)
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(problem), environment.taskset.config.task)
    os.environ[KEY] = api_key  # this process belongs to the episode
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext(model=model, client=client))
    errors = [*episode.errors, *(trace.last_error for trace in episode.traces if trace.has_error)]
    if errors:
        raise RuntimeError(f"the episode of {env_id} failed: {errors[0].type}: {errors[0].message}"[:2000])
    played = [trace for trace in episode.traces if trace.agent.trainable]
    if len(played) != 1:
        raise RuntimeError(f"{env_id} trained {len(played)} agents, expected 1: an episode has one reward")
    (trace,) = played
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in {**scores, **trace.metrics}.items() if value is not None}
    return {"reward": float(trace.reward), "metrics": metrics}


# verifiers brings many libraries, and the chat program and tool servers are processes: address space, not memory in use
agent.LIMITS = Limits(process=True, memory_mib=16384, cpu_s=600)  # type: ignore[attr-defined]
agent.PRELOAD = ("verifiers.v1",)  # type: ignore[attr-defined]


def export_rows(env_id: str, path: Path, arguments: str = "{}", rows: int = -1) -> int:
    """Write the taskset's first `rows` tasks, -1 for all, as the JSONL file of tasks.dataset.

    Returns how many. Raises ValueError for all tasks of an endless taskset. Needs verifiers.
    """
    taskset = _environment(env_id, arguments).taskset
    if rows < 0 and not taskset.bounded:
        raise ValueError(f"{env_id} has tasks without end: say how many `rows`")
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for task in itertools.islice(taskset, rows if rows >= 0 else None):
            file.write(task.data.model_dump_json(exclude_defaults=True) + "\n")
            written += 1
    return written


@functools.cache
def _environment(env_id: str, arguments: str) -> Any:
    """The environment, whose roles run in this process's folder with the tools of their tasks, unless they say else."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
    from verifiers.v1.harnesses.null import NullHarnessConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
        default_harness_id,
        load_environment,
        resolve_env_config,
    )

    SubprocessRuntime.prepare_uv_script = _own_interpreter
    given = json.loads(arguments)
    config = resolve_env_config({**given, "taskset": {**given.get("taskset", {}), "id": env_id}})
    for role in agent_config_fields(config).values():
        if "runtime" not in role.model_fields_set:
            role.runtime = vf.SubprocessConfig()  # the library's default is a sandbox of its vendor
        if role.harness is None and default_harness_id(env_id) == "bash":
            role.harness = NullHarnessConfig(id="null")  # the library's default would add a shell to the task's tools
    return load_environment(config)


async def _own_interpreter(
    runtime: Any, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
) -> list[str]:
    """Instead of SubprocessRuntime.prepare_uv_script (verifiers 0.4.0): this interpreter has the script's packages.

    uv would fetch them from a registry, again for every episode, whose home is empty.
    """
    text = script.encode() if isinstance(script, str) else script
    name = f"{hashlib.sha256(text).hexdigest()}.py"
    await runtime.write(name, text)
    return [sys.executable, str(runtime.workdir / name)]
