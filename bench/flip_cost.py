"""The cost of a weight flip: python bench/flip_cost.py [RUN ...].

A real engine under a constant load is fed by a real publisher, for `weights.kv_cache` keep and recompute and
`weights.encoding` full and delta. Each version changes a fiftieth of the elements a little. The figures of a flip:

- seconds for which generation stalled;
- seconds from the call of `publish`, which follows the optimizer step, to the version being sampled from.

With finished RUNs their figures, too; without, those of the last time are kept. Short mode: `--flips 2 --rounds 1`.
`--flips` is the number of flips in one round.
"""

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from node_throughput import engine_config, prompts, tiny_model

from bench.figures import result
from common.config.loading import load_config

VARIANTS = [("keep", "full"), ("keep", "delta"), ("recompute", "full"), ("recompute", "delta")]


def run_figures(path: Path) -> dict:
    """Figures of one finished run; the first step is left out, because the engine starts in it."""
    job = harness.read(path)
    lines = job.lines[1:]
    steps, stall, copies = (sum(x[name] for x in lines) for name in ("step_s", "generation_stall_s", "snapshot_s"))
    return {
        "staleness_max": load_config(path / "config.yaml").staleness.max,
        "stall_per_flip_ms": round(1000 * stall / len(lines), 3),
        "seconds_to_active_median": round(statistics.median(x["seconds_to_active"] for x in lines), 4),
        "learner_copy_share_of_step": round(copies / steps, 5),
    }


class Bench:
    """One engine, fed by one publisher after another."""

    def __init__(self, arguments: harness.Options, model: str) -> None:
        from transformers import Qwen3ForCausalLM

        from rollout_fleet.engine.engine import Engine

        self.arguments = arguments
        self.engine = Engine(engine_config(model, arguments.dtype, arguments.requests), stop_token_ids=[])
        state = Qwen3ForCausalLM.from_pretrained(model, dtype=arguments.dtype).state_dict()
        self.weights = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
        self.version = 0

    def step(self) -> None:
        """The next version: a fiftieth of the elements moves by a unit or so in the last place of bfloat16."""
        self.version += 1
        for tensor in self.weights.values():
            tensor.view(-1)[self.version % 50 :: 50] *= 1.005

    async def publish(self, publisher: Any, client: Any) -> dict:
        """Bring the next version to the engine; the figures of its flip."""
        self.step()
        stalled, started = client.state.stall_s, time.perf_counter()
        await asyncio.to_thread(publisher.publish, self.version, list(self.weights.items()), None)
        while client.state.version != self.version:
            await client.wait_change(5)
            if client.state.excluded:
                raise SystemExit(client.state.excluded)
        seconds = time.perf_counter() - started
        return {"stall_ms": 1000 * (client.state.stall_s - stalled), "seconds_to_active": seconds}

    async def load(self) -> float:
        """Seconds that all requests take."""
        started = time.perf_counter()
        await asyncio.gather(*(self.engine.generate(p, self.arguments.tokens) for p in prompts(self.arguments)))
        return time.perf_counter() - started

    async def variant(self, incarnation: int, kv_cache: str, encoding: str) -> dict:
        from common.config.schema import WeightsConfig
        from learner.publish.publisher import WeightPublisher
        from rollout_fleet.weights.weight_client import WeightClient

        self.engine.weights.recompute = kv_cache == "recompute"
        weights = WeightsConfig(timeout_s=30.0, bucket_mib=16, encoding=encoding, anchor_every=0)
        publisher = WeightPublisher(incarnation, self.arguments.dtype, weights)
        client = WeightClient("bench", self.engine.weights)
        client.follow(publisher.start(), incarnation)
        await self.publish(publisher, client)
        flips = []
        await self.load()  # warms up
        for _ in range(self.arguments.rounds):
            undisturbed_s = await self.load()
            task = asyncio.create_task(self.load())
            for _ in range(self.arguments.flips):
                await asyncio.sleep(undisturbed_s / (self.arguments.flips + 1) / 2)
                flips.append(await self.publish(publisher, client))
            await task
        payload = publisher.stats().publish_bytes
        await client.close()
        await asyncio.to_thread(publisher.close)
        return {
            "kv_cache": kv_cache,
            "encoding": encoding,
            **harness.medians(flips, 4),
            "payload_bytes": payload,
            "flips": len(flips),
        }


async def engine_figures(arguments: harness.Options, model: str) -> list[dict]:
    bench = Bench(arguments, model)
    await bench.engine.start()
    rows = []
    for incarnation, (kv_cache, encoding) in enumerate(VARIANTS):
        rows.append(await bench.variant(incarnation, kv_cache, encoding))
        print(rows[-1], flush=True)
    await bench.engine.shutdown()
    return rows


@harness.script(
    hidden=512, layers=8, dtype="bfloat16", requests=32, group=8, prompt=64, tokens=192, flips=4, rounds=3, runs=(),
)  # fmt: skip
def main(arguments: harness.Options) -> harness.Figures:
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(Path(folder), arguments.hidden, arguments.layers)
        rows = asyncio.run(engine_figures(arguments, folder))
    runs = [run_figures(Path(path)) for path in arguments.runs] or result("flip_cost")["runs"]
    return {"rounds": arguments.rounds, "engine": rows, "runs": runs}
