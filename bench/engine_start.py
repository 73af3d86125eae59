"""CPU seconds until a node's engine is up, imported ahead or spawned: python bench/engine_start.py [--pairs 3].

The engine is the quickstart's, of a random model. Both ways begin in a fresh Python, in turns:

- ahead: the node imports vLLM once, and the engine's process is a fork of it, as `slipstream up` starts them.
- spawned: the engine's process imports vLLM again, as vLLM itself starts it on a CPU.

CPU seconds are those of the node and of everything that it has started. A first and a second round of requests show
what a request before the first lease could gain.
"""

import asyncio
import json
import tempfile
import time
from pathlib import Path

import harness
import psutil

from common.config.loading import load_config

WAYS = ("ahead", "spawned")
REQUESTS, TOKENS = 32, 40


def measure(way: str, folder: str) -> None:
    """Prints the figures of one start, of this process since it began."""
    config = load_config(harness.ROOT / "configs/quickstart.yaml", [f"model.path={folder}"])
    from rollout_fleet.engine.engine import Engine, import_ahead

    if way == "ahead":
        import_ahead(config)
    engine = Engine(config, weights="folder", stop_token_ids=[])
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    found = {"node_cpu_s": time.process_time(), "engine_cpu_s": harness.children_cpu_s()}
    found["cpu_s"] = sum(found.values())
    found["wall_s"] = time.time() - psutil.Process().create_time()
    for name in ("first_requests_cpu_s", "second_requests_cpu_s"):
        before_s = time.process_time() + harness.children_cpu_s()
        loop.run_until_complete(_serve(engine))
        found[name] = time.process_time() + harness.children_cpu_s() - before_s
    loop.run_until_complete(engine.shutdown())
    print(json.dumps(found), flush=True)


async def _serve(engine: object) -> None:
    prompts = [[(i * 7 + j * 3) % 90 + 4 for j in range(12)] for i in range(REQUESTS)]
    await asyncio.gather(*(engine.generate(prompt, TOKENS) for prompt in prompts))  # type: ignore[attr-defined]


@harness.script(pairs=3)
def main(options: harness.Options) -> harness.Figures:
    with tempfile.TemporaryDirectory() as folder:
        harness.qwen3(Path(folder), vocab_size=128, hidden_size=128, num_hidden_layers=2, initializer_range=0.08)

        def start(way: str, _: int) -> dict[str, float]:
            work = f"import engine_start; engine_start.measure({way!r}, {folder!r})"
            return json.loads(harness.python("-c", work, OMP_NUM_THREADS="1").splitlines()[-1])

        found = harness.in_turns(WAYS, range(options.pairs), start)
    return {"rounds": options.pairs, "starts": harness.rows(found, ["way"], "cpu_s", 2)}
