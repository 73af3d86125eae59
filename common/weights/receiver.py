"""The receiving side of a publish: buckets into a staging buffer in a thread, every one of them verified.

One Receiver serves one process that holds a copy of the weights. It never blocks its caller; a new epoch
or a new publish abandons what was under way: its group is closed, and its thread touches only its own buffer.
After a flip the staging buffer still holds the version; until the next one comes, other nodes may fetch it from there.
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
from common.weights.peer_server import Shelf
from common.weights.transports.registry import open_group

logger = logging.getLogger(__name__)

State = Literal["idle", "receiving", "staged", "failed"]


class StagingStatus(msgspec.Struct, frozen=True):
    """Where the newest publish stands.

    `receive_s` counts from the announcement to the last verified bucket; `share`, 0 to 1, of the payload is here.
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
        """`allocate`: gives a zeroed [n] uint8 buffer of so many bytes; None: memory of this process."""
        self._group_factory = group_factory
        self._allocate = allocate if allocate is not None else packing.buffer
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._epoch: Epoch | None = None
        self._group: Group | None = None  # of self._epoch, once formed and not in trouble
        self._busy: Group | None = None  # the one that the newest thread receives over
        self._buffer: torch.Tensor | None = None  # free for reuse: no thread writes into it
        self._staged: tuple[Publish, torch.Tensor] | None = None
        self._taken: tuple[int, int] | None = None  # (incarnation, version) of the buffer that is out
        self._held: tuple[int, int] | None = None  # what self._buffer holds whole, proven
        self._shelf = Shelf()
        self._status = StagingStatus()
        self._turn = 0  # raised by every call that makes an older thread's result void

    @property
    def layout(self) -> Layout | None:
        return self._layout

    @property
    def status(self) -> StagingStatus:
        with self._lock:
            return self._status

    def set_layout(self, layout: Layout) -> None:
        """Weights from here on follow `layout`; what was staged before is void."""
        with self._lock:
            self._turn += 1
            self._shelf.clear()
            self._held = self._taken = None
            self._layout, self._buffer, self._staged, self._status = layout, None, None, StagingStatus()

    def set_epoch(self, epoch: Epoch) -> None:
        """The next publish arrives over the group of `epoch`."""
        with self._lock:
            self._epoch = epoch
        self._drop_groups()

    def _drop_groups(self) -> None:
        with self._lock:
            self._turn += 1
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
            self._turn += 1
            turn, layout, epoch = self._turn, self._layout, self._epoch
            group, self._group = self._group, None  # the thread owns it until it succeeds
            self._shelf.clear()
            self._held = None  # whatever comes of it, this buffer is written
            buffer, self._buffer = self._buffer, None
            if buffer is None and self._staged is not None:
                buffer = self._staged[1]  # a newer version supersedes one that was never applied
            self._staged = None
            self._status = StagingStatus("receiving", publish.incarnation, publish.version)
        threading.Thread(
            target=self._receive,
            args=(turn, publish, layout, epoch, group, buffer, is_delta),
            daemon=True,
            name="receive-weights",
        ).start()

    def _check_encoding(self, publish: Publish, layout: Layout) -> bool:
        """Whether `publish` is a delta; raises ValueError when it is one to something else than the buffer holds."""
        if publish.encoding == "full":
            return False
        if publish.encoding != "delta":
            raise ValueError(f"version {publish.version} comes as {publish.encoding!r}, which is not known here")
        base = (publish.incarnation, publish.base_version)
        if self._buffer is None or self._held != base:
            raise ValueError(
                f"version {publish.version} comes as a delta to {base}, the staging buffer holds {self._held}"
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
                self._buffer, self._held = flat, self._taken
            self._taken = None

    def serve(self, serve: Serve, node_id: str) -> Serving:
        """Let another node fetch what the staging buffer holds; the answer says where, or why not. Never raises."""
        with self._lock:
            if self._buffer is None or self._held != (serve.incarnation, serve.version):
                return Serving(node_id, serve.key, reason=f"version {serve.version} is not in the staging buffer")
            return self._shelf.put(serve, self._buffer, node_id)

    def close(self) -> None:
        """Drop the group and whatever was under way, and serve nobody any more."""
        with self._lock:
            self._epoch = None
            self._shelf.close()
        self._drop_groups()

    def _receive(
        self,
        turn: int,
        publish: Publish,
        layout: Layout,
        epoch: Epoch,
        group: Group | None,
        buffer: torch.Tensor | None,
        is_delta: bool,
    ) -> None:
        started = time.perf_counter()
        base = buffer if is_delta else None  # as long as it is whole
        try:
            group = group if group is not None else self._group_factory(epoch)
            self._note_busy(turn, group)
            # Zeros, not empty: a bucket that never arrives must not be able to look like an older version.
            flat = buffer if buffer is not None else self._allocate(layout.total_bytes)
            payload = torch.zeros(publish.payload_bytes, dtype=torch.uint8) if is_delta else flat
            receive_buckets(group, payload, publish, lambda share: self._note_share(turn, publish, share))
            if is_delta:
                base = None
                apply_delta(payload, flat, publish)
        except Exception as error:  # whatever went wrong, this publish did not arrive; the reason goes to the learner
            self._fail(turn, publish, group, reason_of(error), base)
            return
        with self._lock:
            current = turn == self._turn
            if current:
                self._group, self._busy, self._staged = group, None, (publish, flat)
                took = time.perf_counter() - started
                self._status = StagingStatus("staged", publish.incarnation, publish.version, took)
        if not current:
            group.close()

    def _note_share(self, turn: int, publish: Publish, share: float) -> None:
        with self._lock:
            if turn == self._turn:
                self._status = StagingStatus("receiving", publish.incarnation, publish.version, share=share)

    def _note_busy(self, turn: int, group: Group) -> None:
        """Let whoever makes this thread's result void close its group; raises RuntimeError when that came first."""
        with self._lock:
            if turn != self._turn:
                raise RuntimeError("given up for another transfer")
            self._busy = group

    def _fail(self, turn: int, publish: Publish, group: Group | None, reason: str, base: torch.Tensor | None) -> None:
        with self._lock:
            if turn == self._turn:
                if base is not None:
                    self._buffer, self._held = base, (publish.incarnation, publish.base_version)
                self._status = StagingStatus(
                    "failed", publish.incarnation, publish.version, error=reason.split("\n")[0]
                )
        logger.warning("version %d did not arrive: %s", publish.version, reason)
        if group is not None:
            group.close()


def apply_delta(stream: torch.Tensor, flat: torch.Tensor, publish: Publish) -> None:
    """Turn `flat` [total_bytes] from the base of `publish` into its version, in place, and verify the result.

    Raises:
        ValueError: it gives other weights than the published ones; `flat` holds nothing of use any more.
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

    `note_share` hears after every bucket which share of them, 0 to 1, is here.

    Raises:
        RuntimeError: the broadcast failed or did not finish in time.
        ValueError: what arrived is not what was sent; names the bucket.
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
            bad.append(i)  # the others of the group are still receiving: stay in step with them to the end
        note_share((i + 1) / len(buckets))
    if bad:
        raise ValueError(f"checksum mismatch in bucket {', '.join(map(str, bad))} of {len(buckets)}")
    if publish.sha256 and packing.sha256(flat) != publish.sha256:
        raise ValueError("the source sent other weights than the learner's: their SHA-256 differs")
