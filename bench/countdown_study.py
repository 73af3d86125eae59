"""Countdown at constant lags, with and without correction, beside TRL with vLLM at equal samples; over seeds.

    python bench/countdown_study.py --trl-python .venv-trl/bin/python [--budget-s 3600]

The task, the model and its warm start are those of examples/countdown. They are made in runs/countdown first, unless
they are there from the same files. Our runs are those of correction_study.py: the product's engine and learner at an
exact lag. TRL's run is GRPOTrainer with vLLM in its process, which is synchronous. All have the same model, problems,
batch, optimizer and learning rate, which was chosen at lag 0. Each run is a process on a core of its own, `--workers`
at once.

Held-out accuracy is the mean reward of all samples, `rollout.group_size` of each held-out problem at temperature 1.
Our engine samples them from TRL's trained model, too.

Each run is a file under runs/countdown/cells, so that the same command continues where it stopped, while commit and
arguments are the same. It first says how long it will take. With `--budget-s` it begins no run that would end later,
and exits with 1 while some are missing. `--also COMMIT ...` takes the runs of these commits, too: give it where nothing
that they depend on has changed. Also draws docs/img/countdown.png. Words that are no options override the
config of every run. Short mode: run.steps=4 --dry --seeds 1.
"""

import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import correction_study
import harness
import trl_comparison
from correction_study import ENVIRONMENT, VARIANTS

from common.config.loading import load_config
from common.config.schema import Config

EXAMPLE = harness.ROOT / "examples" / "countdown"
CONFIG = str(EXAMPLE / "config.yaml")
MADE = harness.ROOT / "runs" / "countdown"
sys.path.append(str(EXAMPLE))  # for its environment, in this process and those that it spawns
FIRST, LAST = 5, 10  # steps whose mean reward is told
MAKERS = ("make_data.py", "warm_start.yaml")
START, TRL = "start", "trl"


@dataclass(frozen=True)
class Way:
    """One of our ways to train."""

    lag: int
    correction: str
    updates: int = 1

    @property
    def overrides(self) -> list[str]:
        return [*VARIANTS[self.correction], f"learner.minibatches={self.updates}"]


WAYS = {
    "0": Way(0, "tis"),
    "4": Way(4, "tis"),
    "4-uncorrected": Way(4, "none"),
    "4-two-updates": Way(4, "tis", updates=2),
    "16": Way(16, "tis"),
    "16-uncorrected": Way(16, "none"),
    "16-behavior": Way(16, "ppo"),
}
PANELS = {
    "staleness 0": {"0": "Slipstream", TRL: "TRL with vLLM"},
    "staleness 4": {"4": "corrected", "4-uncorrected": "uncorrected", "4-two-updates": "corrected, two updates"},
    "staleness 16": {"16": "corrected", "16-uncorrected": "uncorrected", "16-behavior": "clipped to the sampler"},
}


def prepare() -> None:
    """Problems, the random model and the warm-started one, as the example's README makes them."""
    made = (MADE / "warm-start" / "model" / "config.json").exists()
    if not made or any((MADE / file).read_text() != (EXAMPLE / file).read_text() for file in MAKERS):
        shutil.rmtree(MADE / "warm-start", ignore_errors=True)
        shutil.copytree(EXAMPLE, MADE, dirs_exist_ok=True)
        harness.python("make_data.py", cwd=MADE)
        harness.python("-m", "launch.cli", "sft", "warm_start.yaml", cwd=MADE)


def words_of(seed: int, extra: Sequence[str]) -> list[str]:
    """The overrides that all our runs of a seed have."""
    files = {"model.path": "warm-start/model", "tasks.dataset": "train.jsonl"}
    paths = [f"{key}={MADE / file}" for key, file in files.items()]
    return [f"run.seed={seed}", *paths, f"evaluation.datasets=[{MADE / 'held_out.jsonl'}]", *extra]


def measured(way: str, seed: int, options: harness.Options) -> harness.Figures:
    """One run."""
    words = words_of(seed, options.overrides)
    if way == START:
        return {"held_out": held_out(words)}
    if way == TRL:
        return trained_by_trl(words, options)
    asked = ([*words, *WAYS[way].overrides], WAYS[way].lag, CONFIG)
    return harness.apart(correction_study.trained, *asked, **ENVIRONMENT)


def held_out(words: Sequence[str]) -> float:
    return harness.apart(correction_study.held_out, list(words), CONFIG, **ENVIRONMENT)


