"""The receiving side of a publish: a thread writes buckets into a staging buffer and verifies each of them.

One Receiver serves one process that has a copy of the weights. It never blocks its caller. A new epoch or a new
publish abandons the running receive. Its group is then closed, and its thread touches only its own buffer. After a flip
the staging buffer still contains the version, and other nodes may fetch it until the next version comes.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import torch

from common.weights import delta, packing
from common.weights.collectives import Group, GroupFactory, bucket_timeout, in_turn, reason_of
from common.weights.layout import Layout, ranges
from common.weights.messages import Epoch, Publish, Serve, Serving
from common.weights.peer_server import PeerServer
from common.weights.transports.registry import open_group

logger = logging.getLogger(__name__)

State = Literal["idle", "receiving", "staged", "failed"]


class StagingStatus(msgspec.Struct, frozen=True):
    """Where the newest publish stands.

    `receive_s` counts from the announcement to the last verified bucket; `share` is the part that arrived, 0 to 1.
    """

    state: State = "idle"
    incarnation: int = -1
    version: int = -1
    receive_s: float = 0.0
    error: str = ""
    share: float = 0.0


class Receiver:
    """Stages the publishes of one learner incarnation after another."""

    def __init__(
        self, group_factory: GroupFactory = open_group, allocate: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        """`allocate(n)` gives a zeroed [n] uint8 buffer; None: memory of this process."""
        self._group_factory = group_factory
        self._allocate = allocate if allocate is not None else packing.buffer
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._epoch: Epoch | None = None
        self._group: Group | None = None  # the group of self._epoch after a receive that succeeded
        self._busy: Group | None = None  # the group that the newest thread receives over
        self._buffer: torch.Tensor | None = None  # free for reuse: no thread writes into it
        self._staged: tuple[Publish, torch.Tensor] | None = None
        self._taken: tuple[int, int] | None = None  # (incarnation, version) of the buffer that `take` gave away
        self._contents: tuple[int, int] | None = None  # likewise of self._buffer, if whole and proven
        self._peers = PeerServer()
        self._status = StagingStatus()
        self._generation = 0  # a thread with an older generation discards its result

    @property
    def layout(self) -> Layout | None:
        return self._layout

    @property
    def status(self) -> StagingStatus:
        with self._lock:
            return self._status

    def set_layout(self, layout: Layout) -> None:
        """Weights follow `layout` from now on; an earlier staged version is discarded."""
        with self._lock:
            self._generation += 1
            self._peers.withdraw()
            self._contents = self._taken = None
            self._layout, self._buffer, self._staged, self._status = layout, None, None, StagingStatus()

    def set_epoch(self, epoch: Epoch) -> None:
        """The next publish arrives over the group of `epoch`."""
        with self._lock:
            self._epoch = epoch
        self._drop_groups()

    def _drop_groups(self) -> None:
        with self._lock:
            self._generation += 1
            dropped, self._group, self._busy = (self._group, self._busy), None, None
        for group in dropped:
            if group is not None:
                group.close()

    def start(self, publish: Publish) -> None:
        """Begin to receive `publish` in the background.

        Raises:
            ValueError: no epoch or layout yet, or not the ones that the publish was made for.
        """
        with self._lock:
            if self._layout is None or self._layout.digest != publish.layout_digest:
                raise ValueError(f"version {publish.version} has another layout than the one that was announced")
            if self._epoch is None or self._epoch.epoch != publish.epoch:
                raise ValueError(
                    f"version {publish.version} is sent to epoch {publish.epoch}, which this node is not in"
                )
            is_delta = self._check_encoding(publish, self._layout)
            self._generation += 1
            generation, layout, epoch = self._generation, self._layout, self._epoch
            group, self._group = self._group, None  # the thread owns it until it succeeds
            self._peers.withdraw()
            self._contents = None  # this buffer is going to be written
            buffer, self._buffer = self._buffer, None
            if buffer is None and self._staged is not None:
                buffer = self._staged[1]  # a newer version supersedes one that was never applied
            self._staged = None
            self._status = StagingStatus("receiving", publish.incarnation, publish.version)
        given = (generation, publish, layout, epoch, group, buffer, is_delta)
        threading.Thread(target=self._receive, args=given, daemon=True, name="receive-weights").start()

    def _check_encoding(self, publish: Publish, layout: Layout) -> bool:
        """Whether `publish` is a delta; raises ValueError when the buffer does not contain its base."""
        if publish.encoding == "full":
            return False
        if publish.encoding != "delta":
            raise ValueError(f"version {publish.version} comes as {publish.encoding!r}, which is not known here")
        base = (publish.incarnation, publish.base_version)
        if self._buffer is None or self._contents != base:
            raise ValueError(
                f"version {publish.version} comes as a delta to {base}, the staging buffer has {self._contents}"
            )
        if not 0 < publish.payload_bytes <= delta.largest(layout.total_bytes, delta.BUCKET_BYTES):
            raise ValueError(f"a delta of {publish.payload_bytes} bytes to {layout.total_bytes}")
        return True

    def take(self, incarnation: int, version: int) -> torch.Tensor:
        """The verified [total_bytes] uint8 buffer, yours until `give_back`; raises ValueError when it is not staged."""
        with self._lock:
            if self._staged is None:
                raise ValueError(f"version {version} is not staged")
            publish, flat = self._staged
            if (publish.incarnation, publish.version) != (incarnation, version):
                raise ValueError(f"version {publish.version} is staged, not {version}")
            self._staged = None
            self._taken = (incarnation, version)
            return flat

    def give_back(self, flat: torch.Tensor) -> None:
        """The buffer from `take`, unchanged; it may be served, and written again."""
        with self._lock:
            if self._layout is not None and flat.numel() == self._layout.total_bytes:
                self._buffer, self._contents = flat, self._taken
            self._taken = None

    def serve(self, serve: Serve, node_id: str) -> Serving:
        """Let another node fetch the staging buffer's version; the answer says where, or why not. Never raises."""
        with self._lock:
            if self._buffer is None or self._contents != (serve.incarnation, serve.version):
                return Serving(node_id, serve.key, reason=f"version {serve.version} is not in the staging buffer")
            return self._peers.offer(serve, self._buffer, node_id)

    def close(self) -> None:
        """Drop the group, abandon what is under way, and stop serving other nodes."""
        with self._lock:
            self._epoch = None
            self._peers.close()
        self._drop_groups()

    def _receive(
        self,
        generation: int,
        publish: Publish,
        layout: Layout,
        epoch: Epoch,
        group: Group | None,
        buffer: torch.Tensor | None,
        is_delta: bool,
    ) -> None:
        started = time.perf_counter()
        base = buffer if is_delta else None  # None as soon as it is changed
        try:
            group = group if group is not None else self._group_factory(epoch)
            self._note_busy(generation, group)
            # Zeros, not empty: a bucket that never arrives must not be able to look like an older version.
            flat = buffer if buffer is not None else self._allocate(layout.total_bytes)
            payload = torch.zeros(publish.payload_bytes, dtype=torch.uint8) if is_delta else flat
            receive_buckets(group, payload, publish, lambda share: self._note_share(generation, publish, share))
            if is_delta:
                base = None
                apply_delta(payload, flat, publish)
        except Exception as error:  # any failure means that the version did not arrive; the learner gets the reason
            self._fail(generation, publish, group, reason_of(error), base)
            return
        with self._lock:
            current = generation == self._generation
            if current:
                self._group, self._busy, self._staged = group, None, (publish, flat)
                took = time.perf_counter() - started
                self._status = StagingStatus("staged", publish.incarnation, publish.version, took)
        if not current:
            group.close()

    def _note_share(self, generation: int, publish: Publish, share: float) -> None:
        with self._lock:
            if generation == self._generation:
                self._status = StagingStatus("receiving", publish.incarnation, publish.version, share=share)

    def _note_busy(self, generation: int, group: Group) -> None:
        """Let later calls close this thread's group; raises RuntimeError when one came already."""
        with self._lock:
            if generation != self._generation:
                raise RuntimeError("given up for another transfer")
            self._busy = group

    def _fail(
        self, generation: int, publish: Publish, group: Group | None, reason: str, base: torch.Tensor | None
    ) -> None:
        with self._lock:
            if generation == self._generation:
                if base is not None:
                    self._buffer, self._contents = base, (publish.incarnation, publish.base_version)
                self._status = StagingStatus(
                    "failed", publish.incarnation, publish.version, error=reason.split("\n")[0]
                )
        logger.warning("version %d did not arrive: %s", publish.version, reason)
        if group is not None:
            group.close()


