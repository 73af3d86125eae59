"""Requests of commands to a running job: the end of a role's log, and that every role leaves."""

from collections.abc import Callable

from msgspec.structs import replace

from broker.contract import ServiceOrder, ServiceReport
from broker.delivery.logs import FRESH_S, MOST_LOGS
from common.errors import BrokerError
from tests.contract.backends import Backend, run_info
from tests.rigs.brokers import learner_report, node_report
from tests.rigs.refusals import refused


def test_the_end_of_a_nodes_log_comes_with_the_heartbeat_after_the_one_that_asked_for_it(backend: Backend) -> None:
    backend.join("n0")
    backend.join("n1")
    assert backend.beat(node_report("n0")).log_rank == -1
    assert backend.learner.log("n0") is None
    assert backend.learner.log("n0") is None
    assert backend.beat(node_report("n1")).log_rank == -1
    assert backend.beat(node_report("n0")).log_rank == 0
    backend.run(backend.node.heartbeat(node_report("n0"), [], "a\nb"))
    assert backend.beat(node_report("n0")).log_rank == -1
    assert backend.learner.log("n0") == "a\nb"
    assert backend.learner.log("n0") is None, "it was handed out, and the node is asked anew"
    with refused(BrokerError, "'n7'"):
        backend.learner.log("n7")


def test_the_learner_sends_the_log_of_the_rank_that_was_asked_for(backend: Backend) -> None:
    backend.learner.attach(learner_report())
    assert backend.learner.report(learner_report()) is None
    assert backend.learner.log("learner-3") is None
    assert backend.learner.log("learner") is None
    assert backend.learner.report(learner_report()).log_rank == 3
    assert backend.learner.report(learner_report(), "of 3", 3).log_rank == 0
    assert backend.learner.report(learner_report(), "", 0) is None
    assert (backend.learner.log("learner-3"), backend.learner.log("learner")) == ("of 3", "")


def test_few_logs_are_kept_for_a_short_time_and_none_that_nobody_asked_for(backend: Backend) -> None:
    names = [f"n{i}" for i in range(MOST_LOGS + 1)]
    for name in names:
        backend.join(name)
        assert backend.learner.log(name) is None
    assert [backend.beat(node_report(name)).log_rank for name in names[:3]] == [-1, 0, 0], "the oldest gave way"
    backend.run(backend.node.heartbeat(node_report("n0"), [], "nobody asked"))
    assert backend.learner.log("n0") is None
    backend.run(backend.node.heartbeat(node_report("n2"), [], "out of date"))
    backend.pass_time(FRESH_S + 1)
    assert backend.learner.log("n2") is None


def test_a_stop_reaches_everybody_and_nothing_is_leased_from_then_on(make: Callable[..., Backend]) -> None:
    backend = make()
    backend.learner.attach(learner_report())
    backend.begin(4)
    (lease,) = backend.lease(1)
    assert not backend.learner.status().stopping
    assert backend.learner.stop().present == ["learner", "n0"]
    assert backend.learner.stop().stopping, "may be repeated"
    assert backend.learner.report(learner_report()).stop
    assert backend.beat(node_report(), lease.token).stop
    assert backend.lease(4) == []
    assert backend.complete(lease), "what runs may be finished"
    assert [event.kind for event in backend.learner.events(-1)].count("stop_requested") == 1
    backend.join("late")
    assert backend.beat(node_report("late")).stop
    backend.leave("late")
    backend.leave()
    assert backend.learner.stop().present == ["learner"]
    backend.pass_time(run_info().lease_s)
    assert backend.learner.stop().present == [], "a learner that is silent is not waited for"


def test_a_scorer_reports_is_told_to_stop_and_leaves(backend: Backend) -> None:
    report = ServiceReport("scorer-judge", "h", 1, "scorer", "serving", "http://h:1/v1", run=run_info().name)
    assert backend.learner.report_service(report) == ServiceOrder()
    (found,) = backend.learner.status().services
    assert (found.name, found.state, backend.learner.status().nodes) == ("scorer-judge", "serving", [])
    assert backend.learner.stop().present == ["scorer-judge"]
    assert backend.learner.report_service(report).stop
    backend.learner.report_service(replace(report, leaving=True))
    assert backend.learner.stop().present == []
