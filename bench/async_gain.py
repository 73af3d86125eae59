"""Async against synchronous: the quickstart at staleness.max 0 and 2, same seeds, one after the other in pairs.

For each pair: seconds to the same number of steps and to reward 0.9, and the ratio that the measured parts allow,
max(T_gen, T_train) / (T_gen + T_train). The parts come from the synchronous run, where they do not overlap: the
learner's idle time is generation with the flip, the rest of each step is training.
Writes bench/results/async_gain.json.
"""

import statistics
import tempfile
from pathlib import Path

import harness


def figures(job: harness.Job) -> dict:
    idle = job.total("learner_idle_s") - job.lines[0]["learner_idle_s"]
    steps = job.total("step_s") - job.lines[0]["step_s"]
    return {
        "wall_s": round(job.wall_s, 2),
        "wall_after_first_step_s": round(job.lines[-1]["time_s"] - job.lines[0]["time_s"], 2),
        "seconds_to_0.9": job.seconds_to_reward(0.9),
        "steps_to_0.9": job.steps_to_reward(0.9),
        "learner_idle_s": round(idle, 2),
        "learner_busy_s": round(steps - idle, 2),
        "reward_first_5": round(statistics.mean(job.rewards[:5]), 4),
        "reward_last_10": round(statistics.mean(job.rewards[-10:]), 4),
        "staleness_mean": round(job.mean("staleness_mean"), 3),
        "staleness_max": job.largest("staleness_max"),
        "generation_stall_s": round(job.total("generation_stall_s"), 3),
        "curve": [round(reward, 3) for reward in job.rewards],
    }


def pair(seed: int, synchronous: dict, asynchronous: dict) -> dict:
    """Both runs of a seed, and their ratio."""
    generate, train = synchronous["learner_idle_s"], synchronous["learner_busy_s"]
    ideal = max(generate, train) / (generate + train)
    ratio = asynchronous["wall_after_first_step_s"] / synchronous["wall_after_first_step_s"]
    print(f"seed {seed}: async/sync wall {ratio:.3f}, ideal {ideal:.3f}", flush=True)
    return {
        "seed": seed,
        "synchronous": synchronous,
        "asynchronous": asynchronous,
        "ideal_ratio": round(ideal, 4),
        "measured_ratio": round(ratio, 4),
        "share_of_ideal_gain": round((1 / ratio - 1) / (1 / ideal - 1), 4),
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, help="folder for the runs; without it a temporary one")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    scratch = options.runs or Path(tempfile.mkdtemp(prefix="slipstream-bench-"))
    pairs = []
    for i, seed in enumerate(options.seeds):
        runs = {}
        for bound in (0, 2) if i % 2 == 0 else (2, 0):
            words = (f"run.seed={seed}", f"staleness.max={bound}", *options.overrides)
            runs[bound] = figures(harness.run(options.config, scratch / f"s{bound}-{seed}", *words))
        pairs.append(pair(seed, runs[0], runs[2]))
    harness.save("async_gain", options, {"rounds": len(pairs), "pairs": pairs})


if __name__ == "__main__":
    main()
