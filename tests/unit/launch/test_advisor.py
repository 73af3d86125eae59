"""The advisor: which change it names, and what it predicts, from the rates of steps."""

import re
from typing import Any

import pytest

from common.metrics import StepMetrics
from launch.observe.advisor import FEWEST, STEPS, Rates, advice_for, advise, rates_of
from tests.rigs.telemetry import read_line


def lines(
    count: int = 10, step_s: float = 10.0, idle_s: float = 0.0, waiting: float = 0.0, nodes: int = 2, **more: Any
) -> list[StepMetrics]:
    """`waiting`: share of the nodes' time."""
    per_step = waiting * nodes * step_s
    known = {"step_s": step_s, "learner_idle_s": idle_s, "nodes_live": nodes, "incarnation": 0, **more}
    return [read_line(i, seconds_wasted_waiting=7.0 + i * per_step, **known) for i in range(count)]


def test_rates_are_those_of_the_newest_steps_of_one_fleet() -> None:
    early = lines(30, step_s=99.0, nodes=1)
    rates = rates_of(early + lines(8, idle_s=4.0, waiting=0.25))
    assert rates == Rates(2, 10.0, 4.0, pytest.approx(0.25))
    many = rates_of(lines(STEPS, step_s=99.0) + lines(STEPS + 1, step_s=5.0))
    assert many is not None and many.step_s == 5.0
    taken = rates_of(lines(8, concurrency=128, episodes_running=32))
    assert taken is not None and taken.taken == 0.25


@pytest.mark.parametrize(
    "few", [[], lines(FEWEST), lines(20, nodes=0), lines(20) + lines(3, incarnation=1), lines(20) + lines(2, nodes=3)]
)
def test_too_few_steps_of_one_fleet_give_no_advice(few: list[StepMetrics]) -> None:
    assert advice_for(few, 2) is None


BUSY = Rates(nodes=2, step_s=10.0, idle_s=4.1, waiting=0.0)  # 20 node-seconds a step, 5.9 s of the learner
WIDER = "staleness.max {} instead of {}: learner idle 50% -> about 0%, steps up to 2.0 times.*{}.*"
ADVICE = [  # rates, staleness.max, change, text
    (BUSY, 2, "more_nodes", "2 more nodes: learner idle 41% -> about 0%, steps up to 1.7 times as fast"),
    (Rates(8, 10.0, 0.2, 0.6), 2, "fewer_nodes", "4 nodes fewer would do: nodes wait 60% of the time.*"),
    (Rates(1, 10.0, 0.2, 0.6), 2, "none", ".*the learner is what is slow.*"),
    (Rates(1, 10.0, 5.0, 0.5), 0, "larger_window", WIDER.format(1, 0, "generation and training take turns")),
    (Rates(1, 10.0, 4.0, 0.3), 1, "larger_window", ".*wait for each other.*"),
    (Rates(1, 10.0, 5.0, 0.0, taken=0.25), 2, "larger_window", WIDER.format(3, 2, "engines are 25% full")),
    (Rates(3, 10.0, 0.5, 0.05), 2, "none", "learner and fleet keep pace: the learner is idle 5%, nodes 5% of the time"),
]


@pytest.mark.parametrize(("rates", "staleness", "change", "text"), ADVICE)
def test_the_change_follows_from_who_waits_for_whom(rates: Rates, staleness: int, change: str, text: str) -> None:
    found = advise(rates, staleness)
    assert found.change == change
    assert re.fullmatch(text, found.text), found.text


def test_a_number_of_nodes_comes_with_its_speedup_and_stays_near_what_was_measured() -> None:
    more, fewer = advise(BUSY, 2), advise(Rates(nodes=8, step_s=10.0, idle_s=0.2, waiting=0.6), 2)
    assert (more.nodes, fewer.nodes, more.speedup) == (4, 4, pytest.approx(10 / 5.9))
    near = advise(Rates(nodes=1, step_s=100.0, idle_s=99.0, waiting=0.0), 2)
    assert (near.nodes, round(near.idle_then, 2)) == (4, 0.96)


def test_status_gives_no_advice_on_metrics_that_it_cannot_read() -> None:
    good = {"nodes_live": 2, "step_s": 1.0, "learner_idle_s": 0.5}
    assert advice_for([read_line(**good)] * 10, 1) is not None
    bad = [{"nodes_live": "x"}, {"nodes_live": [1]}, {"step_s": None}, {"learner_idle_s": None}]
    for line in ({}, {"nodes_live": 2}, *(good | change for change in bad)):
        assert advice_for([read_line(**line)] * 10, 1) is None, line


@pytest.mark.parametrize("running", [0, 8])
def test_advice_on_a_learner_that_only_waits_divides_by_nothing(running: int) -> None:
    found = advice_for(lines(step_s=1.0, idle_s=1.0, concurrency=8, episodes_running=running), 1)
    assert found is not None and found.change == ("larger_window" if running == 0 else "more_nodes")
