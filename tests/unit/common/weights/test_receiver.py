"""Layout, packing and checksums of the flat buffer; what a receiver refuses, of whole versions and of deltas."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from common.weights.receive import receiver as receiving
from common.weights.receive.receiver import Receiver, receive_buckets
from common.weights.transports.groups import RelayedStore, bucket_timeout
from common.weights.wire import delta, flat_buffer, messages
from common.weights.wire.failures import Damaged, Failure, FailureKind, Late
from common.weights.wire.layout import ALIGNMENT, WORDS, Layout
from common.weights.wire.messages import Epoch, Publish
from tests.rigs.waiting import until

NAMED = [("a", torch.arange(5.0)), ("b", torch.arange(6.0).view(2, 3) / 7), ("c", torch.tensor(2.5))]


@pytest.fixture
def layout() -> Layout:
    return layout_of("float32")


@pytest.fixture
def flat(layout: Layout) -> torch.Tensor:
    return flat_buffer.pack(NAMED, layout)


def layout_of(dtype: str) -> Layout:
    return Layout.of([(name, dtype, tuple(t.shape)) for name, t in NAMED])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packed_tensors_come_back_in_the_layouts_dtype(dtype: str) -> None:
    layout = layout_of(dtype)
    flat = flat_buffer.pack(NAMED, layout)
    back = dict(flat_buffer.view(flat, layout))
    for name, tensor in NAMED:
        assert torch.equal(back[name], tensor.to(flat_buffer.DTYPES[dtype]))
    assert all(e.offset % ALIGNMENT == 0 for e in layout.entries)
    assert layout.total_bytes == flat.numel() == 3 * ALIGNMENT


def test_tensors_that_do_not_follow_the_layout_are_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"^tensor b .* a$"):
        flat_buffer.pack(NAMED[1:], layout)
    with pytest.raises(ValueError, match="tensor c "):
        flat_buffer.pack(NAMED[:2], layout)


def test_checksums_of_buckets_and_of_the_whole_are_those_of_one_by_one() -> None:
    flat = torch.arange(3 * flat_buffer.CACHE_BYTES + 77).to(torch.uint8)
    for bucket in (1000, flat_buffer.CACHE_BYTES, flat_buffer.CACHE_BYTES + 1, len(flat) + 1):
        buckets, whole = flat_buffer.all_checksums(flat, bucket)
        assert buckets == [flat_buffer.checksum(part) for part in flat.split(bucket)]
        assert whole == flat_buffer.checksum(flat)


def test_the_digest_sees_names_shapes_and_types_is_computed_once_and_changes_nothing_that_travels() -> None:
    base = [("a", "float32", (2, 3))]
    others = [[("b", "float32", (2, 3))], [("a", "bfloat16", (2, 3))], [("a", "float32", (3, 2))]]
    assert len({Layout.of(x).digest for x in [base, *others]}) == 4
    layout, other = layout_of("float32"), layout_of("float32")
    assert layout.digest is layout.digest
    welcome = [messages.encode(messages.Welcome(0, one)) for one in (layout, other)]
    assert layout == other and welcome[0] == welcome[1]


def test_a_buffer_is_zero_and_on_huge_pages_where_the_kernel_gives_them() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    before = _huge_kib()
    flat = flat_buffer.buffer(64 << 20)
    assert (flat.shape, flat.dtype) == ((64 << 20,), torch.uint8) and not flat.any()
    flat.fill_(1)
    if enabled.exists() and "[never]" not in enabled.read_text():
        assert _huge_kib() - before >= 32 << 10


def _huge_kib() -> int:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


class Replay:
    """A group that hands out a payload, one bucket after another."""

    def __init__(self, payload: torch.Tensor) -> None:
        self.payload, self.at, self.timeouts, self.closed = payload, 0, list[float](), False

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        self.timeouts.append(timeout_s)
        bucket.copy_(self.payload[self.at : self.at + len(bucket)])
        self.at += len(bucket)
        return lambda: None

    def close(self) -> None:
        self.closed = True


def publish_of(flat: torch.Tensor, layout: Layout, epoch: int = 1) -> Publish:
    return Publish(0, 7, epoch, layout.digest, ALIGNMENT, *flat_buffer.all_checksums(flat, ALIGNMENT), 8.0)


def test_a_bad_bucket_is_named_after_the_whole_broadcast_was_followed(layout: Layout, flat: torch.Tensor) -> None:
    damaged = flat.clone()
    damaged[ALIGNMENT] ^= 1
    group, shares = Replay(damaged), list[float]()
    with pytest.raises(Damaged) as damage:
        receive_buckets(group, torch.zeros_like(flat), publish_of(flat, layout), shares.append)
    assert [word for word in str(damage.value).split() if word.isdigit()] == ["1", "3"]
    assert group.timeouts == [bucket_timeout(8.0)] * 3, "leaving early would break the others' broadcast"
    assert shares == pytest.approx([1 / 3, 2 / 3, 1])


def failure_of(receiver: Receiver) -> FailureKind | None:
    status = receiver.status
    return status.failure.kind if status.failure is not None else None


def test_a_receiver_refuses_what_was_not_announced(layout: Layout, flat: torch.Tensor) -> None:
    receiver = Receiver(lambda epoch, store: Replay(flat))
    receiver.handle(publish_of(flat, layout))
    assert failure_of(receiver) is FailureKind.MISMATCH, "no layout was announced"
    receiver.handle(messages.Welcome(0, layout))
    receiver.handle(EPOCH)
    receiver.handle(publish_of(flat, layout, epoch=2))
    assert failure_of(receiver) is FailureKind.MISMATCH, "another epoch"
    with pytest.raises(ValueError):
        receiver.take(0, 7)


def test_a_receiver_keeps_a_collective_group_until_it_closes(layout: Layout, flat: torch.Tensor) -> None:
    group = Replay(flat)
    receiver = Receiver(lambda epoch, store: group)
    receiver.handle(messages.Welcome(0, layout))
    receiver.handle(EPOCH)
    receiver.handle(publish_of(flat, layout))
    until(lambda: receiver.status.state == "staged")
    assert not group.closed
    receiver.close()
    assert group.closed
    with pytest.raises(ValueError):
        receiver.handle(messages.Ping())
    with pytest.raises(ValueError):
        messages.decode_from_node(messages.encode(messages.Ping()))


def test_a_transfer_that_is_superseded_while_its_last_bucket_comes_closes_its_group_and_stages_nothing(
    layout: Layout, flat: torch.Tensor
) -> None:
    class Superseded(Replay):
        def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
            done = super().post(bucket, timeout_s)
            if self.at == len(flat):
                receiver.handle(messages.Welcome(1, layout))
            return done

    group = Superseded(flat)
    receiver = Receiver(lambda epoch, store: group)
    receiver.handle(messages.Welcome(0, layout))
    receiver.handle(EPOCH)
    receiver.handle(publish_of(flat, layout))
    until(lambda: group.closed)
    until(lambda: not any(thread.name == "receive-weights" for thread in threading.enumerate()))
    with pytest.raises(ValueError):
        receiver.take(0, 7)
    receiver.close()


def test_a_receiver_whose_device_has_no_room_stages_the_next_attempt_in_host_memory(
    layout: Layout, flat: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, full = flat_buffer.buffer, torch.device("cpu", 0)

    def on_device(size: int, device: torch.device | None = None) -> torch.Tensor:
        if device == full:
            raise torch.OutOfMemoryError("tried to allocate")
        return buffer(size)

    streams = list[tuple[torch.device | None, str]]()
    monkeypatch.setattr(flat_buffer, "buffer", on_device)
    monkeypatch.setattr(receiving, "own_stream", lambda *of: streams.append(of) or nullcontext())
    layout = structs.replace(layout, checksums=WORDS)
    sums = flat_buffer.all_checksums(flat, ALIGNMENT, WORDS)
    receiver = Receiver(lambda epoch, store: Replay(flat), device=full)
    receiver.handle(messages.Welcome(0, layout))
    for state in ("failed", "staged"):
        receiver.handle(EPOCH)
        receiver.handle(Publish(0, 7, 1, layout.digest, ALIGNMENT, *sums, 8.0))
        until(lambda: receiver.status.state != "receiving")
        assert receiver.status.state == state, receiver.status
    assert streams == [(full, "receive"), (None, "receive")], "it does not wait for the engine's steps"
    assert torch.equal(receiver.take(0, 7), flat)
    receiver.close()


def test_a_receiver_whose_device_gives_no_stream_says_so(
    layout: Layout, flat: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: torch.device | None, purpose: str) -> nullcontext[None]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(receiving, "own_stream", broken)
    receiver = Receiver(lambda epoch, store: Replay(flat))
    receiver.handle(messages.Welcome(0, layout))
    receiver.handle(EPOCH)
    receiver.handle(publish_of(flat, layout))
    until(lambda: receiver.status.state == "failed")
    assert receiver.status.failure is not None and "launch failure" in receiver.status.failure.text
    receiver.close()


def test_a_receiver_says_where_it_serves_if_it_can_and_shows_what_it_set_in_its_groups_store(
    layout: Layout, flat: torch.Tensor
) -> None:
    met = list[RelayedStore]()
    receiver = Receiver(lambda epoch, store: met.append(store) or Replay(flat))
    for reach in ("", "no.such.host.invalid:7", "127.0.0.1", "127.0.0.1:port"):
        assert receiver.handle(messages.Welcome(0, layout, reach), "a") == messages.Listening("a", "")
    heard = receiver.handle(messages.Welcome(0, layout, "127.0.0.1:7"), "a")
    assert heard is not None and heard.address.startswith("tcp://127.0.0.1:")
    assert receiver.handle(messages.Welcome(0, layout, "127.0.0.1:9"), "a") == heard, "it has one server"
    receiver.handle(EPOCH)
    receiver.handle(publish_of(flat, layout))
    until(lambda: receiver.status.state == "staged")
    met[0].set("mine", b"1")
    assert receiver.status.entries == {"mine": b"1"}
    receiver.handle(messages.StoreEntries(EPOCH.epoch + 1, {"theirs": b"2"}))
    assert not met[0].check(["theirs"])
    receiver.handle(messages.StoreEntries(EPOCH.epoch, {"theirs": b"2"}))
    assert met[0].get("theirs") == b"2" and receiver.status.entries == {"mine": b"1"}
    receiver.handle(structs.replace(EPOCH, epoch=2))
    assert receiver.status.entries == {}, "a new group has a store of its own"
    receiver.close()


def test_an_error_becomes_a_failure_with_a_kind_and_what_a_person_needs() -> None:
    text = (
        "[/x/third_party/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:5. This is typically caused by a bug"
    )
    assert Failure.of(RuntimeError(text)) == Failure(FailureKind.OTHER, "Connection closed by peer [127.0.0.1]:5")
    assert Failure.of(RuntimeError()).text == "RuntimeError"
    assert Failure.of(Late("after 5 s\nand more")) == Failure(FailureKind.LATE, "after 5 s\nand more")
    assert Failure.told("late", "x").kind is FailureKind.LATE
    assert Failure.told("of a later release", "x").kind is Failure.told("", "x").kind is FailureKind.OTHER


# ---------------------------------------------------------------- deltas


LAYOUT = Layout.of([("a", "bfloat16", (3000,)), ("b", "float32", (100,))])
EPOCH = Epoch(1, 1, 2, 5.0)


class Node:
    """A receiver, what is sent to it, and what it answers."""

    def __init__(self) -> None:
        self.wire = Replay(torch.zeros(0, dtype=torch.uint8))
        self.receiver = Receiver(lambda epoch, store: self.wire)
        self.receiver.handle(messages.Welcome(0, LAYOUT))
        self.receiver.handle(EPOCH)

    def get(self, publish: Publish, payload: torch.Tensor) -> FailureKind | None:
        """None when the version was staged and flipped, else why not."""
        self.wire.payload, self.wire.at = payload, 0
        self.receiver.handle(publish)
        until(lambda: self.receiver.status.state != "receiving", every_s=0.002)
        status = self.receiver.status
        if status.state == "staged":
            self.flat = self.receiver.take(publish.incarnation, publish.version)
            self.receiver.give_back(self.flat)
        return failure_of(self.receiver)


def weights(version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3000, generator=generator).bfloat16(), torch.randn(100, generator=generator)
    a[:: 50 + version] *= 1.01
    a[3], a[5], b[7] = float("nan"), -0.0, float("-inf")
    return flat_buffer.pack([("a", a), ("b", b)], LAYOUT)


def publish(version: int, payload: torch.Tensor, base: int | None) -> Publish:
    encoding, base_version = ("full", -1) if base is None else ("delta", base)
    return structs.replace(
        publish_of(payload, LAYOUT), version=version, checksum=flat_buffer.checksum(weights(version)),
        encoding=encoding, base_version=base_version, payload_bytes=payload.numel(),
    )  # fmt: skip


def step(old: int, new: int) -> tuple[Publish, torch.Tensor]:
    stream = delta.encode(weights(old), weights(new), delta.BLOCK_BYTES)
    return publish(new, stream, old), stream


@pytest.fixture
def node() -> Node:
    made = Node()
    assert made.get(publish(1, weights(1), None), weights(1)) is None
    return made


def test_deltas_after_an_anchor_give_the_published_bits(node: Node) -> None:
    for old, new in ((1, 2), (2, 5), (5, 6)):
        assert node.get(*step(old, new)) is None
        assert torch.equal(node.flat, weights(new))


def test_a_delta_to_another_base_or_to_none_is_refused(node: Node) -> None:
    assert Node().get(*step(1, 2)) is FailureKind.MISMATCH
    assert node.get(*step(3, 4)) is FailureKind.MISMATCH
    announced, stream = step(1, 2)
    assert node.get(structs.replace(announced, incarnation=1), stream) is FailureKind.MISMATCH
    assert node.get(announced, stream) is None, "and the base is unharmed"


def test_a_damaged_stream_leaves_the_base_unharmed_and_after_a_result_of_another_version_the_next_must_be_whole(
    node: Node,
) -> None:
    announced, stream = step(1, 2)
    damaged = stream.clone()
    damaged[len(damaged) // 2] ^= 1
    assert node.get(announced, damaged) is FailureKind.DAMAGED
    assert node.get(announced, stream) is None
    assert torch.equal(node.flat, weights(2))
    announced, stream = step(2, 3)
    assert node.get(structs.replace(announced, checksum="another"), stream) is FailureKind.DAMAGED
    with pytest.raises(ValueError):
        node.receiver.take(0, 3)
    assert node.get(announced, stream) is FailureKind.MISMATCH, "nothing is known of the staging buffer"
    assert node.get(publish(3, weights(3), None), weights(3)) is None
    assert torch.equal(node.flat, weights(3))


@pytest.mark.parametrize(
    "change", [*({"payload_bytes": n} for n in (0, -1, LAYOUT.total_bytes + 17)), {"encoding": "sparse"}]
)
def test_an_impossible_size_and_an_encoding_of_a_later_release_are_refused(node: Node, change: dict[str, Any]) -> None:
    announced, stream = step(1, 2)
    assert node.get(structs.replace(announced, **change), stream) is FailureKind.MISMATCH
