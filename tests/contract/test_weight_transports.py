"""The contract of every weight transport, between real processes.

'device' is what NCCL runs through: `DeviceGroup` in transports/nccl.py. Here the library is gloo, and the device is the
CPU. With 'device from host memory' the buckets are elsewhere. 'nccl' is there where CUDA is.
"""

import os
import re
import time
from collections.abc import Iterator

import pytest
from msgspec import structs

from common.weights.transports.groups import bucket_timeout
from common.weights.wire.failures import FailureKind
from common.weights.wire.messages import Publish, Reroute, Serve
from tests.rigs.device import CUDA, pace, sharing
from tests.rigs.waiting import LIMIT_S
from tests.rigs.weight_plane import Child, Sender, layout_of, payload
from tests.rigs.weight_processes import NCCL

SIZE = 1_000_000 // 64 * 64
BUCKET = 65_537  # neither a multiple of an element nor of a cache line
# Over NCCL four processes make their contexts on one device first; they have imported torch already.
TIMEOUT_S = max(8.0, 2 * pace().joined_s) if CUDA else 8.0
SHORT_S = TIMEOUT_S / 8
SLACK_S = 60.0  # a slow machine with a busy neighbour takes so much longer


@pytest.fixture(params=["gloo", "device", "device from host memory", "relay", "sealed relay", *NCCL])
def sender(request: pytest.FixtureRequest) -> Iterator[Sender]:
    os.environ |= sharing("sender")
    made = Sender(request.param, TIMEOUT_S)
    yield made
    made.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Child]]:
    made = [Child(layout_of(payload(SIZE, 0))) for _ in range(3)]
    yield made
    for child in made:
        child.kill()


@pytest.fixture
def victim(request: pytest.FixtureRequest) -> Iterator[Child]:
    made = Child(layout_of(payload(SIZE, 0)), request.param, at=6)
    yield made
    made.kill()


def arrived(nodes: list[Child], publish: Publish) -> None:
    for node in nodes:
        said = node.hear()
        assert (said.get("event"), said.get("checksum")) == ("staged", publish.checksum), said


def crosses(sender: Sender, members: list[Child], seed: int, bucket: int = BUCKET) -> Publish:
    """Send a payload that every member gets as it was sent."""
    flat = payload(SIZE, seed)
    publish = sender.announce(members, flat, bucket)
    assert sender.send(flat, bucket) == ""
    arrived(members, publish)
    return publish


def test_bytes_arrive_as_they_were_sent_at_every_size_of_group_and_bucket_in_epoch_after_epoch(
    sender: Sender, nodes: list[Child]
) -> None:
    for count, bucket in ((3, 1 << 20), (1, 7_777), (2, BUCKET), (3, SIZE + 1)):
        sender.form(nodes[:count])
        for seed in range(2):
            crosses(sender, nodes[:count], seed, bucket)


@pytest.mark.parametrize("victim", ["kill", "stop", "cut"], indirect=True)
def test_a_receiver_lost_midway_costs_the_others_no_more_than_the_deadline(
    sender: Sender, nodes: list[Child], victim: Child
) -> None:
    members = [*nodes[:2], victim]
    flat = payload(SIZE, 1)
    sender.form(members)
    publish = sender.announce(members, flat, BUCKET)
    began = time.monotonic()
    thread, found = sender.send_behind(flat, BUCKET)
    said = [node.hear() for node in nodes[:2]]
    thread.join(LIMIT_S)
    took = time.monotonic() - began
    # The group's first bucket comes when all have met; every bucket after it has its own deadline.
    assert took < 2 * bucket_timeout(TIMEOUT_S) + SLACK_S, f"{took:.1f} s"
    assert found, "the sender ends"
    if sender.server is not None:
        assert [s.get("checksum") for s in said] == 2 * [publish.checksum], "nobody is in anybody's way"
    for one in said:
        assert one["event"] in ("staged", "failed")
        assert one["event"] == "failed" or one["checksum"] == publish.checksum
    sender.form(nodes[:2])
    crosses(sender, nodes[:2], 2)


def test_one_who_comes_late_is_waited_for(sender: Sender, nodes: list[Child]) -> None:
    flat = payload(SIZE, 5)
    sender.form(nodes[:2], size=4)
    publish = sender.announce(nodes[:2], flat, BUCKET)
    thread, found = sender.send_behind(flat, BUCKET)
    time.sleep(0.5)
    if sender.epoch is not None:
        assert not found, "the group is not complete"
        sender.admit(nodes[2], 3)
    late = sender.announce(nodes[2:], flat, BUCKET)
    thread.join(LIMIT_S)
    assert found[0][0] == ""
    arrived(nodes[:2], publish)
    arrived(nodes[2:], late)