def apply_delta(stream: torch.Tensor, flat: torch.Tensor, publish: Publish) -> None:
    """Turn `flat` [total_bytes] from the base of `publish` into its version, in place, and verify the result.

    Raises:
        ValueError: it gives other weights than the published ones; the contents of `flat` are lost.
    """
    delta.apply(stream, flat, delta.BUCKET_BYTES)
    found = packing.checksum(flat)
    if found != publish.checksum:
        raise ValueError(
            f"the delta from version {publish.base_version} gives {found}, published was {publish.checksum}"
        )


def receive_buckets(
    group: Group, flat: torch.Tensor, publish: Publish, note_share: Callable[[float], None] = lambda share: None
) -> None:
    """All buckets of `publish` into `flat` [payload_bytes] uint8, verified against its checksums.

    `note_share` is called after every bucket with the share of them that arrived, 0 to 1.

    Raises:
        RuntimeError: the broadcast failed or did not finish in time.
        ValueError: other bytes arrived than were sent; names the bucket.
    """
    timeout_s = bucket_timeout(publish.timeout_s)
    buckets = ranges(len(flat), publish.bucket_bytes)
    if len(buckets) != len(publish.bucket_checksums):
        raise ValueError(f"{len(publish.bucket_checksums)} checksums for {len(buckets)} buckets")
    bad: list[int] = []
    group.begin(len(flat))
    arriving = in_turn(group, (flat[start:end] for start, end in buckets), timeout_s)
    for i, (bucket, expected) in enumerate(zip(arriving, publish.bucket_checksums, strict=True)):
        if packing.checksum(bucket) != expected:
            bad.append(i)  # go on to the end, because the other members of the group still receive
        note_share((i + 1) / len(buckets))
    if bad:
        raise ValueError(f"checksum mismatch in bucket {', '.join(map(str, bad))} of {len(buckets)}")
    if publish.sha256 and packing.sha256(flat) != publish.sha256:
        raise ValueError("the source sent other weights than the learner's: their SHA-256 differs")
