"""The advisor: which change it names, and what it predicts, from the rates of steps."""

from typing import Any

import pytest

from launch.observe.advisor import FEWEST, STEPS, Rates, advice_for, advise, rates_of


def lines(
    count: int = 10, step_s: float = 10.0, idle_s: float = 0.0, waiting: float = 0.0, nodes: int = 2, **more: Any
) -> list[dict[str, Any]]:
    """`waiting`: share of the nodes' time."""
    per_step = waiting * nodes * step_s
    return [
        {"step": i, "step_s": step_s, "learner_idle_s": idle_s, "nodes_live": nodes, "incarnation": 0,
         "seconds_wasted_waiting": 7.0 + i * per_step, **more}
        for i in range(count)
    ]  # fmt: skip


def test_rates_are_those_of_the_newest_steps_of_one_fleet() -> None:
    early = lines(30, step_s=99.0, nodes=1)
    rates = rates_of(early + lines(8, idle_s=4.0, waiting=0.25))
    assert rates == Rates(2, 10.0, 4.0, pytest.approx(0.25))
    many = rates_of(lines(STEPS, step_s=99.0) + lines(STEPS + 1, step_s=5.0))
    assert many is not None and many.step_s == 5.0


@pytest.mark.parametrize(
    "few", [[], lines(FEWEST), lines(20, nodes=0), lines(20) + lines(3, incarnation=1), lines(20) + lines(2, nodes=3)]
)
def test_too_few_steps_of_one_fleet_give_no_advice(few: list[dict[str, Any]]) -> None:
    assert advice_for(few, 2) is None


def test_a_learner_that_waits_for_a_busy_fleet_asks_for_more_nodes() -> None:
    found = advise(Rates(nodes=2, step_s=10.0, idle_s=4.1, waiting=0.0), 2)
    assert (found.change, found.nodes) == ("more_nodes", 4)  # 20 node-seconds a step, 5.9 s of the learner
    assert found.text == "2 more nodes: learner idle 41% -> about 0%, steps up to 1.7 times as fast"
    assert found.speedup == pytest.approx(10 / 5.9)
    near = advise(Rates(nodes=1, step_s=100.0, idle_s=99.0, waiting=0.0), 2)
    assert (near.nodes, round(near.idle_then, 2)) == (4, 0.96), "advice stays near what was measured"


def test_nodes_that_wait_for_a_busy_learner_are_too_many_but_for_the_last_one() -> None:
    found = advise(Rates(nodes=8, step_s=10.0, idle_s=0.2, waiting=0.6), 2)
    assert (found.change, found.nodes) == ("fewer_nodes", 4)
    assert found.text.startswith("4 nodes fewer would do: nodes wait 60% of the time")
    last = advise(Rates(nodes=1, step_s=10.0, idle_s=0.2, waiting=0.6), 2)
    assert last.change == "none" and "the learner is what is slow" in last.text


def test_who_waits_for_each_other_needs_a_larger_window() -> None:
    found = advise(Rates(nodes=1, step_s=10.0, idle_s=5.0, waiting=0.5), 0)
    assert found.change == "larger_window"
    assert found.text.startswith("staleness.max 1 instead of 0: learner idle 50% -> about 0%, steps up to 2.0 times")
    assert "generation and training take turns" in found.text
    wider = advise(Rates(nodes=1, step_s=10.0, idle_s=4.0, waiting=0.3), 1)
    assert wider.change == "larger_window" and "wait for each other" in wider.text


def test_engines_that_are_half_empty_need_a_larger_window_and_not_company() -> None:
    found = advise(Rates(nodes=1, step_s=10.0, idle_s=5.0, waiting=0.0, taken=0.25), 2)
    assert found.change == "larger_window"
    assert found.text.startswith("staleness.max 3 instead of 2: learner idle 50% -> about 0%, steps up to 2.0 times")
    assert "engines are 25% full" in found.text
    taken = rates_of(lines(8, concurrency=128, episodes_running=32))
    assert taken is not None and taken.taken == 0.25


def test_a_balanced_run_is_left_alone() -> None:
    found = advise(Rates(nodes=3, step_s=10.0, idle_s=0.5, waiting=0.05), 2)
    assert found.change == "none"
    assert found.text == "learner and fleet keep pace: the learner is idle 5%, nodes 5% of the time"


def test_status_gives_no_advice_on_metrics_that_it_cannot_read() -> None:
    good = {"nodes_live": 2, "step_s": 1.0, "learner_idle_s": 0.5}
    assert advice_for([good] * 10, 1) is not None
    bad = [{"nodes_live": "x"}, {"nodes_live": [1]}, {"step_s": None}, {"learner_idle_s": None}, {"concurrency": None}]
    for line in ({}, {"nodes_live": 2}, *(good | change for change in bad)):
        assert advice_for([line] * 10, 1) is None, line


@pytest.mark.parametrize("running", [0, 8])
def test_advice_on_a_learner_that_only_waits_divides_by_nothing(running: int) -> None:
    line = {"nodes_live": 2, "step_s": 1.0, "learner_idle_s": 1.0, "concurrency": 8, "episodes_running": running}
    found = advice_for([line] * 10, 1)
    assert found is not None and found.change == ("larger_window" if running == 0 else "more_nodes")
