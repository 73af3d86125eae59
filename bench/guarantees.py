"""Measures the faults of tests/faults: python bench/guarantees.py [--runs N] [--only NAME ...].

Plays every scenario N times with different seeds and writes bench/results/guarantees.json. With --only the figures of
the other scenarios, and their commits, are kept.
"""

import statistics
from typing import Any

import harness

from bench.figures import result
from tests.faults.scenario import Scenario, load_all, play


def measure(scenario: Scenario, runs: int) -> dict[str, Any]:
    """Recoveries in seconds, by seed. Raises AssertionError when a promise is broken."""
    recoveries = []
    for seed in range(runs):
        recoveries.append(round(play(scenario.name, seed), 3))
        print(f"{scenario.name} seed {seed}: {recoveries[-1]} s", flush=True)
    return {
        "bound_s": scenario.bound_s,
        "median_s": round(statistics.median(recoveries), 2),
        "worst_s": round(max(recoveries), 2),
        "runs": runs,
        "commit": harness.commit(),
        "processor": harness.machine()["processor"],
        "recoveries_s": recoveries,
    }


@harness.script(runs=5, only={"nargs": "+", "default": []})
def main(options: harness.Options) -> harness.Figures:
    scenarios = load_all()
    figures = result("guarantees")["scenarios"]
    for name in options.only or scenarios:
        figures[name] = measure(scenarios[name], options.runs)
    kept = {name: figures[name] for name in scenarios if name in figures}
    processors = sorted({figure["processor"] for figure in kept.values()})
    return {
        "commit": "per fault",
        "machine": harness.machine() | {"processor": " and ".join(processors)},
        "rounds": min(figure["runs"] for figure in kept.values()),
        "scenarios": kept,
    }
