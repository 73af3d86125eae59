"""One policy version as bytes, and the buffers that versions are copied into."""

import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from common.weights import packing
from common.weights.layout import Layout
from common.weights.messages import Canary

KEPT_FLOAT32 = ".e_score_correction_bias"  # float32 in engines, too: bfloat16 would round away updates of 1e-3
Views = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Payload:
    """The bytes that travel for a version: all of it in `flat` [n] uint8, or a delta from `base_version` (-1: none)."""

    flat: torch.Tensor
    bucket_checksums: list[str]
    encoding: str = "full"
    base_version: int = -1


@dataclass(eq=False)  # compared by identity, because tensors have no `==`
class Snapshot:
    """A version in a flat buffer, which is used again when nothing refers to the snapshot any more.

    Attributes:
        started: when `publish` was called, perf_counter seconds.
        full: the whole version, once it is sealed.
        deltas: payloads by base version.
        sent: it began to travel.
        checksum: xxh3 digest of the whole buffer.
        sha256: SHA-256 of the whole buffer; computed when other nodes are going to serve it.
        bytes_staged: received and verified, summed over all nodes.
    """

    version: int
    layout: Layout
    flat: torch.Tensor
    canary: Canary | None
    started: float
    full: Payload = field(init=False)
    deltas: dict[int, Payload] = field(default_factory=dict)
    sent: bool = False
    checksum: str = ""
    sha256: str = ""
    bytes_staged: int = 0
    _hashing: bool = False

    def seal(self, bucket_bytes: int) -> None:
        """Compute the checksums that every node verifies."""
        buckets, self.checksum = packing.all_checksums(self.flat, bucket_bytes)
        self.full = Payload(self.flat, buckets)

    def payload_for(self, bases: set[int]) -> Payload:
        """The payload for nodes whose buffers contain `bases` (-1: none); a delta only if all contain the same one."""
        return self.deltas.get(next(iter(bases)), self.full) if len(bases) == 1 else self.full

    def hash_behind(self) -> None:
        """Compute `sha256` in a thread, once; it takes a second per GB or so."""
        if self._hashing:
            return
        self._hashing = True

        def run() -> None:
            self.sha256 = packing.sha256(self.flat)

        threading.Thread(target=run, daemon=True, name=f"hash-weights-{self.version}").start()


class SnapshotMaker:
    """Copies exported tensors; the first version determines the layout of this incarnation."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: the engines' dtype; the learner may export another one."""
        self._dtype = dtype
        self._free: list[tuple[torch.Tensor, Views]] = []  # buffers of snapshots that are gone
        self.layout: Layout | None = None

    def make(self, version: int, named: Iterable[tuple[str, torch.Tensor]], canary: Canary | None) -> Snapshot:
        """Consume `named` (Hugging Face name, full tensor); raises ValueError when names or shapes changed."""
        started = time.perf_counter()
        if self.layout is None:
            # Only names and shapes are known once the export ran, so the first version is kept whole until then.
            named = [
                (name, tensor.detach().to("cpu", packing.DTYPES[self._dtype_of(name)], copy=True))
                for name, tensor in named
            ]
            self.layout = Layout.of([(name, self._dtype_of(name), tuple(tensor.shape)) for name, tensor in named])
        flat, views = self._free.pop() if self._free else self._new_buffer(self.layout)
        packing.fill(views, named)
        snapshot = Snapshot(version, self.layout, flat, canary, started)
        weakref.finalize(snapshot, self._free.append, (flat, views)).atexit = False
        return snapshot

    def _new_buffer(self, layout: Layout) -> tuple[torch.Tensor, Views]:
        flat = packing.buffer(layout.total_bytes)
        return flat, list(packing.view(flat, layout))

    def _dtype_of(self, name: str) -> str:
        return "float32" if name.endswith(KEPT_FLOAT32) else self._dtype
