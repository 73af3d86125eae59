"""The cost of a weight flip, by the metrics of the jobs of bench/async_gain.py: python bench/flip_cost.py.

- share of a step for which the learner copies weights;
- time for which generation stalled;
- seconds from the optimizer step to the version being sampled from.

Short mode: run.steps=10 --seeds 1, with `model.path` and so on when the quickstart has not run.
"""

import statistics
from typing import Any

import harness
from async_gain import OPTIONS, in_pairs


def figures(job: harness.Job, _cpu_s: float) -> dict[str, Any]:
    """The first step is left out, because the engine starts in it."""
    lines = job.lines[1:]
    steps, stall, copies = (sum(x[name] for x in lines) for name in ("step_s", "generation_stall_s", "snapshot_s"))
    return {
        "stall_per_flip_ms": round(1000 * stall / len(lines), 3),
        "seconds_to_active_median": round(statistics.median(x["seconds_to_active"] for x in lines), 4),
        "learner_copy_share_of_step": round(copies / steps, 5),
    }


@harness.script(**OPTIONS)
def main(options: harness.Options) -> harness.Figures:
    found = in_pairs(options, figures)
    runs = [{"staleness_max": bound, **one} for bound, ones in found.items() for one in ones]
    return {"rounds": len(options.seeds), "runs": runs}
