"""Gains from correcting for staleness: the quickstart task at constant lags, with and without, over seeds.

Each run is bench/lagged_loop.py in a process of its own on a core of its own. Finished runs are kept in --folder, so
the study continues where it stopped. Words that are no options override the config of every run. Writes
bench/results/correction_study.json and docs/img/correction_study.png.

    python bench/correction_study.py --folder runs/correction-study [--workers 2] [--lags 0 2 8 32] [--seeds 1 2 3]
"""

import json
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness

VARIANTS = {
    "none": ["learner.loss.correction=none"],
    "tis": ["learner.loss.correction=tis"],
    "ppo": ["learner.loss.proximal=behavior", "learner.loss.correction=none"],
}
MEANING = {
    "none": "no correction: every token counts as if the current policy had sampled it",
    "tis": "importance weight of each token, truncated at 2 (the default)",
    "ppo": "proximal policy = behavior policy: the clipped ratio bounds the whole way",
}
LEVELS = (0.5, 0.8)


def run(folder: Path, extra: list[str], variant: str, lag: int, seed: int) -> dict:
    """The result of one run, which is kept in `folder`."""
    out = folder / f"{variant}-{lag}-{seed}.json"
    if not out.exists():
        words = [f"run.seed={seed}", *VARIANTS[variant], *extra]
        found = harness.apart(trained, words, lag, PYTHONWARNINGS="ignore")
        out.write_text(json.dumps(found))
        print(f"{out.stem}: held-out {found['held_out']}", flush=True)
    return json.loads(out.read_text())


def trained(words: list[str], lag: int) -> dict:
    """bench/lagged_loop.py in this process; it sets up vLLM when it is imported."""
    import lagged_loop

    return lagged_loop.train(words, lag)


def summary(results: list[dict]) -> dict:
    """Figures of one variant at one lag, one entry per seed."""
    out: dict = {"held_out": [r["held_out"] for r in results]}
    out["held_out_mean"] = round(statistics.mean(out["held_out"]), 4)
    out["reward_mean"] = [round(statistics.mean(p["reward"] for p in r["curve"]), 4) for r in results]
    for level in LEVELS:
        out[f"steps_to_{level}"] = [harness.steps_to([p["reward"] for p in r["curve"]], level) for r in results]
    out["ratio_max"] = max(p["ratio_max"] for r in results for p in r["curve"])
    out["drift_last_ten"] = round(statistics.mean(p["drift"] for r in results for p in r["curve"][-10:]), 4)
    return out


def plot(found: dict[str, dict[int, list[dict]]], path: Path) -> None:
    """Reward over steps, one panel per lag, mean over seeds with the range behind it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    lags = sorted(found["tis"])
    figure, panels = plt.subplots(1, len(lags), figsize=(3.4 * len(lags), 3.2), sharey=True, squeeze=False)
    for panel, lag in zip(panels[0], lags, strict=True):
        for variant, by_lag in found.items():
            rewards = [[p["reward"] for p in r["curve"]] for r in by_lag[lag]]
            smooth = np.array([np.convolve(row, np.ones(5) / 5, mode="valid") for row in rewards])
            steps = np.arange(smooth.shape[1]) + 5
            panel.plot(steps, smooth.mean(0), label=variant)
            panel.fill_between(steps, smooth.min(0), smooth.max(0), alpha=0.15)
        panel.set_title(f"staleness {lag}")
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("reward")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


@harness.script(folder=Path, workers=2, lags=[0, 2, 8, 32], seeds=[1, 2, 3], overrides=())
def main(words: harness.Options) -> harness.Figures:
    words.folder.mkdir(parents=True, exist_ok=True)
    # without lag every weight is 1 up to rounding: the variants coincide, and one seed of each shows it
    keys = [
        (v, lag, seed)
        for seed in words.seeds
        for lag in sorted(words.lags, reverse=True)
        for v in VARIANTS
        if lag > 0 or v == "tis" or seed == words.seeds[0]
    ]
    cores = iter(range(words.workers))
    # the processes that a thread starts inherit its core
    with ThreadPoolExecutor(words.workers, initializer=lambda: os.sched_setaffinity(0, [next(cores)])) as pool:
        results = list(pool.map(lambda key: run(words.folder, words.overrides, *key), keys))
    found: dict[str, dict[int, list[dict]]] = {}
    for (variant, lag, _), one in zip(keys, results, strict=True):
        found.setdefault(variant, {}).setdefault(lag, []).append(one)
    table = {v: {str(lag): summary(r) for lag, r in by_lag.items()} for v, by_lag in found.items()}
    task = "configs/quickstart.yaml, constant lag in place of the job's varying staleness"
    plot(found, harness.ROOT / "docs" / "img" / "correction_study.png")
    figures = {"rounds": len(words.seeds), "task": task, "overrides": words.overrides, "seeds": words.seeds}
    return figures | {"variants": MEANING, "figures": table}
