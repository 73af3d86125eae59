"""rollout.concurrency: auto against fixed numbers of places, on one engine, with KV caches that are and are not enough.

    python bench/adaptive_concurrency.py --case tail-8      two minutes; adds to bench/results/adaptive_concurrency.json
    python bench/adaptive_concurrency.py --case tail-8 --turn 1      with other lengths, beginning with another arm

Each arm starts on an idle engine and asks for the same requests, with the same lengths, in the same order. Tokens are
counted when the engine samples them, so that long answers which have not ended count, and from `SETTLE_S` on.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator

import async_tail
import harness
import tailed_environment
from tailed_environment import LONG, LONG_MEAN, SHORT_MEAN

from bench.figures import result
from common.config.loading import load_config
from common.config.schema import Config
from rollout_fleet.engine.engine import Engine
from rollout_fleet.episode.concurrency import AdaptiveLimit, Slots

NAME = "adaptive_concurrency"
FIXED = (8, 32, 128)
LOOK_S = 1.0  # as in rollout_fleet/node/node.py
SETTLE_S, COUNTED_S = 8.0, 18.0
AHEAD = 16  # requests beyond the places, as a node leases ahead
PROMPT_TOKENS = 11
CASES = ("tail-8", "tail-64", "long-64", "short-8")  # lengths, MiB of KV cache


async def arm(engine: Engine, lengths: Iterator[int], slots: Slots, adapt: AdaptiveLimit | None) -> dict:
    """Keep every place taken for a while; the limit stays without `adapt`."""

    async def one(tokens: int) -> None:
        async with slots:
            await engine.generate([10] * PROMPT_TOKENS, tokens)

    began, settled, settled_s, looks = time.perf_counter(), None, 0.0, list[int]()
    tasks: set[asyncio.Task[None]] = set()
    while (now := time.perf_counter() - began) < SETTLE_S + COUNTED_S:
        if settled is None and now >= SETTLE_S:
            settled, settled_s = engine.counters.tokens_sampled, time.perf_counter()
        if now >= LOOK_S * (len(looks) + 1):
            looks.append(slots.limit)
            if adapt is not None:
                slots.resize(adapt.look(engine.counters, time.perf_counter(), slots.taken))
        while len(tasks) < slots.limit + AHEAD:
            tasks.add(asyncio.create_task(one(next(lengths))))
        done, tasks = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    assert settled is not None
    sampled, took = engine.counters.tokens_sampled - settled, time.perf_counter() - settled_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.generate([10] * PROMPT_TOKENS, 1)  # behind the aborts: the engine is idle again
    return {"tokens_per_s": round(sampled / took, 1), "places": " ".join(map(str, looks))}  # look by look


def same_lengths(kind: str, turn: int) -> Iterator[int]:
    """The same for every arm, others at every turn: a window of seconds sees few long answers, and depends on which."""
    draw = random.Random(1 + turn)
    while True:
        if kind == "long":
            yield draw.randint(600, 1900)
            continue
        mean = 100
        if kind == "tail":  # as in bench/tailed_environment.py: few answers are long, and they are half of the work
            mean = LONG_MEAN if draw.random() < LONG else SHORT_MEAN
        yield min(1900, 1 + int(draw.expovariate(1 / mean)))


async def measure(config: Config, kind: str, turn: int) -> dict[str, dict]:
    """Figures of each arm; the arms in turn, beginning with another one at each turn."""
    arms = [*map(str, FIXED), "auto"]
    found: dict[str, dict] = {}
    async with async_tail.running_engine(config) as engine:
        await asyncio.gather(*(engine.generate([10] * PROMPT_TOKENS, 200) for _ in range(64)))  # warm
        for name in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            low, high = config.rollout.concurrency_bounds
            adapt = AdaptiveLimit(low, high, config.rollout.group_size, engine.holds) if name == "auto" else None
            slots = Slots(adapt.limit if adapt else int(name))
            found[name] = await arm(engine, same_lengths(kind, turn), slots, adapt)
            print(name, json.dumps(found[name]), flush=True)
    return {name: found[name] for name in arms}


@harness.script(turn=0, case={"choices": CASES, "required": True, "help": "lengths, and MiB of KV cache"})
def main(args: harness.Options) -> harness.Figures:
    kind, _, mib = args.case.partition("-")
    model, dataset = tailed_environment.build(harness.scratch())
    words = [f"model.path={model}", f"tasks.dataset={dataset}", "rollout.concurrency=auto"]
    config = load_config(async_tail.CONFIG, [*words, f"rollout.engine.kv_cache_mib={mib}"])
    arms = asyncio.run(measure(config, kind, args.turn))
    cases = result(NAME)["cases"]
    cases.setdefault(args.case, {})[str(args.turn)] = arms
    rounds = min(len(turns) for turns in cases.values())
    return {"rounds": rounds, "cases": cases}
