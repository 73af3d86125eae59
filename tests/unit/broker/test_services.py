"""Scorers in the broker's state: they join, report, are told to stop and leave, and none of them counts as a node."""

import msgspec
import pytest

from broker.contract import LOST_AFTER_S, LearnerReport, ServiceOrder, ServiceReport
from broker.delivery.learner_machines import LOST_S
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.state import DeliveryState
from broker.diagnosis.stalls import explain
from common.errors import BrokerError
from tests.rigs.brokers import new_state, run_info
from tests.rigs.refusals import refused
from tests.rigs.waiting import Clock

JUDGE = ServiceReport("scorer-judge", "h1", 7, "scorer", "serving", "http://h1:1/v1", since_s=2.0, run="test")


@pytest.fixture
def state() -> DeliveryState:
    return new_state(run_info(name="test"), Clock())


def told(state: DeliveryState, log: str | None = None, /, **changes: object) -> ServiceOrder:
    report = msgspec.structs.replace(JUDGE, **changes)
    return state.services.report(report, log, state.clock(), state.stopping)


def shown(state: DeliveryState) -> list[tuple[str, str, str]]:
    return [(service.name, service.host, service.state) for service in state.status().services]


def later(state: DeliveryState, seconds: float) -> None:
    assert isinstance(state.clock, Clock)
    state.clock.now += seconds


def test_a_report_shows_in_the_status_with_its_age_and_the_last_one_takes_it_away(state: DeliveryState) -> None:
    assert told(state) == ServiceOrder()
    later(state, 3.0)
    (judge,) = state.status().services
    assert (judge.name, judge.state, judge.url, judge.pid) == ("scorer-judge", "serving", "http://h1:1/v1", 7)
    assert (judge.since_s, judge.last_seen_s) == (5.0, 3.0)
    assert state.status().present == ["scorer-judge"]
    told(state, state="draining")
    assert shown(state) == [("scorer-judge", "h1", "draining")]
    told(state, leaving=True)
    assert (shown(state), state.status().present) == ([], [])


def test_a_silent_one_is_gone_and_then_forgotten_as_a_lost_machine_is(state: DeliveryState) -> None:
    told(state)
    later(state, LOST_AFTER_S)
    assert state.status().present == ["scorer-judge"]
    later(state, 0.1)
    assert (shown(state), state.status().present) == ([("scorer-judge", "h1", "gone")], [])
    assert state.status().services[0].since_s == pytest.approx(LOST_AFTER_S + 0.1)
    later(state, LOST_S)
    assert (shown(state), state.services.known) == ([], {})


def test_only_its_own_process_takes_a_scorer_away_and_one_name_may_serve_on_two_hosts(state: DeliveryState) -> None:
    told(state)
    told(state, pid=8)  # started again, before the first one has said its last word
    told(state, pid=7, leaving=True)
    told(state, host="h2")
    assert [(s.host, s.pid) for s in state.status().services] == [("h1", 8), ("h2", 7)]


def test_a_stop_reaches_it_and_waits_for_it(state: DeliveryState) -> None:
    told(state)
    assert LearnerRules(state).stop().present == ["scorer-judge"]
    assert told(state).stop
    assert told(state, state="draining").stop
    told(state, leaving=True)
    assert LearnerRules(state).stop().present == []


def test_the_broker_of_another_run_does_not_take_it_unless_it_was_named(state: DeliveryState) -> None:
    with refused(BrokerError, "'test'", "'other'", "scorer-judge"):
        told(state, run="other")
    assert shown(state) == []
    told(state, run="")
    assert len(shown(state)) == 1


def test_its_log_comes_with_the_report_after_the_one_that_asked_for_it(state: DeliveryState) -> None:
    with refused(BrokerError, "'scorer-judge'"):
        state.log("scorer-judge")
    told(state)
    assert state.log("scorer-judge") is None
    assert told(state).log
    assert not told(state, "a\nb").log
    assert state.log("scorer-judge") == "a\nb"


def test_a_scorer_is_no_node_in_no_figure_and_no_stall(state: DeliveryState) -> None:
    LearnerRules(state).report(LearnerReport(1, 1, "waiting", 0))
    before, moment = state.status(), state.next_deadline()
    told(state)
    assert msgspec.structs.replace(state.status(), services=[]) == before
    assert explain(state.status()) == explain(before)
    assert (state.fleet.nodes, state.next_deadline()) == ({}, moment)
    assert state.event_log.after(-1) == []
