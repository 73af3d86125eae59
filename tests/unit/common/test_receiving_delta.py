"""Deltas at the receiving end: applied to what the staging buffer has and verified, or refused with it unharmed."""

import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from common.weights import delta, packing
from common.weights.layout import Layout, ranges
from common.weights.messages import Epoch, Publish
from common.weights.receiver import Receiver

LAYOUT = Layout.of([("a", "bfloat16", (3000,)), ("b", "float32", (100,))])
BUCKET = 256
EPOCH = Epoch(1, 1, 2, "127.0.0.1", 1, 5.0)


class Wire:
    """A group that hands out whatever payload is put on it."""

    def __init__(self) -> None:
        self.payload = torch.zeros(0, dtype=torch.uint8)
        self.at = 0

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        bucket.copy_(self.payload[self.at : self.at + len(bucket)])
        self.at += len(bucket)
        return lambda: None

    def close(self) -> None:
        pass


class Node:
    """A receiver, what is sent to it, and what it answers."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.receiver = Receiver(lambda epoch: self.wire)
        self.receiver.set_layout(LAYOUT)
        self.receiver.set_epoch(EPOCH)

    def get(self, publish: Publish, payload: torch.Tensor) -> str:
        """'' when the version was staged and flipped, else why not."""
        self.wire.payload, self.wire.at = payload, 0
        try:
            self.receiver.start(publish)
        except ValueError as error:
            return str(error)
        deadline = time.monotonic() + 20
        while (status := self.receiver.status).state == "receiving":
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if status.state == "staged":
            self.flat = self.receiver.take(publish.incarnation, publish.version)
            self.receiver.give_back(self.flat)
        return status.error


def weights(version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3000, generator=generator).bfloat16(), torch.randn(100, generator=generator)
    a[:: 50 + version] *= 1.01
    a[3], a[5], b[7] = float("nan"), -0.0, float("-inf")
    return packing.pack([("a", a), ("b", b)], LAYOUT)


def publish(version: int, payload: torch.Tensor, base: int | None) -> Publish:
    return Publish(
        incarnation=0, version=version, epoch=1, layout_digest=LAYOUT.digest, bucket_bytes=BUCKET,
        bucket_checksums=packing.all_checksums(payload, BUCKET)[0], checksum=packing.checksum(weights(version)),
        timeout_s=5.0, encoding="full" if base is None else "delta", base_version=-1 if base is None else base,
        payload_bytes=payload.numel(),
    )  # fmt: skip


def step(old: int, new: int) -> tuple[Publish, torch.Tensor]:
    stream = delta.encode(weights(old), weights(new), delta.BUCKET_BYTES)
    return publish(new, stream, old), stream


@pytest.fixture
def node() -> Node:
    made = Node()
    assert made.get(publish(1, weights(1), None), weights(1)) == ""
    return made


def test_deltas_after_an_anchor_give_the_published_bits(node: Node) -> None:
    for old, new in ((1, 2), (2, 5), (5, 6)):
        assert node.get(*step(old, new)) == ""
        assert torch.equal(node.flat, weights(new))


def test_a_delta_to_another_base_is_refused_and_names_both(node: Node) -> None:
    assert "a delta to (0, 3), the staging buffer has (0, 1)" in node.get(*step(3, 4))
    assert "a delta to (1, 1), the staging buffer has (0, 1)" in node.get(
        msgspec.structs.replace(step(1, 2)[0], incarnation=1), step(1, 2)[1]
    )
    assert node.get(*step(1, 2)) == "", "and the base is unharmed"


def test_a_node_without_weights_refuses_a_delta() -> None:
    assert "the staging buffer has None" in Node().get(*step(1, 2))


def test_a_stream_damaged_on_its_way_is_refused_and_the_base_unharmed(node: Node) -> None:
    announced, stream = step(1, 2)
    damaged = stream.clone()
    damaged[len(damaged) // 2] ^= 1
    assert "checksum mismatch in bucket" in node.get(announced, damaged)
    assert node.get(announced, stream) == ""
    assert torch.equal(node.flat, weights(2))


def test_a_result_that_is_not_the_published_version_is_never_staged_and_the_next_must_be_whole(node: Node) -> None:
    announced, stream = step(1, 2)
    assert "the delta from version 1 gives" in node.get(msgspec.structs.replace(announced, checksum="another"), stream)
    with pytest.raises(ValueError, match="not staged"):
        node.receiver.take(0, 2)
    assert "the staging buffer has None" in node.get(announced, stream)
    assert node.get(publish(2, weights(2), None), weights(2)) == ""
    assert torch.equal(node.flat, weights(2))


@pytest.mark.parametrize("size", [0, -1, LAYOUT.total_bytes + 17])
def test_an_impossible_size_is_refused(node: Node, size: int) -> None:
    announced, stream = step(1, 2)
    assert f"a delta of {size} bytes" in node.get(msgspec.structs.replace(announced, payload_bytes=size), stream)


def test_an_encoding_of_a_later_release_is_refused_by_name(node: Node) -> None:
    announced, stream = step(1, 2)
    assert "'sparse', which is not known" in node.get(msgspec.structs.replace(announced, encoding="sparse"), stream)


def test_buckets_cover_a_payload_of_any_size() -> None:
    assert ranges(5, 2) == [(0, 2), (2, 4), (4, 5)]
    assert len(packing.all_checksums(torch.zeros(5, dtype=torch.uint8), 2)[0]) == 3
