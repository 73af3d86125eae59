"""rollout.concurrency: auto against fixed ones, too few and more than the KV cache holds, in turn on one engine.

    python bench/adaptive_concurrency.py        two minutes; writes bench/results/adaptive_concurrency.json

The workload is that of bench/async_tail.py with a small KV cache. Fixed: FEW and MANY places. Auto: places follow the
engine's cache as in a node (rollout_fleet/places.py), looked at once a second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import async_tail
import jobs
import machine
import tailed_environment

from common.config import Config
from common.config_loading import load_config
from launch.roles import thread_environment
from rollout_fleet.drivers import load_tokenizer
from rollout_fleet.places import AdaptiveLimit, Places, Pressure

FEW, MANY = 8, 128
LOOK_S = 1.0
SETTLE_S = 6.0  # of a phase, before anything is counted: the first long answers take as long


async def phase(engine, config: Config, seconds: float, adapt: AdaptiveLimit | None, fixed: int = MANY) -> dict:
    """Keep every place taken for a while; what came out, per second."""
    places = Places(adapt.limit if adapt else fixed)
    prompt = load_tokenizer(config.model.path).encode(tailed_environment.PROMPT, add_special_tokens=False)
    done_tokens = 0

    async def one() -> None:
        nonlocal done_tokens
        async with places:
            generation = await engine.generate(prompt, config.rollout.max_tokens)
            done_tokens += len(generation.tokens)

    async def watch() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            seen = engine.counters
            assert adapt is not None
            places.resize(adapt.look(Pressure(seen.kv_cache_usage, seen.waiting, seen.preemptions), places.taken))

    watcher = asyncio.create_task(watch()) if adapt else None
    before, began = engine.counters.preemptions, time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()
    settled: tuple[float, int] | None = None
    while time.perf_counter() - began < SETTLE_S + seconds:
        if settled is None and time.perf_counter() - began > SETTLE_S:
            settled = time.perf_counter(), done_tokens
        while len(tasks) < places.limit + 16:  # a node leases ahead
            tasks.add(asyncio.create_task(one()))
        _, tasks = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
    assert settled is not None
    took, tokens = time.perf_counter() - settled[0], done_tokens - settled[1]
    for task in [*tasks, *([watcher] if watcher else [])]:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return {
        "tokens_per_s": round(tokens / took, 1),
        "preemptions": engine.counters.preemptions - before,
        "places_at_the_end": places.limit,
    }


async def measure(config: Config, seconds: float, rounds: int) -> dict:
    from rollout_fleet.engine import Engine

    engine = Engine(config, weights="folder")
    await engine.start()
    found: dict[str, list[dict]] = {"few": [], "many": [], "auto": []}
    adapt = AdaptiveLimit(*config.rollout.concurrency_bounds, config.rollout.group_size)
    adapt.look(Pressure(0.0, 0, engine.counters.preemptions), 0)
    try:
        await phase(engine, config, 3.0, None)  # warm
        for _ in range(rounds):
            found["few"].append(await phase(engine, config, seconds, None, FEW))
            found["many"].append(await phase(engine, config, seconds, None, MANY))
            adapt.look(Pressure(0.0, 0, engine.counters.preemptions), 0)  # those were not its own
            found["auto"].append(await phase(engine, config, seconds, adapt))
            print(json.dumps({name: runs[-1] for name, runs in found.items()}), flush=True)
    finally:
        await engine.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase (15)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kv-cache-mib", type=int, default=8)
    parser.add_argument("--name", default="adaptive_concurrency")
    args = parser.parse_args()
    model, dataset = tailed_environment.build(Path(tempfile.mkdtemp(prefix="slipstream-bench-")))
    words = [f"model.path={model}", f"tasks.dataset={dataset}", "rollout.concurrency=auto"]
    config = load_config(async_tail.CONFIG, [*words, f"rollout.engine.kv_cache_mib={args.kv_cache_mib}"])
    os.environ.update(thread_environment(config.rollout.threads))
    found = asyncio.run(measure(config, args.seconds, args.rounds))
    median = {name: statistics.median(r["tokens_per_s"] for r in runs) for name, runs in found.items()}
    result = {
        "machine": machine.describe(),
        "kv_cache_mib": args.kv_cache_mib,
        "fixed_places": {"few": FEW, "many": MANY},
        "phases": found,
        "tokens_per_s_median": median,
        "auto_over_few": round(median["auto"] / median["few"], 4),
        "auto_over_many": round(median["auto"] / median["many"], 4),
    }
    print(jobs.write(args.name, result))


if __name__ == "__main__":
    main()
