"""The benches of the relay run to their end at a small size, and their figures are complete and plausible."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rigs.processes import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # modules of bench find each other in their own folder

import harness
import weight_chain
import weight_cpu


def figures(script: str, *options: object) -> Any:
    """The result that a script prints with --dry."""
    printed = harness.python(ROOT / "bench" / script, "--dry", *options)
    return json.loads(printed[printed.index("\n{\n") :])


def test_the_bench_of_the_control_thread_measures_joins_publishes_and_groups() -> None:
    found = figures("weight_control.py", "--nodes", 20, "--members", 3, "--rounds", 1, "--idle", 1, "--transfer", 0.2)
    [relay], [group] = found["relay"], found["groups"]
    assert relay["complete"] and relay["ejected"] == 0 and relay["publish"]["turns"] > 0
    assert all(0 < relay[phase]["cpu_s"] <= relay[phase]["seconds"] for phase in ("join", "idle", "publish"))
    assert group["complete"] and group["entries_read"] == 3 and 0 < group["entries_sent"] <= 4 * 3


def test_the_bench_of_chains_measures_every_way_every_death_both_encodings_and_sources() -> None:
    few = ("--mib", 2, "--nodes", 1, 2, "--rounds", 1, "--large-mib", 3, "--large-nodes", 1, "--others-nodes", 2)
    few += ("--death-nodes", 3, "--delta-nodes", 2, "--delta-mib", 1, "--sources", 1, 2)
    found = figures("weight_chain.py", *few)
    runs = {(row["way"], row["nodes"], row["mib"]): row for row in found["runs"]}
    assert runs.keys() == {("relay", 1, 2), ("relay", 2, 2), ("gloo", 2, 2), ("star", 2, 2), ("relay", 1, 3)}
    for row in runs.values():
        assert row["least"] <= row["seconds"] <= row["most"] and row["over_ideal"] > 0.5
    assert runs["star", 2, 2]["learner_sent_over_size"] > 2
    assert [row["signal"] for row in found["deaths"]] == ["SIGKILL", "SIGSTOP"]
    assert all(0 <= row["receives_again_s"] <= row["all_have_it_s"] for row in found["deaths"])
    one, two = found["sources"]
    assert one["over_one"] == 1 and two["sources"] == 2 and two["most_sent_over_size"] < 0.75
    full, delta = found["deltas"]
    assert delta["learner_sent_over_size"] < 0.2 < 1 < full["learner_sent_over_size"]


def test_the_bench_of_cpu_measures_every_way() -> None:
    found = figures("weight_cpu.py", "--mib", 128, "--rounds", 1)  # clocks of processes count 10 ms
    assert [row["way"] for row in found["ways"]] == [*weight_cpu.WAYS, *weight_cpu.FLOORS]
    assert [row["receiver_s"] > 0 for row in found["ways"]] == [False] + [True] * 6
    assert all(row["total_s"] > 0 for row in found["ways"])
    assert len(found["compared"]) == 5
    one, two = found["cores"]
    assert (one["cores"], two["cores"], one["over_one"]) == (1, 2, 1.0) and two["over_one"] > 0 < two["cpu_s"]


@pytest.mark.parametrize(("gap_s", "again_s"), [(0.0, 0.0), (0.7, 0.8)])
def test_a_host_receives_again_after_its_longest_gap_soon_after_the_fault(gap_s: float, again_s: float) -> None:
    arrivals = weight_chain.Arrivals.__new__(weight_chain.Arrivals)
    arrivals._times = {"quick": [0.01 * i for i in range(200)]}
    arrivals._times["stalled"] = [time_s + (gap_s if time_s > 0.35 else 0.0) for time_s in arrivals._times["quick"]]
    arrivals._times["quick"] += [6.0]  # a later gap is not the fault's
    assert arrivals.again_s(0.26) == pytest.approx(again_s, abs=0.02)


def test_arrivals_are_noted_while_they_come() -> None:
    step, began = weight_chain.STEP_BYTES, time.monotonic()
    found: Any = SimpleNamespace(received=lambda host: int(20 * step * (time.monotonic() - began)))
    node: Any = SimpleNamespace(id="n", host=Path())
    arrivals = weight_chain.Arrivals(found, [node])
    arrivals.look_until(lambda: found.received(node.host) > 5 * step)
    assert arrivals._times["n"] == sorted(arrivals._times["n"]) and len(arrivals._times["n"]) >= 3
