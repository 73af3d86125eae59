"""Weights between hosts with slow cables: bytes of each cable, and nodes that die in the middle of a transfer.

The learner's cable carries a version about once, because every node passes it on to the next one. With two sources,
each one's cable carries its half. A transfer takes about a second, so that a fault can come at a chosen part of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.weights.transports.relay import WINDOW
from common.weights.wire.pieces import piece_bytes
from tests.rigs.waiting import until
from tests.rigs.weight_hosts import NodeWorker, Publication, WeightRig
from tests.rigs.weight_processes import value

SIZE = 4 << 20  # bytes of a version
ONCE = 1.25  # bytes on a cable over those of a version that crossed it once; headers and answers are some percent
ABOUT_ONCE = 1.5


@dataclass
class Kept:
    """The rig of the tests so far, when all of them passed."""

    rig: WeightRig | None = None
    sources: int = 0

    def close(self) -> None:
        if self.rig is not None:
            self.rig.close()
        self.rig = None

    def lend(self, request: pytest.FixtureRequest, sources: int, make: Callable[[], WeightRig]) -> Iterator[WeightRig]:
        """A rig whose nodes run a version; a test leaves as many nodes behind. A failure leads to a new rig."""
        if sources != self.sources:
            self.close()
        if self.rig is None:
            self.rig, self.sources = make(), sources
            self.rig.lead()
            self.rig.spread(SIZE)
        failed = request.session.testsfailed
        yield self.rig
        if request.session.testsfailed > failed:
            self.close()


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    found = Kept()
    yield found
    found.close()


@pytest.fixture
def rig(kept: Kept, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[WeightRig]:
    """A learner and three nodes."""
    yield from kept.lend(request, 1, lambda: WeightRig(tmp_path, 3, spare=1))


@pytest.fixture
def two(kept: Kept, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[WeightRig]:
    """A learner of two sources, and two nodes whose cables are four times as fast."""
    yield from kept.lend(request, 2, lambda: WeightRig(tmp_path, 2, 20, sources=2, nodes_mbit=80))


def forwarding_and_last(rig: WeightRig) -> tuple[Publication, NodeWorker, NodeWorker]:
    """An undisturbed version, the later of the nodes that passed it on, and the one that did not."""
    quiet = rig.spread(SIZE)
    last, *others = sorted(rig.nodes, key=lambda node: quiet.sent(node.host))
    return quiet, max(others, key=lambda node: rig.hosts.index(node.host)), last


def test_a_version_crosses_the_cable_of_the_learner_once_however_many_nodes_there_are(rig: WeightRig) -> None:
    found = rig.spread(SIZE)
    seconds = found.seconds(rig.nodes)
    assert seconds > 0.9 * rig.ideal_s(SIZE), "the cables are slower than the transfer"
    for node in rig.nodes:
        assert SIZE < found.received(node.host) < ONCE * SIZE
    for host in (rig.learner_host, *rig.hosts):
        assert found.sent(host) < ABOUT_ONCE * SIZE, f"{host.name}: three nodes would take longer than one"


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["at once", "half through"])
def test_a_version_that_comes_while_another_is_sent_follows_it_and_ejects_nobody(rig: WeightRig, share: float) -> None:
    one_soon_after_another(rig, share)


def test_two_nodes_of_one_host_share_the_copy_that_crosses_its_cable(tmp_path: Path) -> None:
    rig = WeightRig(tmp_path, [2, 1])
    try:
        rig.lead()
        rig.spread(SIZE)
        found = rig.spread(SIZE)
        assert SIZE < found.received(rig.hosts[0]) < ONCE * SIZE
        assert SIZE < found.received(rig.hosts[1]) < ONCE * SIZE
    finally:
        rig.close()


@pytest.mark.parametrize("place", ["forwarding", "last"])
@pytest.mark.parametrize(("fault", "share"), [("kill", 0.15), ("kill", 0.85), ("stop", 0.5), ("cut", 0.5)])
def test_nodes_around_one_that_dies_run_the_version_and_get_nothing_twice(
    rig: WeightRig, fault: str, place: str, share: float
) -> None:
    _, forwarding, last = forwarding_and_last(rig)
    victim = forwarding if place == "forwarding" else last
    others = [node for node in rig.nodes if node is not victim]
    found = rig.publish(SIZE)
    found.reaches(victim.host, share)
    rig.strike(fault, victim)
    found.seconds(others)
    received = {node.id: found.received(node.host) / SIZE for node in others}
    assert max(received.values()) < ONCE, f"{received} of the version; struck: {victim.id}"
    rig.heal(fault, victim).active(found.version)
    rig.joined(len(rig.nodes))


def test_nodes_keep_their_version_when_the_learner_dies_and_follow_the_next_one(rig: WeightRig) -> None:
    before = rig.spread(SIZE)
    cut_short = rig.publish(SIZE)
    cut_short.reaches(rig.nodes[0].host, 0.5)
    rig.start_learner()
    rig.lead()
    after = rig.spread(SIZE)
    for node in rig.nodes:
        assert node.active(after.version)["incarnation"] == rig.incarnation
        assert node.versions()[-2:] == [before.version, after.version], "none ran a part of a version"


def test_a_newcomer_in_the_middle_of_a_transfer_gets_the_version_and_costs_the_learner_nothing(rig: WeightRig) -> None:
    late = rig.start_node(rig.hosts[-1], f"{rig.hosts[-1].name}-0")
    late.wait("up")
    found = rig.publish(SIZE)
    found.reaches(rig.nodes[0].host, 0.4)
    rig.follow(late)
    found.seconds([*rig.nodes, late])
    assert found.received(late.host) < ONCE * SIZE
    assert found.sent(rig.learner_host) < ABOUT_ONCE * SIZE
    late.kill()
    rig.joined(len(rig.nodes))


def test_a_delta_reaches_every_node_in_few_bytes(rig: WeightRig) -> None:
    rig.lead(encoding="delta")
    whole = rig.spread(SIZE)
    few = rig.spread(SIZE, changed=0.02)
    assert whole.sent(rig.learner_host) > SIZE
    for host in (rig.learner_host, *(node.host for node in rig.nodes)):
        assert max(few.received(host), few.sent(host)) < 0.2 * SIZE
    rig.lead()
    rig.spread(SIZE)


def test_a_node_that_missed_the_base_of_a_delta_gets_the_whole_version(rig: WeightRig) -> None:
    rig.lead(encoding="delta")
    rig.spread(SIZE)
    away = rig.nodes[1]
    away.stop()
    missed = rig.publish(SIZE, changed=0.02)
    missed.seconds(node for node in rig.nodes if node is not away)
    found = rig.publish(SIZE, changed=0.02)
    found.seconds(node for node in rig.nodes if node is not away)
    away.go()
    assert away.active(found.version)["value"] == value(found.version)
    rig.joined(len(rig.nodes))
    rig.lead()
    rig.spread(SIZE)


def one_soon_after_another(rig: WeightRig, share: float) -> None:
    """The next version comes when the nodes have this share of the one before."""
    ejections = rig.stats()["ejections"]
    rig.publish(SIZE).reaches(rig.nodes[0].host, share)
    newest = rig.spread(SIZE)
    for node in rig.nodes:
        versions = node.versions()
        assert versions == sorted(versions) and versions[-1] == newest.version
    assert (rig.stats()["nodes"], rig.stats()["ejections"]) == (len(rig.nodes), ejections)


# ---------------------------------------------------------------- two sources


def test_every_source_sends_its_half_once(two: WeightRig) -> None:
    found = two.spread(SIZE)
    for host in (two.learner_host, *two.source_hosts):
        assert 0.4 * SIZE < found.sent(host) < 0.75 * SIZE
    for node in two.nodes:
        assert SIZE < found.received(node.host) < ONCE * SIZE


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["at once", "half through"])
def test_a_version_of_two_sources_that_comes_while_another_is_sent_follows_it(two: WeightRig, share: float) -> None:
    one_soon_after_another(two, share)


def test_a_node_goes_on_with_the_parts_of_both_sources_while_the_one_before_it_stands_still(two: WeightRig) -> None:
    quiet = two.spread(SIZE)
    victim, other = sorted(two.nodes, key=lambda node: quiet.sent(node.host), reverse=True)
    found = two.publish(SIZE)
    found.reaches(victim.host, 0.5)
    victim.stop()
    found.seconds([other])
    assert found.received(other.host) < ONCE * SIZE
    victim.go()
    victim.active(found.version)
    two.joined(len(two.nodes))


@pytest.mark.parametrize("until_told", [False, True], ids=["soon", "after a new connection"])
@pytest.mark.parametrize("fault", ["stop", "cut"])
def test_a_transfer_goes_on_when_a_source_is_back_in_time(two: WeightRig, fault: str, until_told: bool) -> None:
    (source,), ejections = two.sources, two.stats()["ejections"]
    told = rerouted(two)
    found = two.publish(SIZE)
    until(lambda: found.sent(source.host) > SIZE / 4, "half of the source's part")
    two.strike(fault, source)
    until(lambda: found.sent(two.learner_host) > SIZE / 2, "the learner's part is out")
    if until_told:
        until(lambda: rerouted(two) > told, "a node is told to connect anew", told=two.told)
    two.end(fault, source)
    found.seconds(two.nodes)
    window = WINDOW * piece_bytes(SIZE, len(two.nodes), 0.0) if until_told else 0
    assert found.sent(source.host) < ONCE * SIZE / 2 + window
    assert found.sent(two.learner_host) < ONCE * SIZE / 2
    assert not any(node.heard("failed", version=found.version) for node in two.nodes), "it was the same transfer"
    assert (two.stats()["nodes"], two.stats()["ejections"]) == (len(two.nodes), ejections)


@pytest.mark.parametrize(("fault", "share"), [("kill", 0.1), ("kill", 0.5), ("stop", 0.1), ("cut", 0.9)])
def test_nodes_keep_their_version_when_a_source_dies_and_follow_the_next_learner(
    two: WeightRig, fault: str, share: float
) -> None:
    two.lead(timeout_s=6.0)  # nodes give the transfer up soon
    before = two.spread(SIZE)
    (source,) = two.sources
    cut_short = two.publish(SIZE)
    until(lambda: cut_short.sent(source.host) > share * SIZE / 2, f"{share} of the source's part")
    two.strike(fault, source)
    again = lambda: any(len(node.heard("publish", version=cut_short.version)) > 1 for node in two.nodes)  # noqa: E731
    all_of_it = lambda: {node.versions()[-1] for node in two.nodes} == {cut_short.version}  # noqa: E731
    until(lambda: again() or all_of_it(), "the next attempt, or the version", told=two.told)
    assert share > 0.5 or not all_of_it(), "only what the dead source's kernel had already may still come"
    kept = cut_short if all_of_it() else before
    assert [node.versions()[-1] for node in two.nodes] == [kept.version] * len(two.nodes)
    assert (two.stats()["nodes"], two.stats()["ejections"]) == (len(two.nodes), 0), "they answer"
    if fault == "cut":
        two.end(fault, source)
    two.start_learner()
    two.lead()
    after = two.spread(SIZE)
    for node in two.nodes:
        assert node.active(after.version)["incarnation"] == two.incarnation
        assert node.versions()[-2:] == [kept.version, after.version], "none ran a part of a version"
        assert not node.heard("excluded")


def rerouted(rig: WeightRig) -> int:
    return sum(len(node.heard("reroute")) for node in rig.nodes)


def test_a_broadcast_of_gloo_crosses_the_cables_in_a_network_that_the_config_trusts(tmp_path: Path) -> None:
    rig = WeightRig(tmp_path, 2, transport="gloo", keys=False)
    try:
        rig.lead()
        rig.spread(SIZE)
        found = rig.spread(SIZE)
        assert all(SIZE < found.received(node.host) < ONCE * SIZE for node in rig.nodes)
        assert all(e["transport"] == "gloo" for node in rig.nodes for e in node.heard("epoch"))
        stopped, other = rig.nodes
        stopped.stop()
        rig.publish(SIZE).seconds([other])
        stopped.go()
        until(lambda: rig.stats()["nodes"] == 2, "the stopped node is back", told=rig.told)
    finally:
        rig.close()
