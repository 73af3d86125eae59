"""Several sources of one version: each sends its own part, and the version is whole when all of them are there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from common.config.schema import WeightsConfig
from common.errors import SlipstreamError
from common.security.credentials import KeyFolder
from common.weights.source.publisher import WeightPublisher
from common.weights.source.sources import RemoteSource
from launch.keys import make
from tests.rigs.waiting import until
from tests.rigs.weight_plane import NodeProcess, Plane, running

SHAPES = [[("a.weight", (100_000, 2)), ("a.bias", (33,))], [("b.weight", (70_001,))], [("c.weight", (9, 7))]]


class Sources:
    """The lead's publisher and the other sources, in one process."""

    def __init__(self, plane: Plane, credentials: str | None = None, **config: Any) -> None:
        self.publisher: WeightPublisher = plane.publisher(transport="relay", credentials=credentials, **config)
        self.address = self.publisher.start()
        self.publisher.share(SHAPES)
        weights = msgspec.structs.replace(WeightsConfig(anchor_every=0, timeout_s=60.0), **config)
        self.others = [self.source(number, weights, credentials) for number in (1, 2)]

    def source(self, number: int, weights: WeightsConfig, credentials: str | None) -> RemoteSource:
        options = {"dtype": "float32", "weights": weights, "credentials": credentials}
        return RemoteSource(number, SHAPES, self.publisher.lead, **options)

    def publish(self, version: int, *numbers: int) -> None:
        """The parts of these sources; all of them if none is named."""
        for number in numbers or (2, 1, 0):
            named = [(name, tensor(version, shape)) for name, shape in SHAPES[number]]
            if number:
                self.others[number - 1].publish(version, named)
            else:
                self.publisher.publish(version, named, None)

    def close(self) -> None:
        for other in self.others:
            other.close()


def tensor(version: int, shape: tuple[int, ...]) -> torch.Tensor:
    """One element in ten tells the version."""
    made = torch.ones(shape)
    made.view(-1)[::10] = version
    return made


@pytest.fixture
def sources(plane: Plane) -> Iterator[Sources]:
    made = Sources(plane)
    yield made
    made.close()


def parts_of(node: NodeProcess) -> list[object]:
    return [e["sources"] for e in node.heard() if e["event"] == "publish"]


@pytest.mark.parametrize("secured", [False, True], ids=["open", "keys"])
def test_every_part_comes_from_its_source_and_goes_on_from_node_to_node(
    plane: Plane, tmp_path: Path, secured: bool
) -> None:
    folder, names, options = KeyFolder(tmp_path / "keys"), ["n0", "n1"], dict[str, Any]()
    make(folder, names)
    sources = Sources(plane, str(folder.path) if secured else None)
    nodes = []
    for name in names:
        options = {"credentials": str(folder.nodes / f"{name}.json")} if secured else {}
        nodes += plane.following(sources.address, name, **options)
    until(lambda: sources.publisher.stats().nodes == 2)
    for version in (1, 2):
        sources.publish(version)
        running(version, *nodes)
    first, second = sorted((parts_of(node)[-1] for node in nodes), key=lambda given: len(set(given)))
    assert len(set(second)) == 3, "the first node fetches from all sources"
    assert len(set(first)) == 1, "the second from the first"
    sources.close()


def test_a_version_is_offered_when_the_last_part_is_there_and_none_is_mixed_of_two(
    plane: Plane, sources: Sources
) -> None:
    (node,) = plane.following(sources.address, "n0")
    sources.publish(1)
    running(1, node)
    sources.publish(2, 0, 1)
    sources.publish(3, 0, 1)
    assert sources.publisher.stats().published == 1, "part 2 is missing"
    sources.publish(2, 2)
    running(2, node)
    sources.publish(3, 2)
    running(3, node)
    until(lambda: set(sources.others[0]._snapshots) == {3}, "older versions to be forgotten")


def test_deltas_of_several_sources_change_their_own_parts_and_newcomers_get_all_of_it_whole(plane: Plane) -> None:
    sources = Sources(plane, encoding="delta")
    (node,) = plane.following(sources.address, "n0")
    sources.publish(1)
    running(1, node)
    until(lambda: sources.publisher.stats().version_active == 1)
    sources.publish(2)
    running(2, node)
    until(lambda: sources.publisher.stats().version_active == 2)
    (late,) = plane.following(sources.address, "late")
    running(2, late)
    sources.publish(3)
    running(3, node, late)
    until(lambda: sources.publisher.stats().version_active == 3)
    assert [e["encoding"] for e in node.heard() if e["event"] == "publish"] == ["full", "delta", "delta"]
    assert sources.publisher.stats().publish_bytes < 4 * 270_000, "less than the whole version for one of the two"
    sources.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it stops with the reason
def test_a_source_that_cannot_send_is_the_learners_fatal_error(
    plane: Plane, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.following(sources.address, "n0")
    monkeypatch.setattr("common.weights.source.sources.new_part", None)
    sources.publish(1)
    until(lambda: sources.publisher.stats().crashed)
    until(lambda: sources.others[0]._error)
    with pytest.raises(SlipstreamError):
        sources.publish(2, 1)
