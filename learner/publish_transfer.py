"""One attempt to bring one version to one set of nodes; the broadcast blocks, so it runs in a thread."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.weights.collectives import Group, GroupFactory, bucket_timeout, reason_of
from common.weights.messages import Epoch, Publish
from learner.publish_snapshot import Snapshot

logger = logging.getLogger(__name__)


@dataclass
class Transfer:
    """Progress of one attempt, kept by the control thread.

    Attributes:
        members: everyone who was in the group; never changes.
        receiving: those who have neither staged nor failed.
        flipping: those who staged and have not yet said Active.
        failed_at: when trouble was seen (a member's failure, a death, the root's own error), or None.
        answered: members heard from since `failed_at`; the silent ones are ejected before the retry.
        newcomers: serves only nodes that had nothing yet, beside the main group.
        group: the formed group, once the broadcast went through.
        done: the sending thread ended.
    """

    snapshot: Snapshot
    epoch: Epoch
    members: frozenset[bytes]
    newcomers: bool
    started: float
    deadline: float
    receiving: set[bytes] = field(default_factory=set)
    flipping: set[bytes] = field(default_factory=set)
    answered: set[bytes] = field(default_factory=set)
    failed_at: float | None = None
    group: Group | None = None
    done: bool = False
    last_staged: float = 0.0

    def fail(self, now: float) -> None:
        """Note the first sign of trouble."""
        if self.failed_at is None:
            self.failed_at = now
            self.answered.clear()

    @property
    def finished(self) -> bool:
        """Every member is active, failed or gone."""
        return not self.receiving and not self.flipping


def announcement(snapshot: Snapshot, incarnation: int, epoch: int, bucket_bytes: int, timeout_s: float) -> Publish:
    """The Publish message of a sealed snapshot."""
    return Publish(
        incarnation=incarnation,
        version=snapshot.version,
        epoch=epoch,
        layout_digest=snapshot.layout.digest,
        bucket_bytes=bucket_bytes,
        bucket_checksums=snapshot.bucket_checksums,
        checksum=snapshot.checksum,
        timeout_s=timeout_s,
        canary=snapshot.canary,
    )


def send_in_thread(
    transfer: Transfer,
    group: Group | None,
    factory: GroupFactory,
    bucket_bytes: int,
    report: Callable[[Transfer, Group | None, str], None],
) -> None:
    """Broadcast the snapshot over `group`, or over a new one of the transfer's epoch.

    `report(transfer, group, error)` is called from the thread at the end: the usable group, or None and why.
    """
    snapshot = transfer.snapshot.retain()

    def run() -> None:
        formed, error = group, ""
        try:
            formed = formed if formed is not None else factory(transfer.epoch)
            timeout_s = bucket_timeout(transfer.epoch.timeout_s)
            for start, end in snapshot.layout.buckets(bucket_bytes):
                formed.broadcast(snapshot.flat[start:end], timeout_s)
        except Exception as caught:  # gloo's and the store's errors have no common type; each means a failed attempt
            error = reason_of(caught)
            if formed is not None:
                formed.close()
            formed = None
        finally:
            snapshot.release()
        report(transfer, formed, error)

    threading.Thread(target=run, daemon=True, name=f"send-weights-{transfer.snapshot.version}").start()


def new_transfer(snapshot: Snapshot, members: list[bytes], epoch: Epoch, newcomers: bool, timeout_s: float) -> Transfer:
    """An attempt that starts now and must be staged everywhere within `timeout_s`."""
    now = time.perf_counter()
    return Transfer(
        snapshot=snapshot.retain(),
        epoch=epoch,
        members=frozenset(members),
        newcomers=newcomers,
        started=now,
        deadline=now + timeout_s,
        receiving=set(members),
    )