def test_one_who_never_comes_is_an_error_within_the_deadline(sender: Sender, nodes: list[Child]) -> None:
    flat = payload(SIZE, 6)
    sender.timeout_s = SHORT_S
    if sender.server is not None:  # for a relay the one who never comes is the source
        sender.fetch(nodes[0], sender.announce([], flat, BUCKET), "tcp://127.0.0.1:9")
    else:
        sender.form(nodes[:1], size=3)
        sender.announce(nodes[:1], flat, BUCKET)
    began = time.monotonic()
    error = sender.send(flat, BUCKET)
    assert time.monotonic() - began < SHORT_S + SLACK_S
    assert error or sender.server is not None
    said = nodes[0].hear()
    assert said["event"] == "failed" and time.monotonic() - began < 2 * SHORT_S + SLACK_S, said


def test_what_is_not_what_was_announced_is_refused_and_the_bucket_named(sender: Sender, nodes: list[Child]) -> None:
    flat = payload(SIZE, 7)
    sender.timeout_s = 2.0 if sender.server is not None else TIMEOUT_S  # a fetch waits for another source till then
    sender.form(nodes[:2])
    for members in [[node] for node in nodes[:2]] if sender.server is not None else [nodes[:2]]:
        sender.announce(members, flat, BUCKET, spoil=3)
    assert sender.send(flat, BUCKET) == "", "the others are kept in step to the end"
    for node in nodes[:2]:
        said = node.hear()
        named = "piece 3 of" if sender.server is not None else "bucket 3 of 16"
        kind = FailureKind.LATE if sender.server is not None else FailureKind.DAMAGED  # it waits for a better source
        assert (said["event"], said["kind"]) == ("failed", kind) and named in said["reason"]


def test_a_new_epoch_in_the_middle_gives_up_the_old_one_at_once(sender: Sender, nodes: list[Child]) -> None:
    flat = payload(SIZE, 8)
    sender.timeout_s = LIMIT_S
    sender.form(nodes[:1], size=3)  # will never be complete
    if sender.server is None:
        sender.announce(nodes[:1], flat, BUCKET)
    began = time.monotonic()
    sender.form(nodes[:1])
    crosses(sender, nodes[:1], 9)
    assert time.monotonic() - began < LIMIT_S, "nobody waits for the deadline of the old epoch"


@pytest.mark.parametrize("victim", ["stop"], indirect=True)
def test_a_sender_that_closes_midway_is_not_held_by_one_who_stands_still(sender: Sender, victim: Child) -> None:
    flat = payload(SIZE, 9)
    sender.form([victim])
    sender.announce([victim], flat, BUCKET)
    thread, _ = sender.send_behind(flat, BUCKET)
    time.sleep(0.5)
    sender.close()
    thread.join(bucket_timeout(TIMEOUT_S) + SLACK_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("transport", ["gloo", "relay"])
def test_a_receiver_that_closes_midway_ends(transport: str) -> None:
    child = Child(layout_of(payload(SIZE, 0)))
    sender = Sender(transport, LIMIT_S)
    sender.form([child], size=3)
    flat = payload(SIZE, 1)
    sender.announce([child], flat, BUCKET)
    began = time.monotonic()
    said = child.end()
    while said.get("event") != "closed":
        said = child.hear()
        assert said
    assert time.monotonic() - began < LIMIT_S, "it does not wait for the deadline"
    sender.close()
    child.kill()


def test_a_node_serves_what_it_holds_and_stops_when_the_next_version_comes(nodes: list[Child]) -> None:
    relay = Sender("sealed relay", TIMEOUT_S)
    peer, other = nodes[:2]
    held = crosses(relay, [peer], 10)
    flat = payload(SIZE, 10)
    again = relay.parts_of(flat, BUCKET)
    relay.server.withdraw()  # type: ignore[union-attr]
    for part in again:
        peer.tell(Serve(0, held.version + 1, part))  # that it does not have
        peer.tell(Serve(0, held.version, structs.replace(part, digests=b"")))
    made = structs.replace(held, parts=again)
    relay.fetch(other, made, peer.address)
    assert other.hear()["checksum"] == held.checksum
    crosses(relay, [peer], 11)
    relay.timeout_s = 1.0
    relay.fetch(other, structs.replace(made, timeout_s=1.0), peer.address)
    said = other.hear()
    assert said["kind"] == FailureKind.LATE
    assert re.search("0 of (6|11) pieces", str(said["reason"]))  # whichever part fails first
    relay.close()


def test_a_fetch_goes_on_at_another_source_with_the_piece_that_it_lacks(nodes: list[Child]) -> None:
    relay = Sender("sealed relay", LIMIT_S)
    flat = payload(SIZE, 12)
    made = relay.announce([], flat, BUCKET)
    epoch = relay.fetch(nodes[0], made, "tcp://127.0.0.1:9")
    for part in range(len(made.parts)):
        nodes[0].tell(Reroute(epoch.epoch - 1, part, "tcp://127.0.0.1:9"))  # an earlier attempt
        nodes[0].tell(Reroute(epoch.epoch, part, relay.server.address))  # type: ignore[union-attr]
    nodes[0].tell(Reroute(epoch.epoch, 99, "tcp://127.0.0.1:9"))
    arrived(nodes[:1], made)
    relay.close()
