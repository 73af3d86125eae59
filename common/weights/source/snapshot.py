"""One policy version as bytes, the buffers it is copied into, the deltas between versions, and who gets which."""

import logging
import mmap
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import msgspec
import torch

from common.weights.wire import delta, flat_buffer
from common.weights.wire.layout import WORDS, XXH3, AdapterLayout, Layout
from common.weights.wire.messages import BOTH, FROZEN, Canary, Part, PartReady
from common.weights.wire.pieces import THREADS, new_part

logger = logging.getLogger(__name__)

KEPT_FLOAT32 = ".e_score_correction_bias"  # float32 in engines, too: bfloat16 would round away updates of 1e-3
TensorSpecs = list[tuple[str, tuple[int, ...]]]  # names and shapes of tensors
Views = list[tuple[str, torch.Tensor]]


@dataclass(eq=False)
class Payload:
    """The bytes that travel for a version: all of it, or a delta from `base_version` (-1: none).

    `flat` [n] uint8 is what this rank sends of it, in one part. Other sources send the rest, `elsewhere` by their
    numbers.
    """

    flat: torch.Tensor
    bucket_bytes: int
    bucket_checksums: list[str]
    base_version: int = -1
    elsewhere: dict[int, int] = field(default_factory=lambda: dict[int, int]())  # bytes
    sealing: bool = False
    sealed: dict[int, Sequence[Part]] = field(default_factory=lambda: dict[int, Sequence[Part]]())  # by source
    parts: list[Part] = field(default_factory=lambda: list[Part]())  # in order; [] before all sources sealed theirs
    before: torch.Tensor | None = None  # [m] uint8 that goes before `flat`, over the relay only, in a part of its own

    @cached_property
    def in_host(self) -> list[torch.Tensor]:
        """The bytes of this rank's parts in host memory, for nodes that fetch them."""
        return [own.cpu() for own in (self.before, self.flat) if own is not None]

    @property
    def encoding(self) -> str:
        """As Publish.encoding."""
        return {-1: "full", FROZEN: "adapter", BOTH: "both"}.get(self.base_version, "delta")

    @property
    def size(self) -> int:
        own = self.flat.numel() + (0 if self.before is None else self.before.numel())
        return own + sum(self.elsewhere.values())

    def seal_own_part(
        self, piece: int, *, origin: str, secured: bool, post: Callable[[Callable[[], None]], None]
    ) -> None:
        """Make this rank's parts in a thread, once; `post` brings them, or an error, to the thread that calls this."""
        if not self.sealing:
            self.sealing = True
            pool = ThreadPoolExecutor(1, "seal-weights")
            work = pool.submit(
                lambda: [
                    new_part(own, 0, own.numel(), piece=piece, origin=origin, secured=secured) for own in self.in_host
                ]
            )
            work.add_done_callback(lambda done: post(lambda: self.add_parts(0, done.result())))
            pool.shutdown(wait=False)

    def add_parts(self, number: int, parts: Sequence[Part]) -> None:
        """Take in what a source sealed for the relay; the last one completes `parts`."""
        self.sealed[number] = parts
        if len(self.sealed) > len(self.elsewhere):
            sealed = [part for _, parts in sorted(self.sealed.items()) for part in parts]
            starts = accumulate((part.size for part in sealed), initial=0)
            self.parts = [msgspec.structs.replace(part, start=at) for part, at in zip(sealed, starts, strict=False)]


