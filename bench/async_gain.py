"""Async against synchronous: the quickstart at staleness.max 0 and 2, same seeds, one after the other in pairs.

For each pair: seconds to the same steps and to reward 0.9, and the ratio that the measured parts allow. The parts are
those of the synchronous run, where they do not overlap. The learner's idle time T_gen is generation with the flip, the
rest of each step is T_train. Overlapped they take as long as the longer one, and as all processes' CPU time needs on
these cores: max(T_gen, T_train, CPU / cores) / (T_gen + T_train). `ideal_ratio_of_parts` leaves the CPU out.
"""

import os
from collections.abc import Callable
from typing import Any

import harness

WINDOWS = (0, 2)
OPTIONS = {"config": "configs/quickstart.yaml", "seeds": [1, 2, 3], "overrides": ()}


def in_pairs(options: harness.Options, figures: Callable[[harness.Job, float], dict[str, Any]]) -> dict[int, list[Any]]:
    """`figures` of a job and its CPU seconds after the first step, for every window and seed."""
    scratch = harness.scratch()

    def run(bound: int, seed: int) -> dict[str, Any]:
        words = (f"run.seed={seed}", f"staleness.max={bound}", *options.overrides)
        return figures(*harness.run_with_cpu(options.config, scratch / f"s{bound}-{seed}", *words))

    return harness.in_turns(WINDOWS, options.seeds, run)


def parts(job: harness.Job, cpu_s: float) -> dict[str, Any]:
    return {
        **job.progress(0.9),
        "wall_after_first_step_s": round(job.after_first_s, 2),
        "learner_idle_s": round(job.idle_s, 2),
        "learner_busy_s": round(job.busy_s, 2),
        "cpu_s": round(cpu_s, 2),
    }


def pair(seed: int, synchronous: dict[str, Any], asynchronous: dict[str, Any]) -> dict[str, Any]:
    """Both runs of a seed, and their ratio."""
    generate, train = synchronous["learner_idle_s"], synchronous["learner_busy_s"]
    cores_s = synchronous["cpu_s"] / (os.cpu_count() or 1)
    ideal = max(generate, train, cores_s) / (generate + train)
    ratio = asynchronous["wall_after_first_step_s"] / synchronous["wall_after_first_step_s"]
    return {
        "seed": seed,
        "synchronous": synchronous,
        "asynchronous": asynchronous,
        "ideal_ratio": round(ideal, 4),
        "ideal_ratio_of_parts": round(max(generate, train) / (generate + train), 4),
        "measured_ratio": round(ratio, 4),
        "share_of_ideal_gain": round((1 / ratio - 1) / (1 / ideal - 1), 4),
    }


@harness.script(**OPTIONS)
def main(options: harness.Options) -> harness.Figures:
    runs = in_pairs(options, parts)
    pairs = [pair(*both) for both in zip(options.seeds, *runs.values(), strict=True)]
    return {"rounds": len(pairs), "pairs": pairs}
