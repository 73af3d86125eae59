"""Seconds that an engine and a learner take for their work, alone and while the other one works on the same machine."""

import asyncio
import itertools
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import harness
import psutil
from simulated_engine import Node, Speeds

from common.config.schema import Config
from launch.up.core_pinning import Cores, available_cores, plan_cores
from launch.up.roles import thread_environment
from launch.up.supervisor import pin
from rollout_fleet.engine.engine import Engine

REQUESTS, LONG_REQUESTS, LONG = (1, 2, 4, 8, 16, 32, 64, 128), (4, 8, 16), 1500  # at once; also after LONG tokens each
PROMPT = 16
DECODED = 96  # tokens a request when decoding is timed
ROUNDS = 3
ROLLING, ROLLING_CALLS, ROLLING_TOKENS = 16, 320, (8, 40)  # at once, in all, least and most tokens of a call
BESIDE = 64  # requests that run while the learner works beside the engine


@dataclass(frozen=True)
class Beside:
    """How many times longer each side's work takes while the other one works, from medians."""

    engine: float
    learner: float


def core_plan(config: Config) -> list[Cores]:
    """The cores that `slipstream up` gives to the learner and to the engine."""
    learner = config.learner.world_size * config.learner.threads
    return plan_cores(available_cores(), learner, [config.rollout.threads])


@asynccontextmanager
async def running_engine(config: Config) -> AsyncGenerator[Engine]:
    """The node's engine on the node's cores, warm."""
    os.environ.update(thread_environment(config.rollout.threads))
    engine = Engine(config, weights="folder", stop_token_ids=[])
    await engine.start()
    try:
        cores = core_plan(config)[1]
        for child in psutil.Process().children(recursive=True):
            if cores is not None:
                pin(child.pid, cores)
        await seconds(engine, 4, 0, 16)
        yield engine
    finally:
        await engine.shutdown()


async def seconds(engine: Engine, requests: int, context: int, tokens: int) -> float:
    """Seconds that `requests` calls at once take; each has a prompt of its own, so that no KV cache is warm."""
    rest = [10 + at % 7 for at in range(PROMPT + context - 2)]
    prompts = [[10 + request % 16, 10 + request // 16, *rest] for request in range(requests)]
    began = time.perf_counter()
    await asyncio.gather(*(engine.generate(prompt, tokens) for prompt in prompts))
    return time.perf_counter() - began


async def engine_alone(engine: Engine) -> Speeds:
    """The engine's part of the speeds; the learner's is 0."""
    calls: dict[int, float] = {}
    steps: dict[tuple[int, int], float] = {}
    for requests, context in [*((n, 0) for n in REQUESTS), *((n, LONG) for n in LONG_REQUESTS)]:
        await seconds(engine, requests, context, 1)  # the prompts' KV cache
        call_s = min([await seconds(engine, requests, context, 1) for _ in range(ROUNDS)])
        decode_s = min([await seconds(engine, requests, context, DECODED) for _ in range(ROUNDS)])
        steps[requests, context] = (decode_s - call_s) / (DECODED - 1)
        if not context:
            calls[requests] = call_s
    context_s = statistics.median((steps[n, LONG] - steps[n, 0]) / (n * LONG) for n in LONG_REQUESTS)
    curve = tuple((n, steps[n, 0] - context_s * n * DECODED / 2) for n in REQUESTS)
    few, many = REQUESTS[-2:]
    call_s = (calls[many] - calls[few] - (steps[many, 0] - steps[few, 0])) / (many - few)
    speeds = Speeds(curve, max(call_s, 0.0), 0.0, 0.0, 0.0, context_s=max(context_s, 0.0))
    return replace(speeds, prefill_s=fit_prefill(speeds, min([await rolling(engine) for _ in range(ROUNDS)])))


def rolling_lengths() -> list[int]:
    """Tokens of each call of `rolling`."""
    low, high = ROLLING_TOKENS
    return [low + 7 * at % (high - low + 1) for at in range(ROLLING_CALLS)]


async def rolling(engine: Engine) -> float:
    """Seconds of ROLLING_CALLS calls, ROLLING at a time: the next begins when one ends."""
    left = iter(rolling_lengths())

    async def one_after_another() -> None:
        for tokens in left:
            await seconds(engine, 1, 0, tokens)

    began = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(ROLLING)))
    return time.perf_counter() - began


def simulated_rolling_s(speeds: Speeds) -> float:
    """Seconds that the simulator predicts for `rolling`."""
    node, left = Node(speeds), iter(rolling_lengths())
    for tokens in itertools.islice(left, ROLLING):
        node.start(tokens, [])
    now = 0.0
    while (end := node.next_end()) is not None:
        now = end
        node.advance(now)
        for _ in node.ended():
            if tokens := next(left, 0):
                node.start(tokens, [])
    return now


def fit_prefill(speeds: Speeds, rolling_s: float) -> float:
    """The `prefill_s` with which the simulator takes `rolling_s`, at least 0."""

    def simulated(microseconds: int) -> float:
        return simulated_rolling_s(replace(speeds, prefill_s=1e-6 * microseconds))

    return 1e-6 * bisect_left(range(100_000), rolling_s, key=simulated)


async def both(engine: Engine, run_dir: Path, config: Config, out: Path) -> Beside:
    """The learner trains the run again without an engine beside it, then with one that is never idle."""
    alone = await asyncio.to_thread(replayed, run_dir, config, out / "alone")
    replay = asyncio.create_task(asyncio.to_thread(replayed, run_dir, config, out / "beside"))
    ends: list[tuple[float, float]] = []  # Unix time, seconds of DECODED steps
    while not replay.done():
        took = await seconds(engine, BESIDE, 0, DECODED)
        ends.append((time.time(), took))
    beside = await replay
    first_s, last_s = beside.lines[0]["time_s"], beside.lines[-1]["time_s"]
    with_learner = [s for at, s in ends if first_s < at - s and at < last_s]
    without = [await seconds(engine, BESIDE, 0, DECODED) for _ in range(len(with_learner))]
    return Beside(statistics.median(with_learner) / statistics.median(without), beside.busy_s / alone.busy_s)


def replayed(run_dir: Path, config: Config, out: Path) -> harness.Job:
    """`slipstream replay` of the run on the learner's cores."""
    words = ("-m", "launch.cli", "replay", run_dir, "--out", out)
    harness.apart(harness.python, *words, cores=core_plan(config)[0])
    return harness.read(out)
