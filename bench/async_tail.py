"""A heavy-tailed workload, synchronous and asynchronous, with real processes; and what the simulator says of it.

    python bench/async_tail.py             twelve minutes on a quiet machine; --steps 12 --rounds 1 for a quick look

A round, all on the same machine:

1. `slipstream up` with staleness.max 0 and every window on the same problems. The learner's parts come from the
   synchronous run's metrics, the lengths of every episode from the recorded groups of each run.
2. The engine alone, and engine and learner beside each other (bench/calibration.py): the speeds of bench/simulate.py.
3. The simulation of each run with its own lengths: once with a machine for each side, once on one that they share.

Writes bench/results/async_tail.json.
"""

import asyncio
import itertools
import json
import statistics
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import harness
import simulate
import tailed_environment
from calibration import Beside, both, engine_alone, running_engine
from fitting import fit_positive

from broker.journal.recording import open_recording
from common.config.loading import load_config
from common.config.schema import Config
from common.process.run_dir import RunDir
from common.rollouts import Sample, decode_group

CONFIG = harness.ROOT / "bench" / "async_tail.yaml"


def turns_of(sample: Sample) -> simulate.Episode:
    """Sampled tokens of each turn, from the runs of ones in the loss mask."""
    runs = itertools.groupby(sample.loss_mask.numpy().tolist())
    return tuple(len(list(run)) for sampled, run in runs if sampled)


def lengths_by_step(run: RunDir, config: Config) -> dict[int, dict[int, list[simulate.Episode]]]:
    """Episodes of every task that a step of the run trained on, by step and serial."""
    with open_recording(run, config) as recording:
        return {
            step: {g.task.serial: [turns_of(s) for s in decode_group(g.stored.read()).samples] for g in groups}
            for step, groups in recording.steps.items()
        }


def learner_parts(job: harness.Job, by_step: dict[int, dict[int, list[simulate.Episode]]]) -> dict[str, float]:
    """The learner's part of the speeds: its seconds without waiting, fitted to every step's lengths."""
    rows, busy = [], []
    for line in job.lines[1:]:
        lengths = [sum(episode) for episodes in by_step[line["step"]].values() for episode in episodes]
        rows.append([1, sum(lengths), sum(length**2 for length in lengths)])
        busy.append(line["step_s"] - line["learner_idle_s"])
    return dict(zip(("train_s", "train_token_s", "train_pair_s"), fit_positive(rows, busy), strict=True))


def figures(job: harness.Job) -> dict[str, float]:
    return {
        "wall_s": round(job.after_first_s, 3),
        "learner_idle_s": round(job.idle_s, 3),
        "tokens": int(job.total("tokens_trained") + job.total("tokens_expired")),
        "length_mean": round(job.mean("length_mean"), 1),
        "length_max": job.largest("length_max"),
        "staleness_mean": round(job.mean("staleness_mean"), 3),
        "tokens_expired": int(job.total("tokens_expired")),
        "seconds_to_active": round(statistics.median(x["seconds_to_active"] for x in job.lines[1:]), 4),
    }


@dataclass(frozen=True)
class Run:
    """A finished job and the lengths that it drew."""

    job: harness.Job
    by_step: dict[int, dict[int, list[simulate.Episode]]]

    def lengths(self, serial: int) -> list[simulate.Episode]:
        """Lengths of a task; the last tasks of a run were never trained on and get those of another task."""
        return self._known.get(serial) or list(self._known.values())[serial % len(self._known)]

    @cached_property
    def _known(self) -> dict[int, list[simulate.Episode]]:
        return {serial: episodes for step in self.by_step.values() for serial, episodes in step.items()}


def measure(scratch: Path, overrides: list[str], seed: int, staleness: int) -> Run:
    run_dir = scratch / f"k{staleness}-{seed}"
    job = harness.run(str(CONFIG), run_dir, *overrides, f"run.seed={seed}", f"staleness.max={staleness}")
    return Run(job, lengths_by_step(RunDir(run_dir), load_config(run_dir / "config.yaml")))


async def calibrate(config: Config, synchronous: harness.Job, out: Path) -> tuple[simulate.Speeds, Beside]:
    """The engine's speeds, and what learner and engine cost each other."""
    async with running_engine(config) as engine:
        return await engine_alone(engine), await both(engine, synchronous.run_dir, config, out)


def measure_round(scratch: Path, overrides: list[str], seed: int, config: Config, windows: list[int]) -> dict:
    """Every mode once, and its simulation with its own lengths: on a machine for each side, and on this one."""
    order = [0, *windows] if seed % 2 else [*reversed(windows), 0]
    runs = {k: measure(scratch, overrides, seed, k) for k in order}
    synchronous = runs[0].job
    engine, beside = asyncio.run(calibrate(config, synchronous, scratch / f"replays-{seed}"))
    apart = replace(
        engine,
        **learner_parts(synchronous, runs[0].by_step),
        deliver_s=figures(synchronous)["seconds_to_active"],
        flip_s=statistics.mean(line["generation_stall_s"] for line in synchronous.lines[1:]),
    )
    shared = replace(apart, engine_shared=beside.engine, learner_shared=beside.learner)
    setup = simulate.Setup(
        config.rollout.nodes, config.rollout.concurrency_bounds[1], config.learner.groups_per_step,
        config.rollout.group_size, 0, len(synchronous.lines),
    )  # fmt: skip
    modes = []
    for k, run in sorted(runs.items()):
        mode = {"staleness": k, **figures(run.job)}
        for name, speeds in (("simulated_s", shared), ("simulated_apart_s", apart)):
            mode[name] = simulate.simulate(replace(setup, staleness=k), speeds, run.lengths).wall_s
        modes.append(mode)  # the synchronous one comes first
        mode["gain"] = modes[0]["wall_s"] / mode["wall_s"]
        mode["simulated_gain"] = modes[0]["simulated_s"] / mode["simulated_s"]
        mode["simulated_apart_gain"] = modes[0]["simulated_apart_s"] / mode["simulated_apart_s"]
        mode["share_of_simulated"] = mode["gain"] / mode["simulated_gain"]
    return {"seed": seed, "speeds": asdict(shared), "modes": modes}


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
