"""The quickstart, from its script, over several seeds: python bench/quickstart.py [--seeds 1 2 3].

Per seed: seconds after the installation, reward of the first 5 and last 10 steps, accuracy on held-out problems.
Runs in this checkout (RUN folders under runs/, which must not be there yet). Writes bench/results/quickstart.json.
"""

import argparse
import json
import re
import statistics
import subprocess

import jobs
import machine


def run(seed: int) -> dict:
    """One seed, set-up included; raises RuntimeError with the output's tail."""
    suffix = "" if seed == 1 else f"-seed{seed}"
    run_dir = jobs.ROOT / "runs" / f"quickstart{suffix}"
    if run_dir.exists():
        raise RuntimeError(f"{run_dir} exists; the quickstart would not run again")
    command = ["bash", "launch/quickstart.sh", f"run.seed={seed}"]
    done = subprocess.run(command, cwd=jobs.ROOT, capture_output=True, text=True, timeout=1800)
    said = re.search(r"finished (\d+) s after the installation", done.stdout)
    if done.returncode != 0 or said is None:
        raise RuntimeError(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    job = jobs.read(run_dir)
    rewards = [x["reward_mean"] for x in job.lines]
    evaluation = json.loads((run_dir / "eval.json").read_text())
    return {
        "seed": seed,
        "seconds_after_installation": int(said[1]),
        "reward_first_5": round(statistics.mean(rewards[:5]), 4),
        "reward_last_10": round(statistics.mean(rewards[-10:]), 4),
        "greedy_accuracy": evaluation["greedy_accuracy"],
        "sampled_accuracy": evaluation["sampled_accuracy"],
        "held_out_problems": evaluation["problems"],
        "training_s": round(job.wall_s, 1),
        "staleness_max": max(x["staleness_max"] for x in job.lines),
        "tokens_expired": job.total("tokens_expired"),
        "tokens_trained": job.total("tokens_trained"),
        "canary_max_difference": max(x["canary_max_difference"] for x in job.lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    results = []
    for seed in args.seeds:
        results.append(run(seed))
        print(json.dumps(results[-1]), flush=True)
    print(jobs.write("quickstart", {"machine": machine.describe(), "runs": results}))


if __name__ == "__main__":
    main()
