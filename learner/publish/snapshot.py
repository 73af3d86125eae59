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
    """Flat buffers for snapshots; a buffer is reused when its snapshot has no users."""

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
        """Take back `flat`, which is no longer read."""
        with self._lock:
            self._free.append(flat)


@dataclass(frozen=True)
class Payload:
    """The bytes that travel for a version: all of it in `flat` [n] uint8, or a delta from `base_version` (-1: none)."""

    flat: torch.Tensor
    bucket_checksums: list[str]
    encoding: str = "full"
    base_version: int = -1


class Snapshot:
    """A version in the flat buffer; the buffer returns to the pool when the last user releases it."""

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
        self.sha256 = ""  # SHA-256 of the whole payload; computed when other nodes are going to serve it
        self._hashing = False
        self.bytes_staged = 0  # received and verified, summed over all nodes
        self._pool = pool
        self._users = 1
        self._lock = threading.Lock()

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


KEPT_FLOAT32 = ".e_score_correction_bias"  # float32 in engines, too: bfloat16 would round away updates of 1e-3


class SnapshotMaker:
    """Copies exported tensors; the first version determines the layout of this incarnation."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: the engines' dtype; the learner may export another one."""
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
