"""Frozen weights and adapters into versions: exact, alike for every part, and refused where they do not fit."""

from typing import Any

import pytest
import torch
from msgspec import structs

from common.weights.receive.receiver import Receiver
from common.weights.source.snapshot import AdapterPayloads, Snapshot, SnapshotMaker
from common.weights.wire import flat_buffer, messages
from common.weights.wire.adapters import merge, merge_version, names
from common.weights.wire.failures import FailureKind, Mismatch
from common.weights.wire.layout import AdapterLayout, Layout
from common.weights.wire.messages import BOTH, FROZEN, Epoch, Publish
from tests.rigs.waiting import until
from tests.unit.common.weights.test_receiver import Replay

RANK, FACTOR = 5, 0.3
SHAPES = {"a.weight": (331, 257), "norm.weight": (33,), "b.weight": (40, 64)}  # `a` takes several blocks


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, columns = SHAPES["a.weight"]
    return tuple(draw(i, *s).to(dtype) for i, s in enumerate([(out, columns), (RANK, columns), (out, RANK)]))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_the_formula_rounded_once(dtype: torch.dtype) -> None:
    weight, a, b = matrices(dtype)
    exact = weight.double() + FACTOR * b.double() @ a.double()
    merged = merge(weight, a, b, FACTOR)
    assert merged.dtype == dtype
    torch.testing.assert_close(
        merged.double(), exact.to(dtype).double(), rtol=2**-7 if dtype.itemsize == 2 else 0, atol=4e-6
    )
    if dtype == torch.bfloat16:  # float32 is nearly exact, so but for ties there is one result
        assert (merged == exact.to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_matrix_has_the_bits_of_the_wholes_part(dtype: torch.dtype) -> None:
    weight, a, b = matrices(dtype)
    merged = merge(weight, a, b, FACTOR)
    for rows, columns in ((slice(0, 7), slice(None)), (slice(300, 331), slice(100, 201)), (slice(None), slice(3, 4))):
        part = merge(weight[rows, columns], a[:, columns].contiguous(), b[rows], FACTOR)
        assert torch.equal(part, merged[rows, columns])


def test_with_zeros_for_b_it_is_the_weight_with_positive_zeros() -> None:
    weight, a, b = matrices(torch.bfloat16)
    weight[0] = -0.0
    merged = merge(weight, a, torch.zeros_like(b), FACTOR)
    assert torch.equal(merged.view(torch.int16), (weight + 0.0).view(torch.int16))
    trained = merge(weight, a, b, FACTOR)
    assert torch.equal(merge(merged, a, b, FACTOR).view(torch.int16), trained.view(torch.int16)), "either may be kept"


# ---------------------------------------------------------------- a learner's payloads, and a node that gets them


def frozen_weights() -> list[tuple[str, torch.Tensor]]:
    return [(name, draw(i, *shape)) for i, (name, shape) in enumerate(SHAPES.items())]


def adapters(version: int) -> list[tuple[str, torch.Tensor]]:
    made = []
    for i, (name, shape) in enumerate(SHAPES.items()):
        if len(shape) == 2:
            a, b = names(name)
            made += [(a, draw(10 + i, RANK, shape[1])), (b, version * draw(20 + i, shape[0], RANK))]
    return made


def version_of(version: int) -> list[tuple[str, torch.Tensor]]:
    found = dict(adapters(version))
    pairs = {name: tuple(found.get(part) for part in names(name)) for name, _ in frozen_weights()}
    return [(n, w if pairs[n][0] is None else merge(w, *pairs[n], FACTOR)) for n, w in frozen_weights()]  # type: ignore[arg-type]


class Learner:
    """Makes payloads as the publisher does."""

    def __init__(self) -> None:
        self.maker = SnapshotMaker("float32")
        self.payloads = AdapterPayloads("float32", self.maker.make(-1, frozen_weights(), None), FACTOR)

    def snapshot(self, version: int) -> Snapshot:
        made = self.maker.make(version, version_of(version), None)
        self.payloads.copy(made, adapters(version))
        self.payloads.prepare(made, 64)
        return made

    def publish(self, snapshot: Snapshot, base: int, **changes: Any) -> tuple[Publish, torch.Tensor]:
        payload = snapshot.deltas.get(base, snapshot.full)
        buckets, _ = flat_buffer.all_checksums(payload.in_host, 64)
        whole = snapshot.checksum == snapshot.frozen
        made = Publish(
            0, snapshot.version, 1, snapshot.layout.digest, 64, buckets, snapshot.checksum, 8.0,
            encoding=payload.encoding, base_version=payload.base_version, payload_bytes=payload.size,
            frozen=snapshot.frozen if whole or payload.encoding != "full" else "",
        )  # fmt: skip
        return structs.replace(made, **changes), payload.in_host


class Node:
    """A receiver, what is sent to it, and what it has then."""

    def __init__(self, learner: Learner) -> None:
        self.wire = Replay(torch.zeros(0, dtype=torch.uint8))
        self.receiver = Receiver(lambda epoch, store: self.wire)
        self.welcome(learner)

    def welcome(self, learner: Learner) -> None:
        known = learner.snapshot(0)
        self.receiver.handle(messages.Welcome(0, known.layout, adapters=known.adapter_layout))
        self.receiver.handle(Epoch(1, 1, 2, 5.0))

    def get(self, publish: Publish, payload: torch.Tensor) -> FailureKind | None:
        """None when the version was staged and flipped, else why not."""
        self.wire.payload, self.wire.at = payload, 0
        self.receiver.handle(publish)
        until(lambda: self.receiver.status.state != "receiving", every_s=0.002)
        status = self.receiver.status
        if status.failure is not None:
            return status.failure.kind
        self.flat = self.receiver.take(publish.incarnation, publish.version)
        self.receiver.give_back(self.flat)
        return None


@pytest.fixture
def learner() -> Learner:
    return Learner()


def test_a_first_version_is_the_frozen_weights_and_travels_whole(learner: Learner) -> None:
    first = learner.snapshot(0)
    assert first.checksum == first.frozen and first.deltas == {}
    node = Node(learner)
    assert node.get(*learner.publish(first, BOTH)) is None
    for number in (1, 3):
        snapshot = learner.snapshot(number)
        publish, payload = learner.publish(snapshot, FROZEN)
        assert (publish.encoding, payload.numel()) == ("adapter", snapshot.deltas[FROZEN].size)
        assert payload.numel() < snapshot.flat.numel() / 8
        assert node.get(publish, payload) is None
        assert torch.equal(node.flat, snapshot.flat), "bit for bit as a version that came whole"


def test_a_node_without_the_frozen_weights_gets_both_and_keeps_them_for_a_later_learner(learner: Learner) -> None:
    node = Node(learner)
    second = learner.snapshot(2)
    assert node.get(*learner.publish(second, FROZEN)) is FailureKind.MISMATCH
    publish, payload = learner.publish(second, BOTH)
    assert (publish.encoding, payload.numel()) == ("both", second.flat.numel() + second.deltas[FROZEN].size)
    assert node.get(publish, payload) is None and torch.equal(node.flat, second.flat)
    node.welcome(Learner())  # the same model, resumed
    third = learner.snapshot(3)
    assert node.get(*learner.publish(third, FROZEN)) is None and torch.equal(node.flat, third.flat)


@pytest.mark.parametrize("base", [FROZEN, BOTH])
def test_what_does_not_give_the_published_version_is_refused(learner: Learner, base: int) -> None:
    node = Node(learner)
    assert node.get(*learner.publish(learner.snapshot(0), BOTH)) is None
    publish, payload = learner.publish(learner.snapshot(2), base)
    damaged = payload.clone()
    damaged[70] ^= 1
    assert node.get(publish, damaged) is FailureKind.DAMAGED, "a bucket is not what was sent"
    for change in ({"payload_bytes": len(payload) - 64}, {"checksum": "0" * 32}, {"frozen": "0" * 32}):
        assert node.get(structs.replace(publish, **change), payload) is FailureKind.MISMATCH, change
    assert node.get(publish, payload) is None


def test_frozen_weights_that_changed_in_memory_are_noticed_and_replaced(learner: Learner) -> None:
    node = Node(learner)
    assert node.get(*learner.publish(learner.snapshot(0), BOTH)) is None
    kept = node.receiver._frozen._flat
    assert kept is not None
    kept[9] ^= 1
    second = learner.snapshot(2)
    assert node.get(*learner.publish(second, FROZEN)) is FailureKind.MISMATCH
    for base in (BOTH, FROZEN):
        assert node.get(*learner.publish(second, base)) is None and torch.equal(node.flat, second.flat)


def test_a_learner_without_adapters_lets_a_node_forget_the_frozen_weights(learner: Learner) -> None:
    node = Node(learner)
    assert node.get(*learner.publish(learner.snapshot(0), BOTH)) is None
    node.receiver.handle(messages.Welcome(0, learner.snapshot(0).layout))
    node.receiver.handle(Epoch(1, 1, 2, 5.0))
    assert node.get(*learner.publish(learner.snapshot(1), FROZEN)) is FailureKind.MISMATCH
    assert node.receiver._frozen._flat is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"c.weight": (40, 64)}, "stand beside no matrix"),
        ({"b.weight": (40, 65)}, "b.weight (40, 64) has an adapter of A (5, 65) and B (40, 5)"),
        ({"norm.weight": (33, 1)}, "norm.weight (33,) has an adapter"),
    ],
)
def test_adapters_that_fit_no_matrix_are_refused(changed: dict[str, tuple[int, int]], said: str) -> None:
    def packed(named: list[tuple[str, torch.Tensor]]) -> tuple[Layout, torch.Tensor]:
        layout = Layout.of([(name, "float32", tuple(tensor.shape)) for name, tensor in named])
        return layout, flat_buffer.pack(named, layout)

    layout, frozen = packed(frozen_weights())
    pairs = [(names(n), shape) for n, shape in changed.items()]
    found = [one for (a, b), (out, into) in pairs for one in ((a, draw(1, RANK, into)), (b, draw(2, out, RANK)))]
    beside, flat = packed(found)
    with pytest.raises(Mismatch) as refused:
        merge_version(frozen, layout, flat, AdapterLayout(beside, FACTOR), torch.zeros_like(frozen))
    assert said in str(refused.value)
