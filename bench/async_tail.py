"""A heavy-tailed workload, synchronous and asynchronous, with real processes; and what the simulator says of it.

    python bench/async_tail.py             about seven minutes; --steps 12 --rounds 1 for a quick look
    python bench/async_tail.py --staleness 8 --rounds 1 --name async_tail_k8    with a wider window

1. The engine alone: seconds of an engine step by running requests, and of a call (bench/simulate.py's Speeds).
2. `slipstream up` with staleness.max 0 and K on the same problems, in turn. The learner's parts come from the
   synchronous run's metrics, the lengths of every episode from the recorded groups of each run.
3. The simulation of each run with its own lengths. Writes bench/results/async_tail.json.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import jobs
import machine
import numpy as np
import simulate
import tailed_environment

from broker.recording import open_recording
from common.config import Config
from common.config_loading import load_config
from common.rollouts import Sample, decode_group
from common.run_dir import RunDir
from launch.cores import available_cores, plan_cores
from launch.roles import thread_environment
from launch.supervisor import pin

CONFIG = jobs.ROOT / "bench" / "async_tail.yaml"
REQUESTS = (1, 4, 16, 48, 96, 128)
DECODED = 96  # tokens a request when decoding is timed
CALL_ROUNDS = 4


def turns_of(sample: Sample) -> simulate.Episode:
    """Sampled tokens of each turn, from the runs of ones in the loss mask."""
    mask = np.concatenate([[0], sample.loss_mask.numpy().astype(np.int8), [0]])
    edges = np.flatnonzero(np.diff(mask))
    return tuple(int(end - start) for start, end in zip(edges[::2], edges[1::2], strict=True))


def lengths_of(run: RunDir, config: Config) -> dict[int, list[simulate.Episode]]:
    """Episodes of every task that a step of the run trained on, by serial."""
    found: dict[int, list[simulate.Episode]] = {}
    with open_recording(run, config) as recording:
        for groups in recording.steps.values():
            for group in groups:
                decoded = decode_group(group.read().payload)
                found[group.task.serial] = [turns_of(sample) for sample in decoded.samples]
    return found


def calibrate(config: Config) -> tuple[float, float, float, list[dict[str, float]]]:
    """(step_s, request_s, call_s, what was measured) of the engine, on the cores that `up` gives it."""
    import os

    os.environ.update(thread_environment(config.rollout.threads))
    learner = config.learner.world_size * config.learner.threads
    cores = plan_cores(available_cores(), learner, [config.rollout.threads]).nodes[0]
    if cores is not None:
        pin(os.getpid(), cores)
    return asyncio.run(_calibrate(config))


async def _calibrate(config: Config) -> tuple[float, float, float, list[dict[str, float]]]:
    from rollout_fleet.engine import Engine

    engine = Engine(config, weights="folder", stop_token_ids=[])
    await engine.start()
    prompt = list(range(10, 26))

    async def seconds(requests: int, tokens: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(prompt, tokens) for _ in range(requests)))
        return time.perf_counter() - began

    try:
        await seconds(4, 16)  # warm
        measured = []
        for requests in REQUESTS:
            decode_s = min([await seconds(requests, DECODED) for _ in range(2)])
            call_s = min([await seconds(requests, 1) for _ in range(CALL_ROUNDS)])
            measured.append(
                {"requests": requests, "step_s": (decode_s - call_s) / (DECODED - 1), "call_s": call_s / requests}
            )
    finally:
        await engine.shutdown()
    counts = np.array([m["requests"] for m in measured], dtype=float)
    steps = np.array([m["step_s"] for m in measured])
    weights = 1 / steps  # relative errors count
    design = np.stack([np.ones_like(counts), counts], axis=1)
    step_s, request_s = np.linalg.lstsq(design * weights[:, None], steps * weights, rcond=None)[0]
    calls = statistics.median(m["call_s"] for m in measured[2:])
    call_s = max(0.0, calls - step_s / REQUESTS[-2])
    return max(float(step_s), 1e-4), max(float(request_s), 0.0), call_s, measured


def learner_parts(job: jobs.Job) -> tuple[float, float]:
    """(train_s, train_token_s): the learner's time without waiting, a step and a sampled token."""
    lines = job.lines[1:]
    busy = np.array([line["step_s"] - line["learner_idle_s"] for line in lines])
    tokens = np.array([line["tokens_trained"] + line["tokens_expired"] for line in lines], dtype=float)
    spread = tokens - tokens.mean()
    slope = max(0.0, float((spread * busy).sum() / max((spread**2).sum(), 1e-9)))
    return max(0.0, float(busy.mean() - slope * tokens.mean())), slope


