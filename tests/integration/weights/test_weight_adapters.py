"""Versions that travel as adapters: nodes as real processes, which join, die, change learners and merge wrongly."""

import signal

import pytest
import torch

from common.weights.source.publisher import WeightPublisher
from common.weights.wire.adapters import merge, names
from common.weights.wire.failures import FailureKind
from common.weights.wire.layout import Layout
from tests.rigs.waiting import until
from tests.rigs.weight_plane import NodeProcess, Plane

RANK, FACTOR = 4, 0.5
SHAPES = {"q_proj.weight": (300, 200), "k_proj.weight": (100, 200), "norm.weight": (33,)}
SIZE = Layout.of([(name, "float32", shape) for name, shape in SHAPES.items()]).total_bytes
ADAPTERS = 2 * (RANK * 200 * 4) + RANK * (300 + 100) * 4  # bytes
PIECE = 16 << 10  # bytes, in a version as small as this one


def frozen(seed: int) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()]


def adapters(version: int) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(9)
    made = []
    for name, (rows, *columns) in SHAPES.items():
        for columns_of_one in columns:
            a, b = (torch.randn(shape, generator=draw) for shape in ((RANK, columns_of_one), (rows, RANK)))
            made += zip(names(name), (a, version * b), strict=True)
    return made


class Learner:
    """One incarnation of a learner that trains adapters beside `frozen(seed)`."""

    def __init__(self, plane: Plane, transport: str = "gloo", incarnation: int = 0, seed: int = 0) -> None:
        self.publisher: WeightPublisher = plane.publisher(incarnation, encoding="adapter", transport=transport)
        self.frozen = frozen(seed)
        self.publisher.freeze(self.frozen, FACTOR)
        self.address = self.publisher.start()

    def expect(self, count: int) -> None:
        until(lambda: self.publisher.stats().nodes == count)

    def publish(self, version: int, *nodes: NodeProcess) -> list[str]:
        """How the version came to each node, the last attempt last; they run it."""
        beside = dict(adapters(version))
        merged = [
            (name, merge(weight, *(beside[part] for part in names(name)), FACTOR) if weight.dim() == 2 else weight)
            for name, weight in self.frozen
        ]
        self.publisher.publish(version, merged, None, adapters(version))
        first = merged[0][1][0, 0].item()
        return [came(node, version, first) for node in nodes]


def came(node: NodeProcess, version: int, first: float | None = None) -> str:
    active = node.wait("active", version=version)
    assert first is None or active["value"] == first
    return " ".join(str(e["encoding"]) for e in node.events if e["event"] == "publish" and e["version"] == version)


@pytest.mark.parametrize("transport", ["gloo", "relay"])
def test_adapters_reach_nodes_with_the_frozen_weights_and_others_get_these_once(plane: Plane, transport: str) -> None:
    learner = Learner(plane, transport)
    (node,) = plane.following(learner.address, "n0")
    learner.expect(1)
    assert learner.publish(0, node) == ["full"], "B is zero: the version is the frozen weights"
    assert learner.publish(1, node) == ["adapter"]
    until(lambda: learner.publisher.stats().publish_bytes == ADAPTERS)
    (late,) = plane.following(learner.address, "late")
    assert came(late, 1) == "both"
    learner.expect(2)
    assert learner.publish(2, node, late) == ["adapter"] * 2
    until(lambda: learner.publisher.stats().publish_bytes == 2 * ADAPTERS)
    late.signal(signal.SIGKILL)
    learner.expect(1)
    (back,) = plane.following(learner.address, "late")
    assert came(back, 2) == "both", "a new process has nothing"
    assert learner.publish(3, node, back) == ["adapter"] * 2

    learner.publisher.close()  # the learner resumes as another process
    resumed = Learner(plane, transport, incarnation=1)
    node.follow(resumed.address, 1)
    resumed.expect(1)
    assert resumed.publish(4, node) == ["adapter"], "it kept the frozen weights"
    other = Learner(plane, transport, incarnation=2, seed=1)
    node.follow(other.address, 2)
    other.expect(1)
    assert other.publish(5, node) == ["both"], "they are others"
    assert other.publish(6, node) == ["adapter"]


def test_a_corrupted_adapter_is_named_and_sent_again(plane: Plane) -> None:
    learner = Learner(plane)
    (node,) = plane.following(learner.address, "n0", fault="corrupt", at=-(-SIZE // PIECE) + 1)  # in version 1
    learner.expect(1)
    assert learner.publish(0, node) == ["full"]
    assert learner.publish(1, node) == ["adapter adapter"]
    failed = [event for event in node.events if event["event"] == "failed"]
    assert [event["kind"] for event in failed] == [FailureKind.DAMAGED] and failed[0]["version"] == 1
    assert learner.publisher.stats().ejections == 0


def test_a_node_that_merges_to_other_bits_gets_versions_whole_and_the_others_adapters(plane: Plane) -> None:
    learner = Learner(plane)
    good, odd = (plane.following(learner.address, name, odd_merge=name == "odd")[0] for name in ("good", "odd"))
    learner.expect(2)
    assert learner.publish(0, good, odd) == ["full"] * 2
    assert learner.publish(1, good, odd)[1].split()[-2:] == ["both", "full"]
    kinds = {event["kind"] for event in odd.events if event["event"] == "failed"}
    assert kinds == {FailureKind.MISMATCH}
    assert learner.publish(2, good, odd) == ["adapter", "full"]
    assert learner.publisher.stats().ejections == 0