@dataclass(eq=False)  # compared by identity, because tensors have no `==`
class Snapshot:
    """A version in a flat buffer, which is used again when nothing refers to the snapshot any more."""

    version: int
    layout: Layout  # with the parts of all sources
    flat: torch.Tensor  # this rank's part
    canary: Canary | None
    started: float  # when `publish` was called, perf_counter seconds
    full: Payload = field(init=False)  # the whole version, once it has checksums
    deltas: dict[int, Payload] = field(default_factory=lambda: dict[int, Payload]())  # by base version
    whole: bool = False  # every source has its part
    sent: bool = False  # it began to travel
    checksum: str = ""  # xxh3 digest of the whole buffer
    bytes_staged: int = 0  # received and verified, summed over all nodes
    adapters: "Snapshot | None" = None  # those of the version, where they may travel in its place
    adapter_layout: AdapterLayout | None = None
    frozen: str = ""  # checksum of the frozen weights beside which they stand

    def add_checksums(self, bucket_bytes: int) -> None:
        """Compute the checksums that every node verifies; the snapshot is ready to travel then."""
        buckets, self.checksum = flat_buffer.all_checksums(self.flat, bucket_bytes, self.layout.checksums)
        self.full = Payload(self.flat, bucket_bytes, buckets)

    def add_parts(self, offered: Sequence[PartReady]) -> None:
        """Take in what the other sources have: their checksums, and only deltas that all of them have."""
        self.checksum = flat_buffer.combined([self.checksum, *(one.checksum for one in offered)])
        self.deltas = {b: delta for b, delta in self.deltas.items() if all(b in one.sizes for one in offered)}
        for payload in (self.full, *self.deltas.values()):
            payload.elsewhere = {one.number: one.sizes[payload.base_version] for one in offered}

    def payload_for(self, bases: set[int]) -> Payload:
        """The payload for nodes whose buffers contain `bases` (-1: none); a delta only if all contain the same one."""
        return self.deltas.get(next(iter(bases)), self.full) if len(bases) == 1 else self.full


class SnapshotMaker:
    """Copies exported tensors; the first version determines the layout of this incarnation, unless `share` does."""

    def __init__(self, dtype: str, device: torch.device | None = None) -> None:
        """`dtype`: the engines' dtype; the learner may export another one. Buffers are on `device`; None: in host
        memory."""
        self._dtype = dtype
        self._device = device
        self._whole: Layout | None = None
        self._free: list[tuple[torch.Tensor, Views]] = []  # buffers of snapshots that are gone
        self.layout: Layout | None = None

    def share(self, parts: list[TensorSpecs], number: int) -> None:
        """Copy part `number` only; `parts` are (name, shape) of all tensors, source by source."""
        typed = [[(name, self._dtype_of(name), shape) for name, shape in part] for part in parts]
        self._whole = Layout.of(*typed)
        self.layout = Layout.of(typed[number])

    def make(self, version: int, named: Iterable[tuple[str, torch.Tensor]], canary: Canary | None) -> Snapshot:
        """Consume `named` (Hugging Face name, full tensor); raises ValueError when names or shapes changed."""
        started = time.perf_counter()
        if self.layout is None:
            # Names and shapes are known once the export ran, so the first version waits for its buffer until then.
            waiting = [
                (name, _mapped_copy(tensor.detach(), flat_buffer.DTYPES[self._dtype_of(name)]))
                for name, tensor in named
            ]
            kind = XXH3 if self._device is None else WORDS
            typed = [(name, self._dtype_of(name), tuple(tensor.shape)) for name, tensor in waiting]
            named = (waiting.pop(0) for _ in typed)  # the copies go as the buffer fills: there are never two versions
            self.layout = Layout.of(typed, checksums=kind)
        fresh = not self._free
        if fresh:
            buffer = flat_buffer.buffer(self.layout.total_bytes, self._device)
            self._free.append((buffer, list(flat_buffer.view(buffer, self.layout))))
        flat, views = self._free.pop()
        flat_buffer.fill(views, named)
        flat_buffer.finish(flat)
        # The weights come from the device; locked before they are there, the buffer would take all its memory at once.
        if fresh and self._device is None and torch.cuda.is_initialized():
            flat_buffer.pinned(flat, torch.device("cuda", torch.cuda.current_device()))
        snapshot = Snapshot(version, self._whole or self.layout, flat, canary, started)
        weakref.finalize(snapshot, self._free.append, (flat, views)).atexit = False
        return snapshot

    def _dtype_of(self, name: str) -> str:
        return "float32" if name.endswith(KEPT_FLOAT32) else self._dtype


