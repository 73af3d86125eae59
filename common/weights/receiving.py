"""The receiving side of a publish: buckets into a staging buffer in a thread, every one of them verified.

One Receiver serves one process that holds a copy of the weights. It never blocks its caller; a new epoch
or a new publish abandons what was under way (the old thread ends at its own timeout and touches only its own buffer).
"""

import logging
import threading
import time
from typing import Literal

import msgspec
import torch

from common.weights import packing
from common.weights.collectives import GlooGroup, Group, GroupFactory, bucket_timeout, reason_of
from common.weights.layout import Layout
from common.weights.messages import Epoch, Publish

logger = logging.getLogger(__name__)

State = Literal["idle", "receiving", "staged", "failed"]


class StagingStatus(msgspec.Struct, frozen=True):
    """Where the newest publish stands; `receive_s` counts from the announcement to the last verified bucket."""

    state: State = "idle"
    incarnation: int = -1
    version: int = -1
    receive_s: float = 0.0
    error: str = ""


class Receiver:
    """Stages the publishes of one learner incarnation after another."""

    def __init__(self, group_factory: GroupFactory = GlooGroup) -> None:
        self._group_factory = group_factory
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._epoch: Epoch | None = None
        self._group: Group | None = None  # of self._epoch, once formed and not in trouble
        self._buffer: torch.Tensor | None = None  # free for reuse: no thread writes into it
        self._staged: tuple[Publish, torch.Tensor] | None = None
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
            self._layout, self._buffer, self._staged, self._status = layout, None, None, StagingStatus()

    def set_epoch(self, epoch: Epoch) -> None:
        """The next publish arrives over the group of `epoch`."""
        with self._lock:
            self._turn += 1
            old, self._group, self._epoch = self._group, None, epoch
        if old is not None:
            old.close()

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
            self._turn += 1
            turn, layout, epoch = self._turn, self._layout, self._epoch
            group, self._group = self._group, None  # the thread owns it until it succeeds
            buffer, self._buffer = self._buffer, None
            if buffer is None and self._staged is not None:
                buffer = self._staged[1]  # a newer version supersedes one that was never applied
            self._staged = None
            self._status = StagingStatus("receiving", publish.incarnation, publish.version)
        threading.Thread(
            target=self._receive,
            args=(turn, publish, layout, epoch, group, buffer),
            daemon=True,
            name="receive-weights",
        ).start()

    def take(self, incarnation: int, version: int) -> torch.Tensor:
        """The verified [total_bytes] uint8 buffer, yours until `give_back`; raises ValueError when it is not staged."""
        with self._lock:
            if self._staged is None:
                raise ValueError(f"version {version} is not staged")
            publish, flat = self._staged
            if (publish.incarnation, publish.version) != (incarnation, version):
                raise ValueError(f"version {publish.version} is staged, not {version}")
            self._staged = None
            return flat

    def give_back(self, flat: torch.Tensor) -> None:
        """The buffer from `take` may be written again."""
        with self._lock:
            if self._layout is not None and flat.numel() == self._layout.total_bytes:
                self._buffer = flat

    def close(self) -> None:
        """Drop the group and whatever was under way."""
        with self._lock:
            self._turn += 1
            group, self._group, self._epoch = self._group, None, None
        if group is not None:
            group.close()

    def _receive(
        self,
        turn: int,
        publish: Publish,
        layout: Layout,
        epoch: Epoch,
        group: Group | None,
        buffer: torch.Tensor | None,
    ) -> None:
        started = time.perf_counter()
        try:
            group = group if group is not None else self._group_factory(epoch)
            # Zeros, not empty: a bucket that never arrives must not be able to look like an older version.
            flat = buffer if buffer is not None else torch.zeros(layout.total_bytes, dtype=torch.uint8)
            receive_buckets(group, flat, layout, publish)
        except Exception as error:  # whatever went wrong, this publish did not arrive; the reason goes to the learner
            self._fail(turn, publish, group, reason_of(error))
            return
        with self._lock:
            if turn != self._turn:
                return
            self._group, self._staged = group, (publish, flat)
            took = time.perf_counter() - started
            self._status = StagingStatus("staged", publish.incarnation, publish.version, took)

    def _fail(self, turn: int, publish: Publish, group: Group | None, reason: str) -> None:
        with self._lock:
            if turn == self._turn:
                self._status = StagingStatus(
                    "failed", publish.incarnation, publish.version, error=reason.split("\n")[0]
                )
        logger.warning("version %d did not arrive: %s", publish.version, reason)
        if group is not None:
            group.close()


def receive_buckets(group: Group, flat: torch.Tensor, layout: Layout, publish: Publish) -> None:
    """All buckets of `publish` into `flat` [total_bytes] uint8, verified against its checksums.

    Raises:
        RuntimeError: the broadcast failed or did not finish in time.
        ValueError: what arrived is not what was sent; names the bucket.
    """
    timeout_s = bucket_timeout(publish.timeout_s)
    ranges = layout.buckets(publish.bucket_bytes)
    if len(ranges) != len(publish.bucket_checksums):
        raise ValueError(f"{len(publish.bucket_checksums)} checksums for {len(ranges)} buckets")
    bad: list[int] = []
    for i, ((start, end), expected) in enumerate(zip(ranges, publish.bucket_checksums, strict=True)):
        bucket = flat[start:end]
        group.broadcast(bucket, timeout_s)
        if packing.checksum(bucket) != expected:
            bad.append(i)  # the others of the group are still receiving: stay in step with them to the end
    if bad:
        raise ValueError(f"checksum mismatch in bucket {', '.join(map(str, bad))} of {len(ranges)}")
