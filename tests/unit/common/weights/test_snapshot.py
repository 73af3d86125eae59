"""Snapshots: their dtypes, which are encoded against which, and what is kept for it."""

import ctypes
import gc
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.weights.source import snapshot
from common.weights.source.attempt import Attempt, new_attempt
from common.weights.source.nodes import begin, doubt, hear, release
from common.weights.source.snapshot import Deltas, Payload, Snapshot, SnapshotMaker
from common.weights.wire import delta, flat_buffer
from common.weights.wire.layout import Layout
from common.weights.wire.messages import Active, Epoch, Pong, Staged
from tests.rigs import device
from tests.rigs.device import OnDevice, Stream
from tests.unit.common.weights.node_views import settled

LAYOUT = Layout.of([("a", "bfloat16", (4096,))])
BUCKET = 1024


class Versions:
    """Snapshots of a model; one element in a hundred changes per version."""

    def __init__(self, encoding: str = "delta", anchor_every: int = 0) -> None:
        self.deltas, self.maker = Deltas(encoding, anchor_every), SnapshotMaker("bfloat16")
        self.alive: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self.weights = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()

    def next(self, version: int, sent: bool = True, others: bool = False) -> Snapshot:
        self.weights[version % 100 :: 100] *= 1.01
        if others:
            self.weights = torch.randn(4096).bfloat16()
        snapshot = self.maker.make(version, [("a", self.weights)], None)
        self.alive.add(snapshot)
        self.deltas.prepare(snapshot, BUCKET)
        snapshot.sent = sent
        return snapshot


def attempt(snapshot: Snapshot, payload: Payload) -> Attempt:
    return new_attempt(snapshot, payload, Epoch(1, 1, 2, 1.0), members=[b"n0"], incarnation=0)


def test_a_version_goes_as_a_delta_to_the_nodes_that_have_the_one_before_and_whole_to_others() -> None:
    versions = Versions()
    first, second = versions.next(1), versions.next(2)
    payload = second.payload_for({1})
    assert payload.base_version == 1 and attempt(second, payload).publish.encoding == "delta"
    assert payload.flat.numel() < second.flat.numel() / 20
    assert payload.bucket_checksums == [flat_buffer.checksum(bucket) for bucket in payload.flat.split(BUCKET)]
    result = first.flat.clone()
    delta.apply(payload.flat, result, delta.BLOCK_BYTES)
    assert flat_buffer.checksum(result) == second.checksum
    for bases in ({-1}, {0}, {1, -1}, set[int]()):
        assert second.payload_for(bases) is second.full, f"nodes with {bases} have no common base"
    assert attempt(second, payload) != attempt(second, payload), "the control thread tells attempts apart"


def test_a_node_whose_buffer_was_written_gets_the_next_version_whole_though_it_runs_a_base() -> None:
    versions, node = Versions(), settled("n0", 1)
    versions.next(1)
    second = versions.next(2, sent=False)
    assert second.payload_for({node.base}).base_version == 1
    third = versions.next(3)
    node, _ = begin(node, attempt(second, second.deltas[1]))
    node, _ = doubt(node)
    node, _ = hear(node, Pong("n0"), 0.0)
    node, _ = release(node, 2)  # version 3 comes before the next attempt
    assert (node.version, node.attempt, 1 in third.deltas) == (1, None, True)
    assert third.payload_for({node.base}) is third.full
    node, _ = begin(node, attempt(third, third.full))
    for message in (Staged("n0", 0, 3, 0.1, 1), Active("n0", 0, 3, 0.1, third.checksum)):
        node, _ = hear(node, message, 0.0)
    assert versions.next(4).payload_for({node.base}).base_version == 3


def test_versions_that_were_skipped_do_not_make_the_next_one_travel_whole() -> None:
    versions = Versions()
    versions.next(1)
    for version in (2, 3):
        versions.next(version, sent=False)
    fourth = versions.next(4)
    assert fourth.payload_for({1}).base_version == 1, "what the nodes hold while 2 and 3 are skipped"
    assert fourth.payload_for({3}).base_version == 3, "or 3, had it begun to travel meanwhile"
    assert fourth.payload_for({2}) is fourth.full


def test_at_most_two_earlier_versions_are_kept() -> None:
    versions, buffers = Versions(), set[int]()
    for version in range(1, 9):
        buffers.add(versions.next(version, sent=version in (1, 2, 5)).flat.data_ptr())
        assert len(versions.alive) <= 2
    assert len(buffers) <= 3, "buffers are used again"


