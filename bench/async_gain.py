"""Async against synchronous: the quickstart at staleness.max 0 and 2, same seeds, one after the other in pairs.

For each pair: wall-clock to the same number of steps and to reward 0.9, and the ideal that the measured parts
allow, max(T_gen, T_train) / (T_gen + T_train). The parts come from the synchronous run, where they do not overlap:
the learner's idle time is generation (with the flip), the rest of each step is training.
Writes bench/results/async_gain.json.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import jobs
import machine


def figures(job: jobs.Job) -> dict:
    idle = job.total("learner_idle_s") - job.lines[0]["learner_idle_s"]
    steps = job.total("step_s") - job.lines[0]["step_s"]
    return {
        "wall_s": round(job.wall_s, 2),
        "wall_after_first_step_s": round(job.lines[-1]["time_s"] - job.lines[0]["time_s"], 2),
        "seconds_to_0.9": job.seconds_to_reward(0.9),
        "steps_to_0.9": job.steps_to_reward(0.9),
        "learner_idle_s": round(idle, 2),
        "learner_busy_s": round(steps - idle, 2),
        "reward_first_5": round(statistics.mean(x["reward_mean"] for x in job.lines[:5]), 4),
        "reward_last_10": round(statistics.mean(x["reward_mean"] for x in job.lines[-10:]), 4),
        "staleness_mean": round(statistics.mean(x["staleness_mean"] for x in job.lines), 3),
        "staleness_max": max(x["staleness_max"] for x in job.lines),
        "generation_stall_s": round(job.total("generation_stall_s"), 3),
        "curve": [round(x["reward_mean"], 3) for x in job.lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--name", default="async_gain")
    parser.add_argument("--runs", type=Path, help="where to put the runs (default: a temporary folder)")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    scratch = args.runs or Path(tempfile.mkdtemp(prefix="slipstream-bench-"))
    pairs = []
    for i, seed in enumerate(args.seeds):
        runs = {}
        for bound in (0, 2) if i % 2 == 0 else (2, 0):
            job = jobs.run(
                args.config, scratch / f"s{bound}-{seed}", f"run.seed={seed}", f"staleness.max={bound}", *args.overrides
            )
            runs[bound] = figures(job)
        generate, train = runs[0]["learner_idle_s"], runs[0]["learner_busy_s"]
        ideal = max(generate, train) / (generate + train)
        ratio = runs[2]["wall_after_first_step_s"] / runs[0]["wall_after_first_step_s"]
        pairs.append(
            {
                "seed": seed,
                "synchronous": runs[0],
                "asynchronous": runs[2],
                "ideal_ratio": round(ideal, 4),
                "measured_ratio": round(ratio, 4),
                "share_of_ideal_gain": round((1 / ratio - 1) / (1 / ideal - 1), 4),
            }
        )
        print(f"seed {seed}: async/sync wall {ratio:.3f}, ideal {ideal:.3f}", flush=True)
    result = {
        "machine": machine.describe(),
        "config": args.config,
        "overrides": args.overrides,
        "pairs": pairs,
        "measured_ratio_median": statistics.median(p["measured_ratio"] for p in pairs),
        "ideal_ratio_median": statistics.median(p["ideal_ratio"] for p in pairs),
    }
    print(jobs.write(args.name, result))


if __name__ == "__main__":
    main()
