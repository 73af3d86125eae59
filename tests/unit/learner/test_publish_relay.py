"""Who serves a fetch: a peer that may, or the learner; and the groups and snapshots behind transfers."""

import time
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
import torch

from common.weights import packing
from common.weights.messages import Epoch, Serving
from learner.publish.collective_groups import Groups
from learner.publish.receivers import Member
from learner.publish.relay import PEER_FETCHES, Relays
from learner.publish.snapshot import Snapshot, SnapshotMaker
from learner.publish.transfer import Transfer, new_transfer

KEY = "k" * 40


@pytest.fixture
def snapshot() -> Snapshot:
    made = SnapshotMaker("float32").make(3, [("w", torch.arange(40.0))], None)
    made.seal(64)
    return made


@pytest.fixture(params=[False, True], ids=["open", "keys"])
def relays(request: pytest.FixtureRequest) -> Iterator[Relays]:
    made = Relays("127.0.0.1", request.param, "127.0.0.1:1", 8.0)
    yield made
    made.close()


def member(name: str, version: int = 3, **changes: Any) -> Member:
    made = Member(name.encode(), name, 0.0, ("gloo", "relay"), version, settled=True)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def fetch_of(snapshot: Snapshot, number: int = 1) -> Transfer:
    epoch = Epoch(number, 1, 2, "", 0, 8.0, "relay")
    return new_transfer(snapshot, snapshot.full, [b"late"], epoch, True, 8.0)


def test_only_a_settled_idle_node_with_that_very_version_is_asked(snapshot: Snapshot) -> None:
    relays = Relays("127.0.0.1", False, "127.0.0.1:1", 8.0)
    late = member("late", -1, settled=False)
    unfit = [
        member("old", 2), member("new", settled=False), member("busy", transfer=cast(Any, object())),
        member("poor", poor_source=True), member("bad", quarantined="proof"), member("mute", transports=("gloo",)),
        member("full", serving=PEER_FETCHES), late,
    ]  # fmt: skip
    assert relays.peer_for(late, unfit, snapshot) is None
    one, two = member("one", serving=1), member("two")
    assert relays.peer_for(late, [*unfit, one, two], snapshot) is two


def test_with_keys_a_peer_is_asked_once_the_sha256_that_it_cannot_forge_is_known(snapshot: Snapshot) -> None:
    relays = Relays("127.0.0.1", True, "127.0.0.1:1", 8.0)
    peer, late = member("peer"), member("late", -1)
    assert relays.peer_for(late, [peer], snapshot) is None
    end = time.monotonic() + 10
    while not snapshot.sha256 and time.monotonic() < end:
        time.sleep(0.01)
    assert snapshot.sha256 == packing.sha256(snapshot.flat)
    assert relays.peer_for(late, [peer], snapshot) is peer


def test_an_answer_counts_once_from_whom_it_was_asked_and_never_below_the_fleets_security(
    relays: Relays, snapshot: Snapshot
) -> None:
    peer, other, transfer = member("peer"), member("other"), fetch_of(snapshot)
    serve = relays.ask(transfer, 0, peer)
    secured = bool(serve.client_public)
    assert peer.serving == 1 and transfer.peer == b"peer" and serve.version == 3
    good = Serving("peer", serve.key, "tcp://127.0.0.1:7", KEY if secured else "")
    assert relays.answered(other, good) is None
    assert relays.answered(peer, msgspec.structs.replace(good, key="another")) is None
    found = relays.answered(peer, good)
    assert found is not None and found[1] is not None
    assert (found[1].address, found[1].public, bool(found[1].secret)) == (good.address, serve.client_public, secured)
    downgraded = relays.answered(peer, msgspec.structs.replace(good, public="" if secured else KEY))
    assert downgraded is not None and downgraded[1] is None
    for address in ("", "ipc:///somewhere"):
        refused = relays.answered(peer, msgspec.structs.replace(good, address=address))
        assert refused is not None and refused[1] is None
    transfer.peer_until = None
    assert relays.answered(peer, good) is None, "the learner serves it by now"


def test_a_peer_from_which_a_fetch_failed_is_not_asked_again_one_that_refused_is(
    relays: Relays, snapshot: Snapshot
) -> None:
    failing, refusing = member("failing"), member("refusing")
    failed, refused = fetch_of(snapshot, 1), fetch_of(snapshot, 2)
    relays.ask(failed, 0, failing)
    failed.fail(1.0)
    relays.over(failed)
    relays.ask(refused, 0, refusing)
    source = relays.own_source(refused)
    assert source.address.startswith("tcp://127.0.0.1:") and refused.peer is None
    assert (failing.serving, failing.poor_source) == (0, True)
    assert (refusing.serving, refusing.poor_source) == (0, False)
    relays.over(refused)


class Formed:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_group_is_used_again_by_exactly_its_members_and_closed_when_it_is_of_no_use(snapshot: Snapshot) -> None:
    groups = Groups("127.0.0.1", "gloo", 8.0)

    def through(members: list[bytes], usable: bool = True) -> tuple[Transfer, Formed]:
        epoch, group = groups.take(members)
        transfer = new_transfer(snapshot, snapshot.full, members, epoch, False, 8.0)
        formed = cast(Formed, group) if group is not None else Formed()
        transfer.group = cast(Any, formed)
        groups.give_back(transfer, usable)
        return transfer, formed

    first, group = through([b"a", b"b"])
    again, same = through([b"b", b"a"])
    assert same is group and again.epoch == first.epoch and not group.closed
    bigger, larger = through([b"a", b"b", b"c"])
    assert group.closed and bigger.epoch.epoch > first.epoch.epoch and bigger.epoch.world_size == 4
    groups.left(b"z")
    assert not larger.closed
    groups.left(b"c")
    assert larger.closed
    _, failed = through([b"a"], usable=False)
    assert failed.closed
    assert groups.relay_epoch().transport == "relay"
    groups.drop()


def test_an_attempt_that_was_given_up_closes_the_group_that_its_thread_comes_by_later(snapshot: Snapshot) -> None:
    transfer, before, after = fetch_of(snapshot), Formed(), Formed()
    transfer.sends_over(cast(Any, before))
    transfer.abandon()
    assert before.closed
    with pytest.raises(RuntimeError, match="given up"):
        transfer.sends_over(cast(Any, after))
    transfer.sends_over(None)
