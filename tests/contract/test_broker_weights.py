"""Weights of sources: a request lasts until tasks were made with it, over every store and every start of a broker."""

import msgspec
import pytest

from broker.contract import WeightChange, WeightRequest
from common.errors import BrokerError
from tests.contract.backends import Backend, tasks
from tests.rigs.brokers import learner_report
from tests.rigs.refusals import refused

FIRST = WeightChange(0, {"a": 1.0, "b": 1.0})


def test_a_request_is_durable_until_a_change_carries_it_out_and_may_be_repeated(backend: Backend) -> None:
    assert backend.learner.attach(learner_report()).weight_changes == []
    backend.learner.offer(tasks(0, 1), [FIRST], 0)
    request = WeightRequest("one", {"b": 0.25})
    assert [backend.learner.set_weights(request) for _ in range(2)] == [2, 2]
    status = backend.learner.status()
    assert [(r.id, r.weights) for r in status.weight_requests] == [("one", {"b": 0.25})]
    assert status.weights == FIRST
    assert status.weight_requests[0].time_s > 0
    change = WeightChange(2, {"a": 1.0, "b": 0.25}, requests=["one"])
    backend.learner.offer(tasks(2), [change], 1)
    assert backend.learner.set_weights(request) == 3, "a repetition after its effect"
    status = backend.learner.status()
    assert (status.weight_requests, status.weights) == ([], change)
    assert backend.new_learner().attach(learner_report(incarnation=2)).weight_changes == [FIRST, change]
    kinds = [event.kind for event in backend.learner.events(-1)]
    assert [kinds.count(kind) for kind in ("weights_requested", "weights_changed")] == [1, 2]


def test_changes_that_come_again_are_known_and_a_gap_is_refused(backend: Backend) -> None:
    second = WeightChange(1, {"a": 0.0, "b": 1.0})
    backend.learner.offer(tasks(0), [FIRST], 0)
    backend.learner.offer(tasks(1), [FIRST, second], 0)
    backend.learner.offer(tasks(1, 2), [second], 1)
    assert backend.learner.attach(learner_report()).weight_changes == [FIRST, second]
    with refused(BrokerError, 3, 2):
        backend.learner.offer(tasks(3), [second], 3)
    assert backend.learner.attach(learner_report()).next_serial == 3


@pytest.mark.parametrize("state", ["pending", "ready", "committed"])
def test_the_ledger_names_the_source_of_every_task(backend: Backend, state: str) -> None:
    named = [msgspec.structs.replace(task, source=name) for task, name in zip(tasks(0, 1), "ab", strict=True)]
    backend.learner.offer(named)
    backend.join()
    if state != "pending":
        for lease in backend.lease(2):
            assert backend.complete(lease)
    if state == "committed":
        taken = backend.learner.take(0, 2, 0.0)
        assert taken is not None and [group.source for group in taken] == ["a", "b"]
        backend.learner.commit(0)
    assert {entry.serial: (entry.state, entry.source) for entry in backend.learner.ledger()} == {
        0: (state, "a"),
        1: (state, "b"),
    }
