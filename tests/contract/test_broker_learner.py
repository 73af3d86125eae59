"""The learner's side: what it offers, its incarnations, its end; and the events of a run."""

from collections.abc import Callable

import msgspec
import pytest

from broker.contract import Waste
from common.errors import BrokerError
from tests.broker_rig import node_report
from tests.contract.backends import Backend, learner_report, tasks


def test_offering_known_serials_again_adds_nothing(backend: Backend) -> None:
    assert backend.learner.attach(learner_report()).next_serial == 0
    assert backend.learner.offer(tasks(0, 1, 2)) == 3
    assert backend.learner.offer(tasks(1, 2, 3)) == 1
    assert backend.learner.attach(learner_report()).next_serial == 4


def test_offering_with_a_gap_is_refused_and_adds_nothing(backend: Backend) -> None:
    with pytest.raises(BrokerError, match="task 2 was offered, the next serial is 1"):
        backend.learner.offer(tasks(0, 2))
    assert backend.learner.ledger() == []


def test_a_restarted_learner_gets_a_steps_filtered_groups_too_in_the_same_order(backend: Backend) -> None:
    backend.fill(8)
    backend.learner.take(0, 2, 0.0)
    backend.learner.filter(0, [0, 1], 4)
    backend.learner.take(0, 2, 0.0)
    backend.learner.filter(0, [3], 4)
    for lease in backend.lease(8):
        backend.complete(lease)
    first = backend.learner.take(0, 2, 0.0)
    assert [g.serial for g in first] == [0, 1, 2, 3, 4]
    restarted = backend.new_learner()
    restarted.attach(learner_report(incarnation=2))
    assert restarted.take(0, 2, 0.0) == first
    restarted.filter(0, [0, 1, 3], 4)
    assert restarted.take(0, 2, 0.0) == first
    assert restarted.status().steps_taken == 1
    assert [g.serial for g in restarted.take(1, 2, 0.0)] == [5, 6]


def test_drain_is_told_once_the_learner_is_done(backend: Backend) -> None:
    backend.join()
    backend.learner.attach(learner_report("starting"))
    for state, drain in (("training", False), ("failed", False), ("done", True)):
        backend.learner.report(learner_report(state))
        assert backend.beat(node_report()).drain is drain


def test_a_replaced_learner_is_fenced(backend: Backend) -> None:
    backend.learner.attach(learner_report(incarnation=1))
    successor = backend.new_learner()
    successor.attach(learner_report(incarnation=2))
    for action in (
        lambda: backend.learner.take(0, 1, 0.0),
        lambda: backend.learner.commit(0),
        lambda: backend.learner.offer(tasks(0)),
        lambda: backend.learner.report(learner_report(incarnation=1)),
    ):
        with pytest.raises(BrokerError, match="incarnation 1 was replaced by incarnation 2"):
            action()
    assert successor.offer(tasks(0)) == 1


def test_of_two_learners_with_one_incarnation_the_second_is_refused_while_the_first_is_alive(backend: Backend) -> None:
    backend.learner.attach(learner_report(instance="a"))
    second = backend.new_learner()
    for action in (second.attach, second.report):
        with pytest.raises(BrokerError, match="learner incarnation 1 is alive already: process 5, training, seen"):
            action(learner_report(instance="b"))
    assert backend.learner.offer(tasks(0)) == 1
    assert backend.learner.status().learner.instance == "a"


def test_a_learner_of_the_same_incarnation_replaces_one_that_ended_and_fences_it(backend: Backend) -> None:
    backend.learner.attach(learner_report(instance="a"))
    backend.learner.report(learner_report("failed", instance="a"))
    second = backend.new_learner()
    second.attach(learner_report(instance="b"))
    for action in (
        lambda: backend.learner.take(0, 1, 0.0),
        lambda: backend.learner.commit(0),
        lambda: backend.learner.offer(tasks(0)),
        lambda: backend.learner.report(learner_report(instance="a")),
        lambda: backend.learner.attach(learner_report(instance="a")),
    ):
        with pytest.raises(BrokerError, match="incarnation 1 was replaced by another process of the same incarnation"):
            action()
    assert second.offer(tasks(0)) == 1


def test_attach_tells_the_store_and_what_is_committed(make: Callable[..., Backend]) -> None:
    backend = make()
    first = backend.learner.attach(learner_report())
    assert (first.next_serial, first.committed_step) == (0, -1)
    backend.fill(4)
    backend.learner.take(0, 2, 0.0)
    backend.learner.take(1, 2, 0.0)
    backend.learner.commit(0)
    again = backend.new_learner().attach(learner_report(incarnation=2))
    assert (again.next_serial, again.committed_step) == (4, 0)
    assert again.store_id == first.store_id
    assert make().learner.attach(learner_report()).store_id not in ("", first.store_id)


def test_a_drained_learner_is_shown_as_drained_and_its_weights_are_no_longer_offered(backend: Backend) -> None:
    backend.join()
    for state, address in (
        ("training", "tcp://weights"),
        ("drained", ""),
        ("failed", ""),
        ("training", "tcp://weights"),
    ):
        backend.learner.report(learner_report(state, weights="tcp://weights"))
        reply = backend.beat(node_report())
        assert (reply.weights_address, reply.drain) == (address, False)
        assert backend.learner.status().learner.state == state
    assert [e.kind for e in backend.learner.events(-1)] == ["join", "learner_drained", "learner_failed"]


def test_the_window_starts_at_the_step_of_a_learner_that_resumes_with_a_new_broker(backend: Backend) -> None:
    assert backend.learner.attach(learner_report(step=40)).next_serial == 0
    backend.learner.offer(tasks(*range(10)))
    backend.learner.commit(39)
    backend.join()
    assert backend.lease(10, version=38) == []
    assert [le.task.serial for le in backend.lease(10, version=40)] == [0, 1, 2, 3]
    backend.learner.attach(learner_report(incarnation=2, step=41))
    assert [le.task.serial for le in backend.lease(10, version=41)] == [4, 5]


def test_events_tell_what_happened_in_order(backend: Backend) -> None:
    backend.learner.attach(learner_report())
    backend.begin(1)
    backend.fail(reason="why")
    backend.leave()
    events = backend.learner.events(-1)
    assert [e.kind for e in events] == ["learner_attached", "join", "first_lease", "group_failed", "leave"]
    assert events[3].detail == {"serial": 0, "node": "n0", "reason": "why"}
    assert [e.kind for e in backend.learner.events(events[2].index)] == ["group_failed", "leave"]


def test_the_learners_own_waste_is_shown_with_its_report(backend: Backend) -> None:
    backend.learner.report(msgspec.structs.replace(learner_report(), waste={"masked": Waste(9)}))
    assert backend.learner.status().learner.waste == {"masked": Waste(9)}
    assert backend.wasted() == {}
