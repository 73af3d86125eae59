"""Which way the weights take to whom: newcomers, nodes that no collective reaches, peers as sources, no overlap."""

import time
from pathlib import Path

from common.security.credentials import KeyFolder
from launch.keys import make
from tests.rigs.waiting import until
from tests.rigs.weight_plane import NodeProcess, Plane, running, spread, weights


def ways(node: NodeProcess) -> list[object]:
    """The transport of every epoch that the node was told of."""
    return [e["transport"] for e in node.events if e["event"] == "epoch"]


def sources(node: NodeProcess) -> list[object]:
    """Where it fetched from, in order."""
    first = [source for e in node.events if e["event"] == "publish" for source in e["sources"]]  # type: ignore[attr-defined]
    return first + [e["to"] for e in node.events if e["event"] == "reroute"]


def address_of(node: NodeProcess) -> object:
    return next(e["address"] for e in node.heard() if e["event"] == "listens")


def test_a_newcomer_is_served_by_a_node_that_holds_the_version_and_joins_the_group_at_the_next(plane: Plane) -> None:
    publisher, address, (first,) = plane.fleet("first")
    spread(publisher, 1, first)
    (late,) = plane.following(address, "late")
    running(1, late)
    first.wait("serve")
    assert sources(late) == [address_of(first)]
    spread(publisher, 2, first, late)
    assert ways(late) == ["relay", "gloo"] and publisher.stats().ejections == 0


def test_a_peer_that_serves_other_bytes_does_no_harm_and_is_not_asked_again(plane: Plane) -> None:
    publisher = plane.publisher()
    address = publisher.start()
    (liar,) = plane.following(address, "liar", spoil_served=True)
    spread(publisher, 1, liar)
    for name in ("late", "later"):
        (node,) = plane.following(address, name)
        running(1, node)
        if name == "late":
            asked, then = sources(node)
            assert asked == address_of(liar) != then, "then the learner served it"
        else:
            assert address_of(liar) not in sources(node)
        node.close()
    spread(publisher, 2, liar)  # it was not ejected


def test_versions_in_device_memory_come_to_groups_from_there_and_to_newcomers_from_the_learner(plane: Plane) -> None:
    publisher, address, nodes = plane.fleet("first", buffers="device")
    spread(publisher, 1, *nodes)
    for version, name in ((2, "late"), (3, "later")):
        (late,) = plane.following(address, name)
        running(version - 1, late)
        assert address_of(nodes[0]) not in sources(late), "the engine's device does not serve"
        nodes.append(late)
        spread(publisher, version, *nodes)
        assert ways(late) == ["relay", "gloo"]
    (broken,) = plane.following(address, "broken", break_load=True)
    assert "published" in str(broken.wait("excluded")["reason"])


def test_a_fleet_with_keys_passes_sealed_pieces_from_node_to_node(plane: Plane, tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    names = ["first", "second", "third"]
    make(folder, names)
    publisher = plane.publisher(credentials=str(folder.path), transport="relay")
    at = publisher.start()
    nodes = [plane.following(at, name, credentials=str(folder.nodes / f"{name}.json"))[0] for name in names]
    until(lambda: publisher.stats().nodes == 3)
    for version in (1, 2):
        spread(publisher, version, *nodes)
    own = {address_of(node) for node in nodes}
    for version in (1, 2):
        first = [e["sources"] for n in nodes for e in n.events if e["event"] == "publish" and e["version"] == version]
        assert len(own.intersection(source for [source] in first)) == 2, "one fetches from the learner"  # type: ignore[misc]


def test_a_fleet_without_collectives_is_served_by_relay_alone(plane: Plane) -> None:
    publisher, _, nodes = plane.fleet("n0", "n1", transport="relay")
    for version in (1, 2, 3):
        spread(publisher, version, *nodes)
    assert {way for node in nodes for way in ways(node)} == {"relay"}
    until(lambda: publisher.stats().version_active == 3)
    assert publisher.stats().publish_s > 0


def test_a_node_that_asks_for_the_relay_gets_it_beside_a_group_of_the_others(plane: Plane) -> None:
    publisher, address, (member,) = plane.fleet("member")
    (apart,) = plane.following(address, "apart", transport="relay")
    until(lambda: publisher.stats().nodes == 2)
    for version in (1, 2):
        spread(publisher, version, member, apart)
    assert set(ways(apart)) == {"relay"} and ways(member) == ["gloo"]


def test_a_node_that_no_collective_reaches_gets_the_relay_and_is_not_ejected(plane: Plane) -> None:
    publisher, address, (good,) = plane.fleet("good", timeout_s=8.0)
    (lonely,) = plane.following(address, "lonely", fault="no collective")
    until(lambda: publisher.stats().nodes == 2)
    for version in (1, 2):
        spread(publisher, version, good, lonely)
    assert ways(lonely)[-1] == "relay" and publisher.stats().ejections == 0
    before = len(ways(good))
    spread(publisher, 3, good, lonely)
    assert len(ways(good)) - before <= 1, "the collective is not tried with it at every version"


def test_without_overlap_a_publish_returns_when_every_node_runs_the_version(plane: Plane) -> None:
    publisher = plane.publisher(overlap=False, timeout_s=8.0)
    address = publisher.start()
    began = time.perf_counter()
    publisher.publish(0, weights(0), None)
    assert time.perf_counter() - began < 4, "nobody is there to wait for"
    running(0, *plane.following(address, "n0", "n1"))
    for version in (1, 2):
        publisher.publish(version, weights(version), None)
        assert publisher.stats().version_active == version


def test_without_overlap_a_publish_waits_for_a_node_that_stands_still_no_longer_than_the_timeout(plane: Plane) -> None:
    timeout_s = 4.0
    publisher, address, (fine,) = plane.fleet("fine", overlap=False, timeout_s=timeout_s)
    (stuck,) = plane.following(address, "stuck", fault="stop", at=3)
    until(lambda: publisher.stats().nodes == 2)
    began = time.monotonic()
    publisher.publish(1, weights(1), None)
    assert time.monotonic() - began < timeout_s + 1
    running(1, fine)
    assert stuck.process.is_alive()
