"""PPO with a critic against GRPO on the number game with rewards by turns, at equal samples, over seeds.

    python bench/critic_study.py [--seeds 1 2 3] [--ways grpo token turn] [--budget-s 3600]

A run is a whole job with configs/guessing-ppo.yaml, on both cores. Ways differ in their advantages alone: game,
rewards, samples of a step, learning rate and loss are the same. GRPO compares the sums of an episode's rewards within a
group. `token` and `turn` are the levels of learner.critic. The share of found numbers counts, not the reward. Steps,
seconds and samples count until its smoothed mean reaches LEVEL. Steps in which the critic alone trains count, too.

Each run is a file under runs/critic-study, so that the same command continues where it stopped, while commit and
arguments are the same. It first says how long it will take. With `--budget-s` it begins no run that would end later,
and exits with 1 while some are missing. Words that are no options override the config of every run. The model is made
first, unless it is there. Short mode: run.steps=2 learner.critic.warmup_steps=1 --dry --seeds 1.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import harness
import trl_comparison

CONFIG = "configs/guessing-ppo.yaml"
CELLS = harness.ROOT / "runs" / "critic-study"
LEVEL = 0.8
WAYS = {
    "grpo": ["learner.critic=null", "learner.loss.advantage=grpo"],
    "token": [],
    "turn": ["learner.critic.level=turn"],
}
CRITIC = "learner.critic."  # words that begin so are not for a way without one


def overrides(way: str, seed: int, words: Sequence[str]) -> list[str]:
    own = WAYS[way]
    kept = [word for word in words if "learner.critic=null" not in own or not word.startswith(CRITIC)]
    return [f"run.seed={seed}", *own, *kept]


def measured(way: str, seed: int, words: Sequence[str]) -> harness.Figures:
    """One job; `times_s` are the ends of steps since the first lease."""
    job = harness.run(CONFIG, harness.scratch() / "run", *overrides(way, seed, words), timeout_s=3600)
    return {
        "found": [round(line["environment"]["found"], 4) for line in job.lines],
        "rewards": [round(reward, 4) for reward in job.rewards],
        "times_s": [round(line["time_s"] - job.began_s, 2) for line in job.lines],
        "samples_per_step": job.lines[0]["samples"],
    }


def cell_name(way: str, seed: int) -> str:
    return f"{way}-{seed}"


def order(ways: Sequence[str], seeds: Sequence[int]) -> dict[str, tuple[str, int]]:
    """Way and seed by the cell's name; each seed begins with another way."""
    turns = [(turn % len(ways), seed) for turn, seed in enumerate(seeds)]
    return {cell_name(way, seed): (way, seed) for i, seed in turns for way in [*ways[i:], *ways[:i]]}


def row(way: str, runs: Sequence[harness.Figures]) -> dict[str, Any]:
    """The values of all seeds, and their medians where every seed reached the level."""
    made: dict[str, Any] = {"way": way, **harness.reached_each(runs, "found", LEVEL)}
    for name, part in (("first_5", slice(5)), ("last_10", slice(-10, None))):
        made[f"found_{name}"] = [round(statistics.mean(figures["found"][part]), 4) for figures in runs]
    return made


def told(found: harness.Figures) -> harness.Figures:
    return harness.reached(found, "found", LEVEL)


def measure_all(options: harness.Options) -> dict[str, harness.Figures]:
    """All runs by name, one after the other; exits with 1 when the budget leaves some out."""
    words = list(options.overrides)
    wanted = {name: (*cell, words) for name, cell in order(options.ways, options.seeds).items()}
    return harness.Cells(CELLS, words).complete(wanted, measured, options.budget_s, told)


@harness.script(ways=[*WAYS], seeds=[1, 2, 3], budget_s=86400.0, overrides=())
def main(options: harness.Options) -> harness.Figures:
    trl_comparison.prepare(trl_comparison.WORKLOADS["turns"])
    found = measure_all(options)
    rows = [row(way, [found[cell_name(way, seed)] for seed in options.seeds]) for way in options.ways]
    curves = {name: figures["found"] for name, figures in found.items()}
    return {"rounds": len(options.seeds), "level": LEVEL, "rows": rows, "found": curves}
