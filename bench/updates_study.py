"""Gains from several updates per batch: the quickstart task at constant lags, with and without clipping.

    python bench/updates_study.py [--workers 2] [--budget-s 3600]

Runs are those of correction_study.py: step s trains on groups that version max(0, s - lag) sampled. They use the
product's engine and learner, each in a process of its own on a core of its own. Two runs differ in the lag, in the
number of updates per batch, and in whether ratios are clipped. Steps, seconds and samples count until the smoothed
reward of the sampling policy reaches LEVEL. The schedule counts updates, so every way has the same learning rate at the
same step after the warm-up. The model is made first, as the quickstart makes it, unless it is there.

Each run is a file under runs/updates-study, so that the same command continues where it stopped, while commit and
arguments are the same. It first says how long it will take. With `--budget-s` it begins no run that would end later,
and exits with 1 while some are missing. Words that are no options override the config of every run. Short mode:
run.steps=2 --dry --lags 2 --seeds 1 --ways 1 2x1.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import correction_study
import harness
import trl_comparison

LEVEL = 0.9
CELLS = harness.ROOT / "runs" / "updates-study"
WAYS = ["1", "1x2", "1x4", "2x1", "4x1"]  # epochs x minibatches; 1: one update
UNCLIPPED = ["learner.loss.clip_low=1", "learner.loss.clip_high=1000000"]


def shape(way: str) -> tuple[int, int]:
    """(epochs, minibatches)."""
    epochs, _, parts = way.partition("x")
    return int(epochs), int(parts or 1)


def overrides(way: str, clip: bool, seed: int) -> list[str]:
    epochs, parts = shape(way)
    words = [f"run.seed={seed}", f"learner.epochs={epochs}", f"learner.minibatches={parts}"]
    return words if clip else [*words, *UNCLIPPED]


def measured(way: str, clip: bool, lag: int, seed: int, words: Sequence[str]) -> harness.Figures:
    """One run, in a process of its own."""
    asked = [*overrides(way, clip, seed), *words]
    return harness.apart(correction_study.trained, asked, lag, **correction_study.ENVIRONMENT)


def cell_name(way: str, clip: bool, lag: int, seed: int) -> str:
    return f"{way}-{'clipped' if clip else 'free'}-{lag}-{seed}"


def order(ways: Sequence[str], lags: Sequence[int], seeds: Sequence[int]) -> list[tuple[str, bool, int, int]]:
    """One update has nothing to clip, and several epochs are refused without a bound; these are measured once."""
    clips = [(way, clip) for way in ways for clip in (True, False) if clip or (way != "1" and shape(way)[0] == 1)]
    return [(way, clip, lag, seed) for seed in seeds for lag in lags for way, clip in clips]


def row(way: str, clip: bool, lag: int, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The values of all seeds, and their medians where every seed reached the level."""
    epochs, parts = shape(way)
    made: dict[str, Any] = {"way": way, "updates": epochs * parts, "epochs": epochs, "minibatches": parts}
    made |= {"clip": clip, "lag": lag, **harness.reached_each(runs, "rewards", LEVEL)}
    made["held_out"] = [figures["held_out"] for figures in runs]
    for name in ("clipped", "batch_kl"):
        made[name] = round(statistics.mean(figures[name] for figures in runs), 6)
    return made


def told(found: harness.Figures) -> harness.Figures:
    return harness.reached(found, "rewards", LEVEL) | {"held_out": found["held_out"]}


def measure_all(options: harness.Options) -> dict[tuple[str, bool, int, int], harness.Figures]:
    """All runs; exits with 1 when the budget leaves some out."""
    words = list(options.overrides)
    wanted = {cell_name(*cell): (*cell, words) for cell in order(options.ways, options.lags, options.seeds)}
    found = harness.Cells(CELLS, words).complete(wanted, measured, options.budget_s, told, options.workers)
    return {wanted[name][:4]: figures for name, figures in found.items()}


@harness.script(workers=2, ways=WAYS, lags=[0, 2, 8], seeds=[1, 2, 3], budget_s=86400.0, overrides=())
def main(options: harness.Options) -> harness.Figures:
    trl_comparison.prepare(trl_comparison.WORKLOADS["short"])
    found = measure_all(options)
    keys = dict.fromkeys(cell[:3] for cell in found)
    rows = [row(*key, [figures for cell, figures in found.items() if cell[:3] == key]) for key in keys]
    return {"rounds": len(options.seeds), "level": LEVEL, "rows": rows}
