"""Who serves a fetch: a peer that may, or the learner; and the groups and snapshots behind attempts."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from common.weights import packing
from common.weights.messages import Serving
from learner.publish.attempt import Attempt, Broadcast, Groups, new_attempt
from learner.publish.receiver_state import State
from learner.publish.relay import Relays
from learner.publish.snapshot import Snapshot
from tests.unit.learner.receivers import attempt_at, newcomer, settled, snapshot_of

KEY = "k" * 40


@pytest.fixture
def snapshot() -> Snapshot:
    return snapshot_of(3)


@pytest.fixture(params=[False, True], ids=["open", "keys"])
def relays(request: pytest.FixtureRequest) -> Iterator[Relays]:
    made = Relays("127.0.0.1", request.param, "127.0.0.1:1")
    yield made
    made.close()


def fetch_of(snapshot: Snapshot, number: int = 1) -> Attempt:
    return attempt_at(snapshot, "late", epoch=number, transport="relay")


def test_only_an_idle_node_with_that_very_version_is_asked(snapshot: Snapshot) -> None:
    relays, late = Relays("127.0.0.1", False, "127.0.0.1:1"), newcomer("late")
    poor, full, busy = settled("poor"), settled("full"), settled("busy")
    failed = fetch_of(snapshot, 1)
    relays.ask(failed, poor)
    failed.failed = True
    relays.over(failed)
    for number, peer in ((2, full), (3, full), (4, busy)):
        relays.ask(fetch_of(snapshot, number), peer)
    unfit = [
        *(settled("x", state=state) for state in State if state is not State.IDLE),
        *(settled("old", 2), settled("mute", transports=("gloo",)), poor, full, late),
    ]
    assert relays.peer_for(late, unfit, snapshot) is None
    quiet = settled("quiet")
    assert relays.peer_for(late, [*unfit, busy, quiet], snapshot) is quiet
    relays.over(fetch_of(snapshot, 2))
    assert relays.peer_for(late, [*unfit, busy], snapshot) in (full, busy), "one of its fetches is over"


def test_with_keys_a_peer_is_asked_once_the_sha256_that_it_cannot_forge_is_known(snapshot: Snapshot) -> None:
    relays, peer, late = Relays("127.0.0.1", True, "127.0.0.1:1"), settled("peer"), newcomer("late")
    assert relays.peer_for(late, [peer], snapshot) is None
    for thread in threading.enumerate():
        if thread.name == "hash-weights-3":
            thread.join()
    assert snapshot.sha256 == packing.sha256(snapshot.flat)
    assert relays.peer_for(late, [peer], snapshot) is peer


def test_an_answer_counts_once_from_whom_it_was_asked_and_never_below_the_fleets_security(
    relays: Relays, snapshot: Snapshot
) -> None:
    peer, attempt = settled("peer"), fetch_of(snapshot)
    serve = relays.ask(attempt, peer)
    secured = bool(serve.client_public)
    assert serve.version == 3
    good = Serving("peer", serve.key, "tcp://127.0.0.1:7", KEY if secured else "")
    assert relays.answered(b"other", good) is None
    assert relays.answered(b"peer", msgspec.structs.replace(good, key="another")) is None
    found = relays.answered(b"peer", good)
    assert found is not None and found[0] == b"late" and found[1] is not None
    assert (found[1].address, found[1].public, bool(found[1].secret)) == (good.address, serve.client_public, secured)
    downgraded = msgspec.structs.replace(good, public="" if secured else KEY)
    for unusable in (downgraded, *(msgspec.structs.replace(good, address=a) for a in ("", "ipc:///somewhere"))):
        assert relays.answered(b"peer", unusable) == (b"late", None)
    assert relays.own_source(attempt).address.startswith("tcp://127.0.0.1:")
    assert relays.answered(b"peer", good) is None, "the learner serves it by now"
    attempt.failed, snapshot.sha256 = True, "known"
    relays.over(attempt)
    assert relays.peer_for(newcomer("late"), [peer], snapshot) is peer, "a peer that refused is asked again"


class Formed:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_group_is_used_again_by_exactly_its_members_and_closed_when_it_is_of_no_use(snapshot: Snapshot) -> None:
    groups = Groups("127.0.0.1", "gloo", 8.0)

    def through(members: list[bytes], **outcome: bool) -> tuple[Attempt, Formed]:
        epoch, group = groups.take(members)
        attempt = replace(new_attempt(snapshot, snapshot.full, epoch, members, 0, 64), **outcome)
        formed = cast(Formed, group) if group is not None else Formed()
        attempt.group = cast(Any, formed)
        groups.give_back(attempt)
        return attempt, formed

    first, group = through([b"a", b"b"])
    again, same = through([b"b", b"a"])
    assert same is group and again.epoch == first.epoch and not group.closed
    bigger, larger = through([b"a", b"b", b"c"])
    assert group.closed and bigger.epoch.epoch > first.epoch.epoch and bigger.epoch.world_size == 4
    groups.drop(b"z")
    assert not larger.closed
    groups.drop(b"c")
    assert larger.closed
    for outcome in ("failed", "lost"):
        _, unusable = through([b"a"], **{outcome: True})
        assert unusable.closed
    assert groups.relay_epoch().transport == "relay"
    groups.drop()


def test_an_attempt_that_was_given_up_closes_the_group_that_its_thread_comes_by_later() -> None:
    broadcast, before, after = Broadcast(), Formed(), Formed()
    broadcast.use(cast(Any, before))
    broadcast.abandon()
    assert before.closed
    with pytest.raises(RuntimeError, match="given up"):
        broadcast.use(cast(Any, after))
    broadcast.use(None)
