"""A heavy-tailed workload, synchronous and asynchronous, with real processes; and what the simulator says of it.

    python bench/async_tail.py             twelve minutes on a quiet machine; --steps 12 --rounds 1 for a quick look

A round, all on the same machine:

1. `slipstream up` with staleness.max 0 and every window on the same problems. The learner's parts come from the
   synchronous run's metrics, the lengths of every episode from the recorded groups of each run.
2. The engine alone, and engine and learner beside each other: the speeds of bench/simulate.py.
3. The simulation of each run with its own lengths, on a machine that both sides share.
"""

import asyncio
import itertools
import json
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import harness
import psutil
import simulate
import tailed_environment
from simulated_engine import Node, Speeds, fit_positive

from broker.journal.recording import open_recording
from common.config.loading import load_config
from common.config.schema import Config
from common.process.run_dir import RunDir
from common.rollouts import Sample, decode_group
from launch.up.devices import Cores, available_cores, plan_cores
from launch.up.ranks import thread_environment
from launch.up.supervisor import pin
from rollout_fleet.engine.engine import Engine

CONFIG = harness.ROOT / "bench" / "async_tail.yaml"
REQUESTS, LONG_REQUESTS, LONG = (1, 2, 4, 8, 16, 32, 64, 128), (4, 8, 16), 1500  # at once; also after LONG tokens each
PROMPT = 16
DECODED = 96  # tokens a request when decoding is timed
ROUNDS = 3
ROLLING, ROLLING_CALLS, ROLLING_TOKENS = 16, 320, (8, 40)  # at once, in all, least and most tokens of a call
BESIDE = 64  # requests that run while the learner works beside the engine
Drawn = dict[int, dict[int, list[simulate.Episode]]]  # episodes of every task of a step, by step and serial


def turns_of(sample: Sample) -> simulate.Episode:
    """Sampled tokens of each turn, from the runs of ones in the loss mask."""
    runs = itertools.groupby(sample.loss_mask.numpy().tolist())
    return tuple(len(list(run)) for sampled, run in runs if sampled)


def lengths_by_step(run: RunDir, config: Config) -> Drawn:
    """Episodes that a run trained on."""
    with open_recording(run, config) as recording:
        return {
            step: {g.task.serial: [turns_of(s) for s in decode_group(g.stored.read()).samples] for g in groups}
            for step, groups in recording.steps.items()
        }


def learner_parts(job: harness.Job, by_step: Drawn) -> dict[str, float]:
    """The learner's part of the speeds: its seconds without waiting, fitted to every step's lengths."""
    rows, busy = [], []
    for line in job.lines[1:]:
        lengths = [sum(episode) for episodes in by_step[line["step"]].values() for episode in episodes]
        rows.append([1, sum(lengths), sum(length**2 for length in lengths)])
        busy.append(line["step_s"] - line["learner_idle_s"])
    return dict(zip(("train_s", "train_token_s", "train_pair_s"), fit_positive(rows, busy), strict=True))


def lengths_of(by_step: Drawn) -> simulate.Lengths:
    """Lengths of a task; the last tasks of a run were never trained on and get those of another task."""
    known = {serial: episodes for step in by_step.values() for serial, episodes in step.items()}
    return lambda serial: known.get(serial) or list(known.values())[serial % len(known)]


def measure(scratch: Path, overrides: list[str], seed: int, staleness: int) -> tuple[harness.Job, Drawn]:
    """A finished job and the lengths that it drew."""
    run_dir = scratch / f"k{staleness}-{seed}"
    job = harness.run(str(CONFIG), run_dir, *overrides, f"run.seed={seed}", f"staleness.max={staleness}")
    return job, lengths_by_step(RunDir(run_dir), load_config(run_dir / "config.yaml"))


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


async def both(engine: Engine, run_dir: Path, config: Config, out: Path) -> dict[str, float]:
    """How many times longer each side's work takes while the other one works, from medians.

    The learner trains the run again without an engine beside it, then with one that is never idle.
    """
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
    engine_shared = statistics.median(with_learner) / statistics.median(without)
    return {"engine_shared": engine_shared, "learner_shared": beside.busy_s / alone.busy_s}


def replayed(run_dir: Path, config: Config, out: Path) -> harness.Job:
    """`slipstream replay` of the run on the learner's cores."""
    words = ("-m", "launch.cli", "replay", run_dir, "--out", out)
    harness.apart(harness.python, *words, cores=core_plan(config)[0])
    return harness.read(out)


async def calibrate(config: Config, synchronous: harness.Job, out: Path) -> Speeds:
    """The engine's speeds, and how much learner and engine slow each other."""
    async with running_engine(config) as engine:
        return replace(await engine_alone(engine), **await both(engine, synchronous.run_dir, config, out))


def measure_round(scratch: Path, overrides: list[str], seed: int, config: Config, windows: list[int]) -> dict:
    """Every mode once, and its simulation with its own lengths."""
    order = [0, *windows] if seed % 2 else [*reversed(windows), 0]
    runs = {k: measure(scratch, overrides, seed, k) for k in order}
    synchronous, by_step = runs[0]
    speeds = replace(
        asyncio.run(calibrate(config, synchronous, scratch / f"replays-{seed}")),
        **learner_parts(synchronous, by_step),
        deliver_s=statistics.median(line["seconds_to_active"] for line in synchronous.lines[1:]),
        flip_s=statistics.mean(line["generation_stall_s"] for line in synchronous.lines[1:]),
    )
    setup = simulate.Setup(
        config.rollout.nodes, config.rollout.concurrency_bounds[1], config.learner.groups_per_step,
        config.rollout.group_size, 0, len(synchronous.lines),
    )  # fmt: skip
    modes = []
    for k, (job, by_step) in sorted(runs.items()):
        mode = {"staleness": k, "wall_s": round(job.after_first_s, 3), "learner_idle_s": round(job.idle_s, 3)}
        mode["simulated_s"] = simulate.simulate(replace(setup, staleness=k), speeds, lengths_of(by_step)).wall_s
        modes.append(mode)  # the synchronous one comes first
        mode["gain"] = modes[0]["wall_s"] / mode["wall_s"]
        mode["simulated_gain"] = modes[0]["simulated_s"] / mode["simulated_s"]
        mode["share_of_simulated"] = mode["gain"] / mode["simulated_gain"]
    return {"seed": seed, "speeds": asdict(speeds), "modes": modes}


@harness.script(steps=24, rounds=3, staleness=[4, 8])
def main(args: harness.Options) -> harness.Figures:
    scratch = harness.scratch()
    model, dataset = tailed_environment.build(scratch / "assets")
    overrides = [f"model.path={model}", f"tasks.dataset={dataset}", f"run.steps={args.steps}"]
    config = load_config(CONFIG, overrides)
    rounds = []
    for seed in range(1, args.rounds + 1):
        rounds.append(measure_round(scratch, overrides, seed, config, args.staleness))
        print(json.dumps(rounds[-1]), flush=True)
    return {"steps": args.steps, "rounds": rounds}
