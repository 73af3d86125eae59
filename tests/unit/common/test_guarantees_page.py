"""docs/guarantees.md lists the faults that the suite plays, with their texts and the committed figures, no others."""

import json
from typing import Any

import pytest

from bench.guarantees import BEGIN, END, PAGE, RESULTS, rows, table


@pytest.fixture(scope="module")
def scenarios() -> dict[str, Any]:
    from fault_scenario import load_all  # importable since bench.guarantees was imported

    return load_all()


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())["scenarios"]


def test_the_page_shows_every_fault_with_its_texts_and_figures(
    scenarios: dict[str, Any], figures: dict[str, Any]
) -> None:
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert shown == table(rows(scenarios, figures)), "run bench/guarantees.py --page"


def test_every_fault_is_measured_and_within_its_bound(scenarios: dict[str, Any], figures: dict[str, Any]) -> None:
    assert list(figures) == list(scenarios), "run bench/guarantees.py"
    for name, scenario in scenarios.items():
        assert figures[name]["bound_s"] == scenario.bound_s
        assert figures[name]["worst_s"] <= scenario.bound_s, name
        assert figures[name]["runs"] >= 3


def test_no_two_faults_have_the_same_text(scenarios: dict[str, Any]) -> None:
    assert len({s.fault for s in scenarios.values()}) == len(scenarios)
