"""The learner's side: what it offers, its incarnations, its end; and the events of a run."""

from collections.abc import Callable

import msgspec
import pytest

from broker.contract import LOST_AFTER_S
from common.errors import BrokerError
from common.waits import WaitKind
from common.waste import Waste
from tests.contract.backends import Backend, tasks
from tests.rigs.brokers import learner_report, node_report
from tests.rigs.refusals import refused


def test_offering_known_serials_again_adds_nothing_and_a_gap_is_refused(backend: Backend) -> None:
    assert backend.learner.attach(learner_report()).next_serial == 0
    assert backend.learner.offer(tasks(0, 1, 2)) == 3
    assert backend.learner.offer(tasks(1, 2, 3)) == 1
    with refused(BrokerError, "task 5", "serial is 4"):
        backend.learner.offer(tasks(3, 5))
    assert backend.learner.attach(learner_report()).next_serial == 4


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


@pytest.mark.parametrize("same", [False, True], ids=["a later incarnation", "the same incarnation after an end"])
def test_a_replaced_learner_is_fenced(backend: Backend, same: bool) -> None:
    backend.learner.attach(learner_report(instance="a"))
    backend.learner.report(learner_report("failed", instance="a"))
    successor = backend.new_learner()
    successor.attach(learner_report(incarnation=1 if same else 2, instance="b"))
    by = "incarnation 1" if same else "incarnation 2"
    for action in (
        lambda: backend.learner.take(0, 1, 0.0),
        lambda: backend.learner.commit(0),
        lambda: backend.learner.offer(tasks(0)),
        lambda: backend.learner.report(learner_report(instance="a")),
        lambda: backend.learner.attach(learner_report(instance="a")),
    ):
        with refused(BrokerError, "incarnation 1", by, "pid 5"):
            action()
    assert successor.offer(tasks(0)) == 1


def test_a_learner_of_another_run_takes_nothing_over_and_commits_nothing(make: Callable[..., Backend]) -> None:
    """It has resumed once more than this run's learner. Its broker was refused the address that both configs name."""
    backend = make(run_id="a")
    report = learner_report(instance="a")
    backend.learner.attach(report)
    backend.fill(4)
    assert len(backend.learner.take(0, 2, 0.0) or ()) == 2
    before = [entry.state for entry in backend.learner.ledger()]
    other = backend.new_learner()
    later = msgspec.structs.replace(report, incarnation=report.incarnation + 1, instance="b", run_id="b", step=50)
    for action in (other.report, other.attach):
        with refused(BrokerError, "'test' of /nowhere, id a", "id b"):
            action(later)
    assert backend.learner.status().learner == report
    assert [entry.state for entry in backend.learner.ledger()] == before
    backend.learner.report(msgspec.structs.replace(report, run_id="a"))
    backend.learner.attach(msgspec.structs.replace(report, run_id=""))


def test_of_two_learners_with_one_incarnation_the_second_is_refused_until_the_first_is_lost(backend: Backend) -> None:
    status = backend.learner.status()
    assert (status.learner, status.learner_last_seen_s) == (None, 0.0)
    backend.learner.attach(learner_report(instance="a"))
    second = backend.new_learner()
    for action in (second.attach, second.report):
        with refused(BrokerError, "incarnation 1", "process 5, training"):
            action(learner_report(instance="b"))
    assert backend.learner.offer(tasks(0)) == 1
    backend.learner.report(msgspec.structs.replace(learner_report(instance="a"), waste={"masked": Waste(9)}))
    learner = backend.learner.status().learner
    assert (learner.instance, learner.waste) == ("a", {"masked": Waste(9)})
    assert backend.wasted() == {}, "a learner's waste is shown with its report only"
    for silent_s, state in ((LOST_AFTER_S / 2, "training"), (2 * LOST_AFTER_S, "lost")):
        assert backend.learner.offer(tasks(0)) == 0, "a sign of life"
        assert backend.learner.status().learner.state == "training"
        backend.pass_time(silent_s)
        assert (shown := backend.learner.status().learner).state == state
    assert (shown.wait.kind, shown.wait.cause) == (WaitKind.SIGN_OF_LIFE, "training")
    second.attach(learner_report(instance="b"))
    with refused(BrokerError, "incarnation 1", "pid 5"):
        backend.learner.offer(tasks(0))
    assert second.offer(tasks(1)) == 1


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


def test_nodes_are_told_to_drain_once_the_learner_is_done_and_get_no_weights_of_one_that_ended(
    backend: Backend,
) -> None:
    backend.join()
    for state in ("starting", "training", "drained", "failed", "training", "done"):
        backend.learner.report(learner_report(state, weights="tcp://weights"))
        reply = backend.beat(node_report())
        address = "tcp://weights" if state in ("starting", "training") else ""
        assert (reply.weights_address, reply.drain) == (address, state == "done")
        assert backend.learner.status().learner.state == state
    kinds = [e.kind for e in backend.learner.events(-1)]
    assert kinds == ["join", "learner_drained", "learner_failed", "learner_done"]


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
