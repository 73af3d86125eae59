"""The multi-turn example, from a random model: python bench/guessing.py [--seeds 1 2 3].

Per seed: warm start, reinforcement learning with configs/guessing.yaml, accuracy, and how many episodes were sampled by
more than one policy version. RUN folders lie under runs/, which must not be there yet; six minutes a seed on two cores
that others use as well. Writes bench/results/guessing.json and, of the first seed, docs/img/guessing.png.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys

import jobs
import machine


def command(*words: str) -> None:
    """`python -m WORDS`; raises RuntimeError with the output's tail."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=jobs.ROOT, capture_output=True, text=True, timeout=3600)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(words)} exited with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def run(seed: int) -> dict:
    """One seed; raises RuntimeError when its folders are there or a part of it fails."""
    assets, warm, folder = (f"runs/{name}-seed{seed}" for name in ("assets", "guessing-sft", "guessing"))
    if (jobs.ROOT / folder).exists():
        raise RuntimeError(f"{jobs.ROOT / folder} exists; it would not run again")
    command("launch.quickstart.assets", "--out", assets, "--seed", str(seed))
    data = f"tasks.dataset={assets}/number_guessing"
    own = (f"run.seed={seed}", f"run.dir={warm}", f"model.path={assets}/model", f"{data}/sft.jsonl")
    command("launch.cli", "sft", "configs/guessing-sft.yaml", *own)
    tasks = (f"{data}/train.jsonl", f"tasks.eval_dataset={assets}/number_guessing/held_out.jsonl")
    own = (f"run.seed={seed}", f"run.dir={folder}", f"model.path={warm}/model", *tasks)
    command("launch.cli", "up", "configs/guessing.yaml", *own)
    command("launch.cli", "eval", folder)
    command("launch.cli", "report", folder)
    return figures(seed, jobs.read(jobs.ROOT / folder))


def figures(seed: int, job: jobs.Job) -> dict:
    """What the page says of a run."""
    rewards = [line["reward_mean"] for line in job.lines]
    evaluation = json.loads((job.run_dir / "eval.json").read_text())
    mixed = [round(line["mixed_version_fraction"] * (line["samples"] - line["samples_failed"])) for line in job.lines]
    return {
        "seed": seed,
        "steps": len(job.lines),
        "training_s": round(job.wall_s, 1),
        "success_first_5": round(statistics.mean(rewards[:5]), 3),
        "success_last_10": round(statistics.mean(rewards[-10:]), 3),
        "steps_to_0.85": job.steps_to_reward(0.85),
        "greedy_accuracy": evaluation["greedy_accuracy"],
        "sampled_accuracy": evaluation["sampled_accuracy"],
        "episodes": sum(line["samples"] for line in job.lines),
        "episodes_of_several_versions": sum(mixed),
        "steps_with_such_episodes": sum(count > 0 for count in mixed),
        "turns_mean": round(statistics.mean(line["turns_mean"] for line in job.lines), 2),
        "staleness_max": max(line["staleness_max"] for line in job.lines),
        "tokens_expired": job.total("tokens_expired"),
        "success_by_step": [round(reward, 3) for reward in rewards],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    results = []
    for seed in args.seeds:
        results.append(run(seed))
        print(json.dumps({k: v for k, v in results[-1].items() if k != "success_by_step"}), flush=True)
    shutil.copy(
        jobs.ROOT / f"runs/guessing-seed{args.seeds[0]}/report/overview.png", jobs.ROOT / "docs/img/guessing.png"
    )
    print(jobs.write("guessing", {"machine": machine.describe(), "runs": results}))


if __name__ == "__main__":
    main()