def figures(job: jobs.Job) -> dict[str, float]:
    return {
        "wall_after_first_step_s": round(job.lines[-1]["time_s"] - job.lines[0]["time_s"], 3),
        "learner_idle_s": round(job.total("learner_idle_s") - job.lines[0]["learner_idle_s"], 3),
        "tokens": int(job.total("tokens_trained") + job.total("tokens_expired")),
        "length_mean": round(statistics.mean(x["length_mean"] for x in job.lines), 1),
        "length_max": max(x["length_max"] for x in job.lines),
        "staleness_mean": round(statistics.mean(x["staleness_mean"] for x in job.lines), 3),
        "tokens_expired": int(job.total("tokens_expired")),
        "seconds_to_active": round(statistics.median(x["seconds_to_active"] for x in job.lines[1:]), 4),
    }


def measure(scratch: Path, overrides: list[str], seed: int, staleness: int) -> tuple[jobs.Job, simulate.Lengths]:
    run_dir = scratch / f"k{staleness}-{seed}"
    words = [*overrides, f"run.seed={seed}", f"staleness.max={staleness}"]
    job = jobs.run(str(CONFIG), run_dir, *words)
    config = load_config(run_dir / "config.yaml")
    known = lengths_of(RunDir(run_dir), config)
    spare = list(known.values())
    return job, lambda serial: known.get(serial) or spare[serial % len(spare)]  # the last ones were never trained on


def pair(scratch: Path, overrides: list[str], seed: int, config: Config, engine: tuple[float, float, float]) -> dict:
    """Both modes once, and their simulation."""
    order = (0, config.staleness.max) if seed % 2 else (config.staleness.max, 0)
    runs = {k: measure(scratch, overrides, seed, k) for k in order}
    (sync, sync_lengths), (async_, async_lengths) = runs[0], runs[config.staleness.max]
    train_s, train_token_s = learner_parts(sync)
    deliver_s = figures(sync)["seconds_to_active"]
    speeds = simulate.Speeds(*engine, train_s, train_token_s, deliver_s)
    shape = dict(nodes=config.rollout.nodes, concurrency=config.rollout.concurrency_bounds[1],
                 groups_per_step=config.learner.groups_per_step, group_size=config.rollout.group_size,
                 steps=len(sync.lines))  # fmt: skip
    walls = {
        "synchronous": simulate.simulate(simulate.Setup(staleness=0, **shape), speeds, sync_lengths).wall_s,
        "asynchronous": simulate.simulate(
            simulate.Setup(staleness=config.staleness.max, **shape), speeds, async_lengths
        ).wall_s,
    }
    measured = {"synchronous": figures(sync), "asynchronous": figures(async_)}
    took = {name: found["wall_after_first_step_s"] for name, found in measured.items()}
    gains = took["synchronous"] / took["asynchronous"], walls["synchronous"] / walls["asynchronous"]
    return {
        "seed": seed,
        "measured": measured,
        "speeds": asdict(speeds),
        "simulated_wall_s": {name: round(wall, 3) for name, wall in walls.items()},
        "measured_over_simulated": {name: round(took[name] / walls[name], 4) for name in walls},
        "gain": round(gains[0], 4),
        "simulated_gain": round(gains[1], 4),
        "share_of_simulated_gain": round(gains[0] / gains[1], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=4, help="staleness.max of the asynchronous runs")
    parser.add_argument("--name", default="async_tail")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="slipstream-bench-"))
    model, dataset = tailed_environment.build(scratch / "assets")
    overrides = [f"model.path={model}", f"tasks.dataset={dataset}", f"run.steps={args.steps}"]
    overrides.append(f"staleness.max={args.staleness}")
    config = load_config(CONFIG, overrides)
    step_s, request_s, call_s, measured = calibrate(config)
    print(json.dumps({"step_s": step_s, "request_s": request_s, "call_s": call_s}), flush=True)
    pairs = []
    for seed in range(1, args.rounds + 1):
        pairs.append(pair(scratch, overrides, seed, config, (step_s, request_s, call_s)))
        print(json.dumps(pairs[-1]), flush=True)
    result = {
        "machine": machine.describe(),
        "steps": args.steps,
        "calibration": measured,
        "pairs": pairs,
        "gain_median": statistics.median(p["gain"] for p in pairs),
        "simulated_gain_median": statistics.median(p["simulated_gain"] for p in pairs),
        "share_of_simulated_gain_median": statistics.median(p["share_of_simulated_gain"] for p in pairs),
    }
    print(jobs.write(args.name, result))


if __name__ == "__main__":
    main()
