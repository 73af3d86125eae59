"""Layout, packing and checksums of the flat buffer, and the receiver's refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import structs

from common.weights import messages, packing
from common.weights.collectives import bucket_timeout, reason_of
from common.weights.layout import ALIGNMENT, Layout
from common.weights.messages import Epoch, Publish, Source
from common.weights.receiver import Receiver, receive_buckets
from tests.waiting import until

NAMED = [("a", torch.arange(5.0)), ("b", torch.arange(6.0).view(2, 3) / 7), ("c", torch.tensor(2.5))]


@pytest.fixture
def layout() -> Layout:
    return layout_of("float32")


@pytest.fixture
def flat(layout: Layout) -> torch.Tensor:
    return packing.pack(NAMED, layout)


def layout_of(dtype: str) -> Layout:
    return Layout.of([(name, dtype, tuple(t.shape)) for name, t in NAMED])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packed_tensors_come_back_in_the_layouts_dtype(dtype: str) -> None:
    layout = layout_of(dtype)
    flat = packing.pack(NAMED, layout)
    back = dict(packing.view(flat, layout))
    for name, tensor in NAMED:
        assert torch.equal(back[name], tensor.to(packing.DTYPES[dtype]))
    assert all(e.offset % ALIGNMENT == 0 for e in layout.entries)
    assert layout.total_bytes == flat.numel() == 3 * ALIGNMENT


def test_tensors_that_do_not_follow_the_layout_are_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"b .* does not follow the layout, which has a"):
        packing.pack(NAMED[1:], layout)
    with pytest.raises(ValueError, match="tensor c of the layout was not given"):
        packing.pack(NAMED[:2], layout)


def test_any_changed_bit_changes_the_checksum_of_its_bucket_only(flat: torch.Tensor) -> None:
    before = packing.all_checksums(flat, ALIGNMENT)[0]
    flat[ALIGNMENT + 3] ^= 1
    after = packing.all_checksums(flat, ALIGNMENT)[0]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_checksums_of_buckets_and_of_the_whole_are_those_of_one_by_one() -> None:
    flat = torch.arange(3 * packing.BLOCK_BYTES + 77).to(torch.uint8)
    for bucket in (1000, packing.BLOCK_BYTES, packing.BLOCK_BYTES + 1, len(flat) + 1):
        buckets, whole = packing.all_checksums(flat, bucket)
        assert buckets == [packing.checksum(part) for part in flat.split(bucket)]
        assert whole == packing.checksum(flat)


def test_the_layouts_digest_sees_names_shapes_and_types() -> None:
    base = [("a", "float32", (2, 3))]
    others = [[("b", "float32", (2, 3))], [("a", "bfloat16", (2, 3))], [("a", "float32", (3, 2))]]
    assert len({Layout.of(x).digest for x in [base, *others]}) == 4


def _copy(part: torch.Tensor, bucket: torch.Tensor) -> None:
    bucket.copy_(part)


def test_the_digest_of_thousands_of_entries_is_computed_once_and_changes_nothing_that_travels() -> None:
    layout, other = layout_of("float32"), layout_of("float32")
    digest = layout.digest
    assert layout.digest is digest
    assert layout == other and messages.encode(messages.Welcome(0, layout)) == messages.encode(
        messages.Welcome(0, other)
    )


def test_a_buffer_is_zero_and_on_huge_pages_where_the_kernel_gives_them() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    before = _huge_kib()
    flat = packing.buffer(64 << 20)
    assert (flat.shape, flat.dtype) == ((64 << 20,), torch.uint8) and not flat.any()
    if enabled.exists() and "[never]" not in enabled.read_text():
        assert _huge_kib() - before >= 32 << 10


def _huge_kib() -> int:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


class Replay:
    """A group that hands out recorded buckets."""

    def __init__(self, flat: torch.Tensor, bucket: int) -> None:
        self.parts, self.timeouts, self.closed = list(flat.clone().split(bucket)), list[float](), False

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        self.timeouts.append(timeout_s)
        part = self.parts.pop(0)
        return lambda: _copy(part, bucket)

    def close(self) -> None:
        self.closed = True


def publish_of(flat: torch.Tensor, layout: Layout, epoch: int = 1) -> Publish:
    return Publish(
        0, 7, epoch, layout.digest, ALIGNMENT, *packing.all_checksums(flat, ALIGNMENT), 8.0,
    )  # fmt: skip


def test_a_bad_bucket_is_named_after_the_whole_broadcast_was_followed(layout: Layout, flat: torch.Tensor) -> None:
    group = Replay(flat, ALIGNMENT)
    group.parts[1][0] ^= 1
    with pytest.raises(ValueError, match="bucket 1 of 3"):
        receive_buckets(group, torch.zeros_like(flat), publish_of(flat, layout))
    assert group.timeouts == [bucket_timeout(8.0)] * 3, "leaving early would break the others' broadcast"


def test_after_every_bucket_its_share_is_told(layout: Layout, flat: torch.Tensor) -> None:
    shares: list[float] = []
    receive_buckets(Replay(flat, ALIGNMENT), torch.zeros_like(flat), publish_of(flat, layout), shares.append)
    assert shares == pytest.approx([1 / 3, 2 / 3, 1])


def test_weights_of_another_source_are_held_to_a_digest_that_cannot_be_forged(
    layout: Layout, flat: torch.Tensor
) -> None:
    publish = publish_of(flat, layout)
    honest = structs.replace(publish, sha256=packing.sha256(flat))
    receive_buckets(Replay(flat, ALIGNMENT), torch.zeros_like(flat), honest)
    forged = structs.replace(publish, sha256=packing.sha256(flat + 1))  # as if its xxh3 were the same
    with pytest.raises(ValueError, match="SHA-256"):
        receive_buckets(Replay(flat, ALIGNMENT), torch.zeros_like(flat), forged)


def test_a_receiver_refuses_what_was_not_announced(layout: Layout, flat: torch.Tensor) -> None:
    receiver = Receiver(lambda epoch: Replay(flat, ALIGNMENT))
    with pytest.raises(ValueError, match="another layout"):
        receiver.start(publish_of(flat, layout))
    receiver.set_layout(layout)
    receiver.set_epoch(Epoch(1, 1, 2, "127.0.0.1", 1, 5.0))
    with pytest.raises(ValueError, match="epoch 2, which this node is not in"):
        receiver.start(publish_of(flat, layout, epoch=2))
    with pytest.raises(ValueError, match="'riddle', which is not known here"):
        receiver.start(structs.replace(publish_of(flat, layout), encoding="riddle"))
    with pytest.raises(ValueError, match="not staged"):
        receiver.take(0, 7)


@pytest.mark.parametrize("source", [None, Source("tcp://127.0.0.1:9", "key")], ids=["collective", "relay"])
def test_a_receiver_keeps_a_collective_group_and_lets_go_of_a_source_that_has_served(
    layout: Layout, flat: torch.Tensor, source: Source | None
) -> None:
    group = Replay(flat, ALIGNMENT)
    receiver = Receiver(lambda epoch: group)
    receiver.obey(messages.Welcome(0, layout))
    receiver.obey(Epoch(1, 1, 2, "127.0.0.1", 1, 5.0, source=source))
    receiver.obey(publish_of(flat, layout))
    until(lambda: receiver.status.state == "staged")
    assert group.closed == (source is not None)
    receiver.close()
    assert group.closed
    with pytest.raises(ValueError, match="Ping is nothing for a receiver"):
        receiver.obey(messages.Ping())


def test_every_message_survives_the_wire() -> None:
    layout = layout_of("bfloat16")
    for message in (
        messages.Join("n", 1), messages.Staged("n", 0, 1, 0.5), messages.Active("n", 0, 1, 0.1, "x", 0.2),
        messages.Rejected("n", 0, 1, "why", True), messages.Leave("n"), messages.Pong("n"),
        messages.Serving("n", "k", "tcp://127.0.0.1:1"),
    ):  # fmt: skip
        assert messages.decode_from_node(messages.encode(message)) == message
    for message in (
        messages.Welcome(3, layout), Epoch(1, 1, 2, "h", 5, 1.0), messages.Activate(0, 1), messages.Ping(),
        messages.Eject("why"), publish_of(packing.pack(NAMED, layout), layout),
        messages.Serve(0, 1, "k", 5.0, "127.0.0.1:1"),
    ):  # fmt: skip
        assert messages.decode_from_learner(messages.encode(message)) == message
    with pytest.raises(ValueError):
        messages.decode_from_node(messages.encode(messages.Ping()))


def test_a_collectives_error_is_cut_to_what_a_person_needs() -> None:
    text = (
        "[/x/third_party/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:5. This is typically caused by a bug"
    )
    assert reason_of(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:5"
    assert reason_of(RuntimeError()) == "RuntimeError"