def trained_by_trl(words: Sequence[str], options: harness.Options) -> harness.Figures:
    config = load_config(Path(CONFIG), words, Config)
    batch, group_size = config.learner.groups_per_step, config.rollout.group_size
    folder = harness.scratch()
    asked = {
        "way": "colocate", "model": config.model.path, "dataset": config.tasks.dataset, "threads": 1,
        "task": config.tasks.environment, "seed": config.run.seed, "steps": config.run.steps, "prompts": batch,
        "group-size": group_size, "max-tokens": config.rollout.max_tokens, "lr": config.learner.optimizer.lr,
        "warmup": config.learner.optimizer.warmup_steps,
        "save": folder,
    }  # fmt: skip
    paths = os.pathsep.join([str(EXAMPLE), harness.python_path()])
    curve = trl_comparison.ask_trl(asked, options, PYTHONPATH=paths)["curve"]
    final = held_out([*words, f"model.path={folder}"])
    shutil.rmtree(folder)
    return {
        "held_out": final,
        "rewards": [point["reward_mean"] for point in curve],
        "times_s": [point["time_s"] for point in curve],
        "samples_per_step": batch * group_size,
    }


def cell_name(way: str, seed: int) -> str:
    return f"{way}-{seed}"


def order(seeds: Sequence[int]) -> list[tuple[str, int]]:
    """The start once, then all ways of a seed before the next one's."""
    return [(START, seeds[0]), *((way, seed) for seed in seeds for way in (TRL, *reversed(WAYS)))]


def told(run: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one run that a row has."""
    rewards = run["rewards"]
    return {
        "reward_first": round(statistics.mean(rewards[:FIRST]), 3),
        "reward_last": round(statistics.mean(rewards[-LAST:]), 3),
        "samples": run["samples_per_step"] * len(rewards),
        "seconds": round(run["times_s"][-1], 1),
        "rewards": rewards,
    }


def row(way: str, start: float, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A way's settings, and its figures with one value a seed."""
    ours = WAYS.get(way)
    made: dict[str, Any] = {"way": way, "system": "Slipstream" if ours else "TRL with vLLM"}
    made |= {"lag": ours.lag if ours else 0, "correction": ours.correction if ours else "TRL's own"}
    made |= {"updates": ours.updates if ours else 1, "held_out_start": start}
    made["held_out"] = [run["held_out"] for run in runs]
    made["held_out_mean"] = round(statistics.mean(made["held_out"]), 4)
    made["commits"] = sorted({run["commit"] for run in runs})
    figures = [told(run) for run in runs]
    return made | {name: [one[name] for one in figures] for name in figures[0]}


def rows_of(found: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    start = found[cell_name(START, seeds[0])]["held_out"]
    return [row(way, start, [found[cell_name(way, seed)] for seed in seeds]) for way in (*WAYS, TRL)]


def shown(found: harness.Figures) -> harness.Figures:
    """The figures of one run that are printed; the start has its accuracy alone."""
    ends = {key: value for key, value in told(found).items() if key != "rewards"} if "rewards" in found else {}
    return ends | {"held_out": found["held_out"]}


def measure_all(options: harness.Options) -> dict[str, harness.Figures]:
    """All runs by name; exits with 1 when the budget leaves some out."""
    cells = harness.Cells(MADE / "cells", list(options.overrides), also=options.also)
    wanted = {cell_name(*cell): (*cell, options) for cell in order(options.seeds)}
    return cells.complete(wanted, measured, options.budget_s, shown, options.workers)


@harness.script(
    name="countdown", trl_python=str, workers=2, seeds=[1, 2, 3], budget_s=86400.0, timeout=900.0, also=[],
    overrides=(),
)  # fmt: skip
def main(options: harness.Options) -> harness.Figures:
    prepare()
    rows = rows_of(measure_all(options), options.seeds)
    if not options.dry:
        curves = {one["way"]: one["rewards"] for one in rows}
        panels = {title: {name: curves[way] for way, name in ways.items()} for title, ways in PANELS.items()}
        correction_study.plot(panels, harness.ROOT / "docs" / "img" / "countdown.png")
    shared = {"samples": rows[0]["samples"][0], "held_out_start": rows[0]["held_out_start"]}
    return {"rounds": len(options.seeds), "first": FIRST, "last": LAST, **shared, "rows": rows}
