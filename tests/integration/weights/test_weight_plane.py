"""The weight plane: versions, members and proofs, with real processes, sockets and gloo groups."""

import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import zmq

from common.security.credentials import KeyFolder
from common.weights.transports.groups import GlooGroup
from common.weights.wire import messages
from common.weights.wire.failures import FailureKind
from common.weights.wire.messages import Canary
from launch.keys import make
from tests.rigs.waiting import LIMIT_S, until
from tests.rigs.weight_plane import NoEvent, Plane, running, spread, weights


def test_versions_reach_every_node_and_a_late_one_at_once(plane: Plane) -> None:
    publisher, address, (first, second) = plane.fleet("n0", "n1")
    size = spread(publisher, 3, first, second)
    assert size == 200_000 * 4 + 192
    until(lambda: publisher.stats().version_active == 3)
    spread(publisher, 4, first, second, canary=Canary([1, 2, 3], [-0.5, -0.75], tolerance=0.3))
    until(lambda: publisher.stats().canary_max_difference == 0.25)
    assert publisher.stats().publish_bytes == 2 * size
    stats = publisher.stats()
    assert 0 < stats.broadcast_s <= stats.publish_s <= stats.seconds_to_active
    epochs = [e["epoch"] for e in first.events if e["event"] == "epoch"]
    assert len(epochs) == 1, "the group of unchanged members is used again"

    (late,) = plane.following(address, "late")
    running(4, late)
    assert all(e["event"] != "epoch" or e["size"] == 2 for e in late.events), "a newcomer does not stop the others"
    spread(publisher, 5, first, second, late)
    assert publisher.stats().ejections == 0


def test_with_keys_versions_reach_the_nodes_of_the_key_folder_and_no_others(plane: Plane, tmp_path: Path) -> None:
    ours, others = KeyFolder(tmp_path / "ours"), KeyFolder(tmp_path / "others")
    make(ours, ["n0", "n1"])
    make(others, ["n2"])
    publisher = plane.publisher(credentials=str(ours.path))
    address = publisher.start()
    stranger = plane.following(address, "n2", credentials=str(others.path))
    strangers = [*stranger, *plane.following(address, "keyless")]
    keys = {name: str(ours.nodes / f"{name}.json") for name in ("n0", "n1")}
    members = [plane.following(address, name, credentials=key)[0] for name, key in keys.items()]
    until(lambda: publisher.stats().nodes == 2)
    spread(publisher, 1, *members)
    assert publisher.stats().nodes == 2
    for node in strangers:
        with pytest.raises(NoEvent):
            node.wait("active", limit_s=0.5)


@pytest.mark.parametrize("fault", ["kill", "stop", "cut"])
def test_a_member_lost_mid_broadcast_does_not_keep_the_version_from_the_others(plane: Plane, fault: str) -> None:
    timeout_s = 4.0
    publisher = plane.publisher(timeout_s=timeout_s)
    address = publisher.start()
    survivors = plane.following(address, "n0", "n1")
    (victim,) = plane.following(address, "victim", fault=fault, at=18)  # in the second publish
    until(lambda: publisher.stats().nodes == 3)
    spread(publisher, 1, *survivors, victim)
    publisher.publish(2, weights(2), None)
    lost = victim.wait("fault", kind=fault)
    if fault == "stop":  # `status` names it while it is waited for
        until(lambda: ("victim", 2) in {(late.node_id, late.version) for late in publisher.stats().undelivered})
    for node in survivors:
        active = node.wait("active", version=2)
        assert active["value"] == 2.0
        waited = float(str(active["time"])) - float(str(lost["time"]))
        assert waited < timeout_s, f"the survivors waited {waited:.2f} s"
        print(f"{fault}: a survivor runs version 2 {waited:.2f} s after the fault")
    until(lambda: publisher.stats().ejections == 1 and publisher.stats().version_active == 2)
    assert [node.node_id for node in publisher.lost_nodes()] == ["victim"] and not [*publisher.lost_nodes()]
    assert publisher.stats().nodes == 2
    if fault == "stop":
        victim.signal(signal.SIGCONT)
    if fault != "kill":  # it wakes up, or its network comes back, and it joins again
        running(2, victim)


def test_a_corrupted_bucket_is_rejected_sent_again_and_never_activated(plane: Plane) -> None:
    publisher, address, (good,) = plane.fleet("good")
    (bad,) = plane.following(address, "bad", fault="corrupt", at=5)
    until(lambda: publisher.stats().nodes == 2)
    publisher.publish(1, weights(1), None)
    failed = bad.wait("failed", version=1)
    assert failed["kind"] == FailureKind.DAMAGED and "bucket 4" in str(failed["reason"]), failed
    assert not [e for e in bad.events if e["event"] == "active"]
    running(1, bad, good)
    assert publisher.stats().ejections == 0


def mostly_alike(version: int) -> list[tuple[str, torch.Tensor]]:
    """Weights; a tenth of their elements differs from version to version."""
    made = weights(1)
    made[0][1].view(-1)[::10] = float(version)
    return made


