"""Which earlier versions a new one is encoded against, and how long those are kept.

A delta serves only nodes that have its base, and nodes have the version that was sent last. That is the previous one,
or an older one when publishes outrun the attempts. So at most two earlier versions are kept: the newest that began to
travel and the newest of all. A node that has neither (a newcomer, a node that missed one) gets the whole version.
"""

import logging
import os
import time

from common.weights import delta, packing
from learner.publish.snapshot import Payload, Snapshot

logger = logging.getLogger(__name__)

MOST_THREADS = 8  # that encode, and at most a quarter of the cores, because the next step computes meanwhile


class Deltas:
    """Belongs to the thread that seals snapshots, one at a time."""

    def __init__(self, encoding: str, anchor_every: int) -> None:
        """`encoding` is weights.encoding; every `anchor_every`th version travels whole in any case (0: none does)."""
        self._enabled, self._anchor_every = encoding == "delta", anchor_every
        self._kept: list[Snapshot] = []  # oldest first
        self._versions = 0
        self._threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 4))

    def encode(self, snapshot: Snapshot, bucket_bytes: int) -> None:
        """Give a sealed `snapshot` its deltas, and keep it as a base of those to come."""
        if not self._enabled:
            return
        bases = self._bases()
        anchor = self._anchor_every > 0 and self._versions % self._anchor_every == 0
        self._versions += 1
        for base in bases if not anchor else ():
            started = time.perf_counter()
            stream = delta.encode(base.flat, snapshot.flat, delta.BUCKET_BYTES, self._threads)
            if stream.numel() < snapshot.flat.numel():
                checksums, _ = packing.all_checksums(stream, bucket_bytes)
                snapshot.deltas[base.version] = Payload(stream, checksums, "delta", base.version)
            took, share = time.perf_counter() - started, stream.numel() / snapshot.flat.numel()
            logger.info("version %d from %d: %.1f %% in %.3f s", snapshot.version, base.version, 100 * share, took)
        self._kept = [*bases[:1], snapshot] if bases and bases[0].sent else [snapshot]

    def _bases(self) -> list[Snapshot]:
        """The newest that began to travel, then the newest of all if that is another one."""
        sent = [s for s in self._kept if s.sent][-1:]
        return sent + [s for s in self._kept[-1:] if s not in sent]
