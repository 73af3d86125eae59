"""The game of several turns, from a random model: python bench/guessing.py [--seeds 1 2 3].

Per seed: warm start, reinforcement learning with configs/guessing.yaml, accuracy, and the number of episodes that
several policy versions sampled. RUN folders under runs/ must not exist yet. A seed takes about six minutes on two
cores. Writes bench/results/guessing.json and, for the first seed, docs/img/guessing.png.
"""

import shutil

import harness
from harness import python


def run(seed: int) -> dict:
    """One seed; raises RuntimeError when its folders exist or a part of it fails."""
    assets, warm, folder = (f"runs/{name}-seed{seed}" for name in ("assets", "guessing-sft", "guessing"))
    if (harness.ROOT / folder).exists():
        raise RuntimeError(f"{harness.ROOT / folder} exists; it would not run again")
    python("-m", "launch.quickstart.assets", "--out", assets, "--seed", seed)
    data = f"{assets}/number_guessing"
    own = (f"run.seed={seed}", f"run.dir={warm}", f"model.path={assets}/model", f"tasks.dataset={data}/sft.jsonl")
    python("-m", "launch.cli", "sft", "configs/guessing-sft.yaml", *own)
    tasks = (f"tasks.dataset={data}/train.jsonl", f"evaluation.datasets=[{data}/held_out.jsonl]")
    own = (f"run.seed={seed}", f"model.path={warm}/model")
    job = harness.run("configs/guessing.yaml", harness.ROOT / folder, *own, *tasks, timeout_s=3600)
    for action in ("eval", "report"):
        python("-m", "launch.cli", action, folder)
    return figures(seed, job)


def figures(seed: int, job: harness.Job) -> dict:
    mixed = [round(line["mixed_version_fraction"] * (line["samples"] - line["samples_failed"])) for line in job.lines]
    return {
        "seed": seed,
        "steps": len(job.lines),
        **job.progress(0.85),
        **job.evaluation(),
        "training_s": round(job.wall_s, 1),
        "success_first_5": job.reward(slice(5)),
        "success_last_10": job.reward(slice(-10, None)),
        "episodes": job.total("samples"),
        "episodes_of_several_versions": sum(mixed),
        "turns_mean": round(job.mean("turns_mean"), 2),
    }


@harness.script(seeds=[1])
def main(options: harness.Options) -> harness.Figures:
    runs = [run(seed) for seed in options.seeds]
    plots = harness.ROOT / f"runs/guessing-seed{options.seeds[0]}/report/over_steps.png"
    shutil.copy(plots, harness.ROOT / "docs/img/guessing.png")
    return {"rounds": len(runs), "runs": runs}
