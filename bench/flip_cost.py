"""What a weight flip costs, from finished runs: python bench/flip_cost.py RUN [RUN ...].

Per run: generation stalled per flip, seconds from the optimizer step to the version being generated with, and the
shares of the step that these and the learner's copy of the weights take. Writes bench/results/flip_cost.json.
"""

import argparse
import json
import statistics
from pathlib import Path

import jobs
import machine


def figures(job: jobs.Job) -> dict:
    """Figures of one run; the first step is left out, it holds the start of the engine."""
    lines = job.lines[1:]
    steps = sum(x["step_s"] for x in lines)
    flips = len(lines)
    stall = sum(x["generation_stall_s"] for x in lines)
    return {
        "steps": len(job.lines),
        "publish_bytes": lines[-1]["publish_bytes"],
        "stall_per_flip_ms": round(1000 * stall / flips, 3),
        "stall_share_of_step": round(stall / steps, 5),
        "seconds_to_active_median": round(statistics.median(x["seconds_to_active"] for x in lines), 4),
        "seconds_to_active_share_of_step": round(sum(x["seconds_to_active"] for x in lines) / steps, 4),
        "publish_s_median": round(statistics.median(x["publish_s"] for x in lines), 4),
        "learner_copy_ms_median": round(1000 * statistics.median(x["snapshot_s"] for x in lines), 3),
        "learner_copy_share_of_step": round(sum(x["snapshot_s"] for x in lines) / steps, 5),
        "step_s_median": round(statistics.median(x["step_s"] for x in lines), 4),
        "canary_max_difference": max(x["canary_max_difference"] for x in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args()
    runs = []
    for path in args.runs:
        bound = next(x for x in (path / "config.yaml").read_text().splitlines() if x.strip().startswith("max:"))
        runs.append({"staleness_max": int(bound.split(":")[1]), **figures(jobs.read(path))})
        print(json.dumps(runs[-1]))
    print(jobs.write("flip_cost", {"machine": machine.describe(), "runs": runs}))


if __name__ == "__main__":
    main()