@pytest.mark.parametrize("transport", ["gloo", "relay"])
def test_a_delta_reaches_those_who_hold_its_base_and_everyone_else_gets_the_whole_version(
    plane: Plane, transport: str
) -> None:
    publisher, address, (first, second) = plane.fleet("n0", "n1", encoding="delta", transport=transport)
    whole = publisher.publish(1, mostly_alike(1), None)
    running(1, first, second)
    until(lambda: publisher.stats().version_active == 1)
    if transport == "gloo":  # bytes for newcomers only are not in the figures of a publish
        assert publisher.stats().publish_bytes == 2 * whole
    publisher.publish(2, mostly_alike(2), None)
    running(2, first, second)
    until(lambda: publisher.stats().version_active == 2)
    assert publisher.stats().publish_bytes < 2 * whole / 4
    (late,) = plane.following(address, "late")
    running(2, late)  # it gets the version whole
    publisher.publish(3, mostly_alike(3), None)
    running(3, first, second, late)
    until(lambda: publisher.stats().version_active == 3)
    assert publisher.stats().publish_bytes < 3 * whole / 4
    assert publisher.stats().ejections == 0


def test_a_node_that_joins_again_gets_the_next_version_whole_beside_the_delta_of_the_others(plane: Plane) -> None:
    publisher, address, (node,) = plane.fleet("n0", encoding="delta")
    publisher.publish(1, mostly_alike(1), None)
    node.wait("active", version=1)
    until(lambda: publisher.stats().version_active == 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as again:
        again.setsockopt(zmq.LINGER, 0)
        again.connect(address)
        again.send(messages.encode(messages.Join("n1", 1, 0, 1)))  # as after an ejection: it runs version 1
        until(lambda: publisher.stats().nodes == 2)
        publisher.publish(2, mostly_alike(2), None)
        heard: list[object] = []
        while not any(isinstance(message, messages.Publish) for message in heard):
            assert again.poll(int(LIMIT_S * 1000)), heard
            heard.append(messages.decode_from_learner(again.recv()))
    assert any(isinstance(message, messages.Welcome) for message in heard), "which empties its buffer"
    assert (heard[-1].encoding, heard[-1].base_version) == ("full", -1)
    running(2, node)


def test_a_node_whose_weights_do_not_prove_is_excluded_and_said_to_be(plane: Plane) -> None:
    publisher = plane.publisher()
    (node,) = plane.following(publisher.start(), "n0", break_load=True)
    until(lambda: publisher.stats().nodes == 1)
    publisher.publish(1, weights(1), None)
    assert "published" in str(node.wait("excluded")["reason"])
    until(lambda: publisher.stats().fatal is not None)
    assert publisher.stats().nodes == 0 and publisher.stats().version_active == -1


def test_a_canary_out_of_tolerance_stops_the_node(plane: Plane) -> None:
    publisher, _, (node,) = plane.fleet("n0")
    publisher.publish(1, weights(1), Canary([1, 2], [float("nan")], tolerance=10.0))
    assert "canary" in str(node.wait("excluded")["reason"])
    until(lambda: "canary" in (publisher.stats().fatal or ""))
    node.close()
    time.sleep(2.5)  # pings find the closed connection; a learner that looks only then must still hear why
    assert "canary" in (publisher.stats().fatal or "")


@pytest.mark.parametrize("differs", [-11.0, math.nan])
def test_a_node_that_decodes_with_other_weights_than_it_prefills_with_stops(plane: Plane, differs: float) -> None:
    publisher = plane.publisher()
    (node,) = plane.following(publisher.start(), "n0", decoding_differs=differs)
    until(lambda: publisher.stats().nodes == 1)
    publisher.publish(1, weights(1), Canary([1, 2], [-0.5], tolerance=10.0))
    reason = str(node.wait("excluded")["reason"])
    assert "canary" in reason and "decoding" in reason


def test_the_newest_version_wins_when_publishes_outrun_the_transfer(plane: Plane) -> None:
    released = threading.Event()

    class SlowGroup(GlooGroup):
        def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
            assert released.wait(LIMIT_S)
            return super().post(bucket, timeout_s)

    publisher, _, (node,) = plane.fleet("n0", factory=SlowGroup)
    for version in range(1, 6):  # a publish never waits for a slow node
        publisher.publish(version, weights(version), None)
        if version == 1:
            node.wait("epoch")
    released.set()
    node.wait("active", version=5)
    assert [e["version"] for e in node.events if e["event"] == "active"] == [1, 5]


def test_a_restarted_learner_wins_even_with_a_lower_version(plane: Plane) -> None:
    old, _, (node,) = plane.fleet("n0")
    old.publish(9, weights(9), None)
    node.wait("active", version=9, incarnation=0)
    new = plane.publisher(incarnation=1)
    address = new.start()
    new.publish(7, weights(7), None)
    node.follow(address, 1)
    assert node.wait("active", version=7, incarnation=1)["value"] == 7.0
    until(lambda: old.stats().nodes == 0)


def test_everything_listens_on_the_configured_address_only(plane: Plane) -> None:
    publisher = plane.publisher()
    assert publisher.start().startswith("tcp://127.0.0.1:")
    listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert set(listening) == {"127.0.0.1"}
