"""One attempt to bring one version to one set of nodes; a broadcast blocks, so it runs in a thread."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.weights.collectives import Group, GroupFactory, bucket_timeout, in_turn, reason_of
from common.weights.layout import ranges
from common.weights.messages import Epoch, Publish
from learner.publish.snapshot import Payload, Snapshot

logger = logging.getLogger(__name__)


@dataclass(eq=False)  # by identity: one of the same snapshot may carry another payload, and tensors have no `==`
class Transfer:
    """Progress of one attempt, kept by the control thread.

    Attributes:
        payload: what travels.
        members: everyone who was in the group; never changes.
        newcomers: serves only nodes that had nothing yet.
        relayed: one node fetches, from the learner or from `peer`; otherwise a broadcast.
        receiving: those who have neither staged nor failed.
        flipping: those who staged and have not yet said Active.
        failed_at: when trouble was seen (a member's failure, a death, the root's own error), or None.
        answered: members heard from since `failed_at`; the silent ones are ejected before the retry.
        probation: the member that is in the group on trial, if any.
        peer: the node that serves a relayed one, None: the learner.
        peer_until: how long its answer is waited for; None once the fetch began.
        group: the formed group, once the broadcast went through.
        done: the sending thread ended, or there is none.
    """

    snapshot: Snapshot
    payload: Payload
    epoch: Epoch
    members: frozenset[bytes]
    newcomers: bool
    started: float
    deadline: float
    relayed: bool = False
    receiving: set[bytes] = field(default_factory=set)
    flipping: set[bytes] = field(default_factory=set)
    answered: set[bytes] = field(default_factory=set)
    failed_at: float | None = None
    probation: bytes | None = None
    peer: bytes | None = None
    peer_until: float | None = None
    group: Group | None = None
    done: bool = False
    last_staged: float = 0.0
    _sending: Group | None = None  # as long as the thread has it
    _abandoned: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, now: float) -> None:
        """Note the first sign of trouble."""
        if self.failed_at is None:
            self.failed_at = now
            self.answered.clear()

    @property
    def finished(self) -> bool:
        """Every member is active, failed or gone."""
        return not self.receiving and not self.flipping

    def abandon(self) -> None:
        """Nobody waits for the broadcast any more: close its group, which wakes the thread where that is possible."""
        with self._lock:
            self._abandoned = True
            if self._sending is not None:
                self._sending.close()

    def sends_over(self, group: Group | None) -> None:
        """The thread has `group` now, or no more; raises RuntimeError when the attempt was abandoned."""
        with self._lock:
            self._sending = group
            if group is not None and self._abandoned:
                raise RuntimeError("the attempt was given up")


def announcement(transfer: Transfer, incarnation: int, bucket_bytes: int, timeout_s: float) -> Publish:
    """The Publish message of a transfer."""
    snapshot, payload = transfer.snapshot, transfer.payload
    return Publish(
        incarnation=incarnation,
        version=snapshot.version,
        epoch=transfer.epoch.epoch,
        layout_digest=snapshot.layout.digest,
        bucket_bytes=bucket_bytes,
        bucket_checksums=payload.bucket_checksums,
        checksum=snapshot.checksum,
        timeout_s=timeout_s,
        canary=snapshot.canary,
        encoding=payload.encoding,
        base_version=payload.base_version,
        payload_bytes=payload.flat.numel(),
        sha256=snapshot.sha256 if transfer.peer is not None else "",
    )


def send_in_thread(
    transfer: Transfer,
    group: Group | None,
    factory: GroupFactory,
    bucket_bytes: int,
    report: Callable[[Transfer, Group | None, str], None],
) -> None:
    """Broadcast the payload over `group`, or over a new one of the transfer's epoch.

    `report(transfer, group, error)` is called from the thread at the end: the usable group, or None and why.
    """
    snapshot = transfer.snapshot.retain()

    def run() -> None:
        formed, error = group, ""
        try:
            formed = formed if formed is not None else factory(transfer.epoch)
            transfer.sends_over(formed)
            timeout_s = bucket_timeout(transfer.epoch.timeout_s)
            flat = transfer.payload.flat
            formed.begin(flat.numel())
            for _ in in_turn(formed, (flat[a:b] for a, b in ranges(flat.numel(), bucket_bytes)), timeout_s):
                pass  # who receives looks at them
        except Exception as caught:  # gloo's and the store's errors have no common type; each means a failed attempt
            error = reason_of(caught)
            if formed is not None:
                formed.close()
            formed = None
        finally:
            transfer.sends_over(None)
            snapshot.release()
        report(transfer, formed, error)

    threading.Thread(target=run, daemon=True, name=f"send-weights-{transfer.snapshot.version}").start()


def new_transfer(
    snapshot: Snapshot, payload: Payload, members: list[bytes], epoch: Epoch, newcomers: bool, timeout_s: float
) -> Transfer:
    """An attempt that starts now and must be staged everywhere within `timeout_s`."""
    now = time.perf_counter()
    snapshot.sent = True
    return Transfer(
        snapshot=snapshot.retain(),
        payload=payload,
        epoch=epoch,
        members=frozenset(members),
        newcomers=newcomers,
        started=now,
        deadline=now + timeout_s,
        receiving=set(members),
    )