def test_every_nth_version_travels_whole_and_one_whose_delta_is_no_smaller_and_with_full_all() -> None:
    versions = Versions(anchor_every=3)
    made = [versions.next(v, others=v == 5) for v in range(7)]
    assert [bool(s.deltas) for s in made] == [False, True, True, False, True, False, False]
    versions = Versions("full", 3)
    assert not any(versions.next(v).deltas for v in range(3)) and not versions.alive


def test_weights_are_rounded_to_the_engines_dtype_and_expert_biases_are_not() -> None:
    bias = torch.tensor([0.5 + 1e-3, -0.25])
    named = [("layers.0.mlp.gate.weight", bias), ("layers.0.mlp.gate.e_score_correction_bias", bias)]
    maker = SnapshotMaker("bfloat16")
    for version in (1, 2):  # the first makes the layout, the others follow it
        snapshot = maker.make(version, iter(named), None)
        held = dict(flat_buffer.view(snapshot.flat, snapshot.layout))
        assert torch.equal(held["layers.0.mlp.gate.weight"], bias.bfloat16())
        assert held["layers.0.mlp.gate.e_score_correction_bias"].dtype == torch.float32
        assert torch.equal(held["layers.0.mlp.gate.e_score_correction_bias"], bias)


def test_the_first_version_is_never_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = weakref.WeakSet[torch.Tensor]()
    there: list[int] = []
    copy, fill = snapshot._mapped_copy, flat_buffer.fill

    def copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        copies.add(made := copy(tensor, dtype))
        return made

    def counted(targets: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            there.append(len(copies))
            next_target = next(targets)
            fill([next_target], [(name, tensor)])
            del tensor

    monkeypatch.setattr(snapshot, "_mapped_copy", copied)
    monkeypatch.setattr(flat_buffer, "fill", lambda targets, named: counted(iter(targets), named))
    exported = ((f"w{i}", torch.full((64,), float(i))) for i in range(4))
    made = SnapshotMaker("float32").make(1, exported, None)
    assert there == [4, 3, 2, 1] and not copies
    assert [float(tensor[0]) for _, tensor in flat_buffer.view(made.flat, made.layout)] == [0.0, 1.0, 2.0, 3.0]


def test_a_buffer_takes_no_memory_before_it_is_written() -> None:
    size = 256 << 20

    def resident() -> int:
        found = re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found
        return int(found[1]) * 1024

    before = resident()
    flat = flat_buffer.buffer(size)
    assert resident() - before < size // 4
    assert not flat[::4096].any()


@pytest.mark.parametrize("allowed", [True, False])
def test_on_a_gpu_the_buffers_of_versions_are_page_locked_while_they_exist(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, asked = dict[int, int](), list[object]()

    def register(address: int, size: int, flags: int) -> int:
        assert ctypes.string_at(address, 2) == b"\x80\x3f", "the buffer is not full"
        locked.update({address: size} if allowed else {})
        return 0 if allowed else 801

    unregister = lambda address: 0 if locked.pop(address) else 1  # noqa: E731
    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=unregister, cudaError=SimpleNamespace(success=0)
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(asked.append(device)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: asked.append("the refusal is reported here"))
    versions = Versions("full")
    made = [versions.maker.make(n, [("a", torch.ones(4096))], None) for n in range(2)]
    del made[0]
    made.append(versions.maker.make(2, [("a", torch.ones(4096))], None))
    assert asked.count(torch.device("cuda", 3)) == 2, "the third version is in the buffer of the first one"
    assert len(asked) == (2 if allowed else 4)
    assert list(locked.values()) == ([LAYOUT.total_bytes] * 2 if allowed else [])
    del made, versions
    gc.collect()
    assert not locked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_device_copies_a_version_without_blocking_until_all_of_it_is_asked_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream()
    monkeypatch.setattr(device, "STREAM", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: stream)
    maker, written = SnapshotMaker("bfloat16"), torch.empty(64, dtype=dtype)

    def exported() -> Iterator[tuple[str, torch.Tensor]]:
        for n in range(5):
            yield f"w{n}", written.fill_(n).as_subclass(OnDevice)  # every tensor in the memory of the one before

    maker.make(0, exported(), None)  # blocks: the layout is not known, and no buffer is page-locked
    stream.blocking = stream.waits = 0
    made = maker.make(1, exported(), None)
    assert stream.waits == 1
    assert stream.blocking == (0 if dtype == torch.bfloat16 else 5), "a conversion would take memory of the device"
    assert [tensor.unique().tolist() for _, tensor in flat_buffer.view(made.flat, made.layout)] == [
        [n] for n in range(5)
    ]
    with pytest.raises(ValueError, match="was not given"):
        maker.make(2, (one for one in [*exported()][:3]), None)
    assert stream.waits == 2, "nothing is under way into a buffer that is freed"