def _mapped_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In host memory that the system gets back at once when the copy goes; malloc would keep it."""
    memory = mmap.mmap(-1, max(1, tensor.numel() * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)


class Deltas:
    """Which earlier versions a new one is encoded against, and how long those are kept.

    A delta serves only nodes that have its base, and nodes have the version that was sent last. That is the previous
    one, or an older one when publishes outrun the attempts. So at most two earlier versions are kept: the newest that
    began to travel and the newest of all. A node that has neither gets the whole version.
    """

    def __init__(self, encoding: str, anchor_every: int) -> None:
        """`encoding` is weights.encoding; every `anchor_every`th version travels whole in any case (0: none does)."""
        self._enabled = encoding == "delta"
        self._anchor_every = anchor_every
        self._kept: list[Snapshot] = []  # oldest first
        self._versions = 0

    def prepare(self, snapshot: Snapshot, bucket_bytes: int) -> None:
        """Give `snapshot` its checksums and its deltas, and keep it as a base of those to come."""
        snapshot.add_checksums(bucket_bytes)
        if not self._enabled:
            return
        sent = [s for s in self._kept if s.sent][-1:]
        bases = sent + [s for s in self._kept[-1:] if s not in sent]
        anchor = self._anchor_every > 0 and self._versions % self._anchor_every == 0
        self._versions += 1
        for base in bases if not anchor else ():
            started = time.perf_counter()
            stream = delta.encode(base.flat, snapshot.flat, delta.BLOCK_BYTES, THREADS)
            if stream.numel() < snapshot.flat.numel():
                checksums, _ = flat_buffer.all_checksums(stream, bucket_bytes)
                snapshot.deltas[base.version] = Payload(stream, bucket_bytes, checksums, base.version)
            took = time.perf_counter() - started
            share = stream.numel() / snapshot.flat.numel()
            logger.info("version %d from %d: %.1f %% in %.3f s", snapshot.version, base.version, 100 * share, took)
        self._kept = [*bases[:1], snapshot] if bases and bases[0].sent else [snapshot]


class VersionSchedule:
    """Which version is meant for which nodes. Used by the control thread.

    The training fleet gets the newest version, or an older one while newer ones have to wait. The nodes of the pool get
    the version that is being evaluated. Later evaluated versions are kept until their turn comes.
    """

    def __init__(self) -> None:
        self.current: Snapshot | None = None  # the fleet's
        self._waiting: Snapshot | None = None  # the newest version that has to wait
        self.holds: dict[str, int] = {}  # by reason: the newest version that may go out
        self.wanted: tuple[int, ...] = ()  # versions to evaluate, in this order
        self._kept: dict[int, Snapshot] = {}  # those of them that have come

    @property
    def evaluated(self) -> Snapshot | None:
        """The pool's version; None: its nodes keep what they have."""
        return self._kept.get(self.wanted[0]) if self.wanted else None

    @property
    def snapshots(self) -> dict[int, Snapshot]:
        """The versions that nodes get, now or later."""
        found = (self.current, self._waiting, *self._kept.values())
        return {snapshot.version: snapshot for snapshot in found if snapshot is not None}

    def hold(self, reason: str, version: int) -> None:
        """Keep versions newer than `version` back, until `release` with the same reason."""
        self.holds.setdefault(reason, version)

    def release(self, reason: str) -> None:
        """Drop a reason. Without any other the newest version goes out; those before it are skipped."""
        self.holds.pop(reason, None)
        if self._waiting is not None:
            self.add(self._waiting)

    def evaluate(self, versions: tuple[int, ...]) -> None:
        """Keep these versions; the pool gets the first one. A version may come later."""
        self._kept = {version: s for version, s in self.snapshots.items() if version in versions}
        self.wanted = versions

    def add(self, snapshot: Snapshot) -> None:
        """A new version; they come in order."""
        if snapshot.version <= min(self.holds.values(), default=snapshot.version):
            self.current = snapshot
            self._waiting = None
        else:
            self._waiting = snapshot
        if snapshot.version in self.wanted:
            self._kept[snapshot.version] = snapshot
