"""One policy version as bytes, and the buffers that versions are copied into."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from common.weights import packing
from common.weights.layout import Layout
from common.weights.messages import Canary


class BufferPool:
    """Flat buffers for snapshots; one is reused as soon as nobody sends from it any more."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def acquire(self, total_bytes: int) -> torch.Tensor:
        """A zeroed or reused [total_bytes] uint8 buffer."""
        with self._lock:
            for i, flat in enumerate(self._free):
                if flat.numel() == total_bytes:
                    return self._free.pop(i)
        return packing.buffer(total_bytes)

    def release(self, flat: torch.Tensor) -> None:
        """Nobody reads `flat` any more."""
        with self._lock:
            self._free.append(flat)


@dataclass(frozen=True)
class Payload:
    """What travels for a version: `flat` [n] uint8 as it is, or what makes it from `base_version` (-1: nothing)."""

    flat: torch.Tensor
    bucket_checksums: list[str]
    encoding: str = "full"
    base_version: int = -1


class Snapshot:
    """A version in the flat buffer; lives as long as someone retains it."""

    def __init__(
        self, version: int, layout: Layout, flat: torch.Tensor, canary: Canary | None, pool: BufferPool
    ) -> None:
        """Starts with one reference, the caller's."""
        self.version = version
        self.layout = layout
        self.flat = flat
        self.canary = canary
        self.started = time.perf_counter()  # when `publish` was called, for the latency figures
        self.full = Payload(flat, [])
        self.deltas: dict[int, Payload] = {}  # by base version
        self.sent = False  # it began to travel
        self.checksum = ""
        self.sha256 = ""  # of the whole payload; computed when other nodes are to serve it, '' until then
        self._hashing = False
        self.bytes_staged = 0  # that nodes received and verified, over all of them
        self._pool = pool
        self._users = 1
        self._lock = threading.Lock()

    def seal(self, bucket_bytes: int) -> None:
        """Compute the checksums that every node verifies."""
        buckets, self.checksum = packing.all_checksums(self.flat, bucket_bytes)
        self.full = Payload(self.flat, buckets)

    def payload_for(self, bases: set[int]) -> Payload:
        """What to send to nodes whose buffers hold `bases` (-1: nothing); a delta only where all hold the same."""
        return self.deltas.get(next(iter(bases)), self.full) if len(bases) == 1 else self.full

    def hash_behind(self) -> None:
        """Compute `sha256` in a thread, once; it takes a second per GB or so."""
        if self._hashing:
            return
        self._hashing = True
        self.retain()

        def run() -> None:
            self.sha256 = packing.sha256(self.full.flat)
            self.release()

        threading.Thread(target=run, daemon=True, name=f"hash-weights-{self.version}").start()

    def retain(self) -> "Snapshot":
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            unused = self._users == 0
        if unused:
            self._pool.release(self.flat)


KEPT_FLOAT32 = ".e_score_correction_bias"  # engines hold it so; an update of 1e-3 would drown in bfloat16


class SnapshotMaker:
    """Copies exported tensors; the layout is made at the first version and holds for this incarnation."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: what the engines hold, whatever the learner exports."""
        self._dtype = dtype
        self._pool = BufferPool()
        self._views: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self.layout: Layout | None = None

    def make(self, version: int, named: Iterable[tuple[str, torch.Tensor]], canary: Canary | None) -> Snapshot:
        """Consume `named` (Hugging Face name, full tensor) into a new snapshot.

        Raises:
            ValueError: names or shapes differ from the first version's.
        """
        started = time.perf_counter()
        if self.layout is None:
            # Only names and shapes are known once the export ran, so the first version is kept whole until then.
            named = [
                (name, tensor.detach().to("cpu", packing.DTYPES[self._dtype_of(name)], copy=True))
                for name, tensor in named
            ]
            self.layout = Layout.of([(name, self._dtype_of(name), tuple(tensor.shape)) for name, tensor in named])
        flat = self._pool.acquire(self.layout.total_bytes)
        packing.fill(self._views_of(flat, self.layout), named)
        snapshot = Snapshot(version, self.layout, flat, canary, self._pool)
        snapshot.started = started
        return snapshot

    def _views_of(self, flat: torch.Tensor, layout: Layout) -> list[tuple[str, torch.Tensor]]:
        """The buffer's views, made once: the pool has few buffers and gives none of them up."""
        key = flat.data_ptr()
        if key not in self._views:
            self._views[key] = list(packing.view(flat, layout))
        return self._views[key]

    def _dtype_of(self, name: str) -> str:
        return "float32" if name.endswith(KEPT_FLOAT32) else self._dtype
