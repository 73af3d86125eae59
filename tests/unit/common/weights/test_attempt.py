"""The groups behind attempts, and broadcasts that are given up."""

import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from common.weights.source.attempt import Attempt, Broadcast, Epochs, new_attempt
from common.weights.transports.groups import RelayedStore
from common.weights.wire.failures import Failure, FailureKind, GivenUp
from common.weights.wire.layout import FIRST_RATE, PATIENCE, publish_bound
from common.weights.wire.messages import Epoch, StoreEntries
from tests.rigs.waiting import LIMIT_S
from tests.unit.common.weights.node_views import attempt_at, snapshot_of

SNAPSHOT = snapshot_of(3)


class Formed:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_group_is_used_again_by_exactly_its_members_and_closed_when_it_is_of_no_use() -> None:
    epochs = Epochs("gloo", 8.0, "127.0.0.1:1")

    def through(members: list[bytes], **outcome: bool) -> tuple[Attempt, Formed]:
        epoch, group = epochs.take(members)
        attempt = replace(new_attempt(SNAPSHOT, SNAPSHOT.full, epoch, members=members, incarnation=0), **outcome)
        formed = cast(Formed, group) if group is not None else Formed()
        attempt.group = cast(Any, formed)
        epochs.give_back(attempt)
        return attempt, formed

    first, group = through([b"a", b"b"])
    again, same = through([b"b", b"a"])
    assert same is group and again.epoch == first.epoch and not group.closed
    assert (first.epoch.rank, first.epoch.transport, first.epoch.learner_endpoint) == (0, "gloo", "127.0.0.1:1")
    bigger, larger = through([b"a", b"b", b"c"])
    assert group.closed and bigger.epoch.epoch > first.epoch.epoch and bigger.epoch.world_size == 4
    epochs.drop(b"z")
    assert not larger.closed
    epochs.drop(b"c")
    assert larger.closed
    for outcome in ("failed", "lost"):
        _, unusable = through([b"a"], **{outcome: True})
        assert unusable.closed
    fetch = epochs.relay()
    assert (fetch.transport, fetch.rank, fetch.world_size) == ("relay", 1, 2) and fetch.epoch > bigger.epoch.epoch
    epochs.drop()


@pytest.mark.parametrize(("transport", "publish_s"), [("gloo", 1.0), ("relay", 1000.0)])
def test_an_attempt_at_a_large_version_has_the_time_that_its_size_needs_but_each_bucket_has_the_usual(
    transport: str, publish_s: float
) -> None:
    snapshot = snapshot_of(3)
    rate = PATIENCE * snapshot.layout.total_bytes / 1000
    epoch = Epoch(1, 0, 2, 1.0, transport)
    attempt = new_attempt(snapshot, snapshot.full, epoch, members=[b"a"], incarnation=0, rate=rate)
    assert attempt.deadline - attempt.started == pytest.approx(1000)
    assert attempt.publish.timeout_s == pytest.approx(publish_s)


def test_an_attempt_that_was_given_up_closes_the_group_that_its_thread_comes_by_later() -> None:
    broadcast, before, after = Broadcast(), Formed(), Formed()
    broadcast.use(cast(Any, before))
    broadcast.abandon()
    assert before.closed
    with pytest.raises(GivenUp):
        broadcast.use(cast(Any, after))
    broadcast.use(None)


def test_an_attempt_that_was_given_up_lets_its_thread_leave_the_place_where_the_group_meets() -> None:
    attempt, reports, reported = attempt_at(SNAPSHOT, "a"), list[tuple[object, Failure | None]](), threading.Event()
    waits = threading.Event()

    def form(epoch: object, store: RelayedStore) -> Any:
        waits.set()
        store.get("rank 1")

    def report(attempt: Attempt, group: object, failure: Failure | None) -> None:
        reports.append((group, failure))
        reported.set()

    attempt.broadcast.store = RelayedStore(LIMIT_S, lambda key, value: None)
    attempt.broadcast.start(attempt, None, form, report)
    assert waits.wait(LIMIT_S)
    attempt.broadcast.abandon()
    assert reported.wait(LIMIT_S)
    [(group, failure)] = reports
    assert group is None and failure is not None and failure.kind is FailureKind.GIVEN_UP


def test_entries_are_for_all_members_and_those_of_a_node_for_the_learner_s_store_as_well() -> None:
    attempt, mine = attempt_at(SNAPSHOT, "a", "b"), StoreEntries(1, {"rank 1": b"x"})
    assert (attempt.publish.encoding, attempt.publish.base_version) == ("full", -1)
    attempt.take_entries(mine, b"a")
    assert attempt.entries == mine.entries, "before the learner has a store"
    attempt.broadcast.store = store = RelayedStore(LIMIT_S, lambda key, value: None)
    attempt.take_entries(mine, b"a")
    assert store.get("rank 1") == b"x"
    attempt.take_entries(StoreEntries(1, {"rank 0": b"y"}), b"")
    attempt.take_entries(StoreEntries(2, {"rank 2": b"of another group"}), b"a")
    attempt.take_entries(StoreEntries(1, {"rank 2": b"x"}), b"stranger")
    assert attempt.entries == {"rank 1": b"x", "rank 0": b"y"}


def test_the_bound_of_a_version_follows_from_its_size_and_from_a_rate_that_was_lower() -> None:
    assert publish_bound(20.0, 1 << 20) == publish_bound(20.0, 1 << 20, 1e9) == 20.0
    first = publish_bound(20.0, 131 << 30)
    assert first == PATIENCE * (131 << 30) / FIRST_RATE > 1000
    assert publish_bound(20.0, 131 << 30, 10 * FIRST_RATE) == first, "a fast link shortens no bound"
    assert publish_bound(20.0, 131 << 30, FIRST_RATE / 4) == 4 * first
