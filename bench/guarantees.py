"""What the faults of tests/faults do, measured: python bench/guarantees.py [--runs N] [--only NAME ...] [--page]

Plays every scenario N times with different seeds, writes bench/results/guarantees.json and puts the table into
docs/guarantees.md. With --only the figures of other scenarios are kept; with --page nothing is played: the table is
written again from the scenarios' texts and the figures that are there.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests" / "faults")]

import jobs  # noqa: E402
import machine  # noqa: E402
from fault_options import GROUPS_PER_STEP, HEARTBEAT_S, LEASE_S, RETRY_S  # noqa: E402
from fault_scenario import Scenario, load_all, play  # noqa: E402

from launch.dev.doc_markers import replaced  # noqa: E402

PAGE = ROOT / "docs" / "guarantees.md"
RESULTS = ROOT / "bench" / "results" / "guarantees.json"
BEGIN, END = "<!-- table of faults: bench/guarantees.py writes it -->", "<!-- end of the table -->"
COLUMNS = ("fault", "what happens", "promise", "the clock stops at", "bound", "measured: median (worst)")


def measure(scenario: Scenario, runs: int) -> dict:
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
        "recoveries_s": recoveries,
    }


def rows(scenarios: dict[str, Scenario], figures: dict) -> list[tuple[str, ...]]:
    """One row for each scenario, in the order of the page."""
    found = []
    for name, s in scenarios.items():
        known = figures.get(name)
        measured = f"{known['median_s']:.2f} s ({known['worst_s']:.2f} s)" if known else "not measured"
        bound = f"{s.bound}: {s.bound_s:g} s here"
        found.append((s.fault, s.happens, s.promise, s.recovered, bound, measured))
    return found


def table(lines: list[tuple[str, ...]]) -> str:
    """As Markdown."""
    everything = [COLUMNS, ("---",) * len(COLUMNS), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in everything)


def write_page(figures: dict) -> None:
    """Put the table into the page."""
    text = table(rows(load_all(), figures))
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, END, f"\n\n{text}\n\n"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    scenarios = load_all()
    figures = json.loads(RESULTS.read_text())["scenarios"] if RESULTS.exists() else {}
    if not args.page:
        for name in args.only or scenarios:
            missing = scenarios[name].needs()
            if missing is not None:
                raise SystemExit(f"{name} needs {missing}")
            figures[name] = measure(scenarios[name], args.runs)
        settings = {"groups_per_step": GROUPS_PER_STEP, "lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S}
        result = {
            "machine": machine.describe(("pyzmq", "msgspec", "redis")),
            "settings": {**settings, "client_retry_s": RETRY_S},
            "scenarios": {name: figures[name] for name in scenarios if name in figures},
        }
        print(jobs.write("guarantees", result))
    write_page(figures)


if __name__ == "__main__":
    main()
