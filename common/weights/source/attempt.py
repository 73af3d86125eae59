"""One attempt to bring one version to one set of nodes, the thread that broadcasts it, and the groups for that."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from common.weights.source.snapshot import Payload, Snapshot
from common.weights.transports.groups import BroadcastGroup, GroupFactory, RelayedStore, in_turn
from common.weights.wire.failures import Failure, GivenUp
from common.weights.wire.layout import publish_bound
from common.weights.wire.messages import Epoch, Publish, StoreEntries

MOST_MET_BYTES = 1 << 20  # that one member may set in the store of a group

# Gets the attempt, and the group if that is usable, else None and the reason.
Report = Callable[["Attempt", BroadcastGroup | None, Failure | None], None]


class Broadcast:
    """Sends the payload of one attempt in a thread, because a broadcast blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: BroadcastGroup | None = None  # set while the thread uses it
        self.store: RelayedStore | None = None  # where a new group meets
        self.met: Counter[bytes] = Counter()  # bytes of entries by member
        self._abandoned = False

    def start(self, attempt: "Attempt", group: BroadcastGroup | None, factory: GroupFactory, report: Report) -> None:
        """Send over `group`, or over a new one of the attempt's epoch whose members meet in `store`, and report."""

        def run() -> None:
            formed = group
            failure: Failure | None = None
            try:
                if formed is None:
                    assert self.store is not None
                    formed = factory(attempt.epoch, self.store)
                self.use(formed)
                publish = attempt.publish
                for _ in in_turn(formed, attempt.payload.flat, publish.bucket_bytes, publish.timeout_s):
                    pass  # only receivers look at the buckets
            except Exception as error:  # the errors of gloo and of the store have no common type
                failure = Failure.of(error)
                if formed is not None:
                    formed.close()
                formed = None
            finally:
                self.use(None)
            report(attempt, formed, failure)

        threading.Thread(target=run, daemon=True, name=f"send-weights-{attempt.version}").start()

    def use(self, group: BroadcastGroup | None) -> None:
        """Note which group the thread uses; raises GivenUp when the attempt was abandoned."""
        with self._lock:
            self._group = group
            if group is not None and self._abandoned:
                raise GivenUp("the attempt was given up")

    def abandon(self) -> None:
        """Close the group, because no node waits for it any more. This wakes the thread where that is possible."""
        if self.store is not None:
            self.store.close()
        with self._lock:
            self._abandoned = True
            if self._group is not None:
                self._group.close()


@dataclass(eq=False)  # compared by identity, because tensors have no `==`
class Attempt:
    """A payload on its way to a set of nodes; only the control thread changes it. Times are perf_counter seconds."""

    snapshot: Snapshot
    payload: Payload
    epoch: Epoch  # the group as rank 0 forms it; for a fetch, that of its one node
    publish: Publish  # the announcement that every member gets
    members: frozenset[bytes]  # connections of all nodes of the attempt, also of those that left since
    started: float
    deadline: float  # when every member must have staged
    done: bool  # the sending thread has ended; a fetch has none
    newcomers: bool = False  # it serves only nodes that were never active on their connection
    probation: bytes | None = None  # the member that is in the group on trial
    failed: bool = False  # a member or the sender reported trouble
    lost: bool = False  # a member left or joined anew, so the group cannot be used again
    group: BroadcastGroup | None = None  # the formed group after a successful broadcast
    last_staged: float = 0.0  # when the newest Staged came
    # New ones in the group's store, for the members.
    entries: dict[str, bytes] = field(default_factory=lambda: dict[str, bytes]())
    broadcast: Broadcast = field(default_factory=Broadcast)

    @property
    def version(self) -> int:
        return self.publish.version

    @property
    def relayed(self) -> bool:
        """One node fetches the payload; otherwise it is broadcast."""
        return self.epoch.transport == "relay"

    def take_entries(self, new: StoreEntries, sender: bytes) -> None:
        """Take in `entries` for the members and, of a node, for the learner. `sender`: its connection, or b''."""
        if self.publish.epoch != new.epoch or self.relayed or sender not in self.members | {b""}:
            return
        if sender and self.broadcast.store is not None:
            self.broadcast.met[sender] += sum(len(k) + len(v) for k, v in new.entries.items())
            if self.broadcast.met[sender] > MOST_MET_BYTES:
                return  # no group needs so much: theirs does not form
            self.broadcast.store.add_entries(new.entries)
        self.entries |= new.entries


def new_attempt(
    snapshot: Snapshot,
    payload: Payload,
    epoch: Epoch,
    *,
    members: list[bytes],
    incarnation: int,
    sources: list[str] | None = None,
    rate: float = 0.0,
) -> Attempt:
    """An attempt that starts now; every member must have staged within `publish_bound`, whose `rate` this is.

    `sources`: where its node fetches every part; None for a broadcast, whose buckets have the epoch's `timeout_s`.
    """
    relayed = epoch.transport == "relay"
    bound_s = publish_bound(epoch.timeout_s, snapshot.layout.total_bytes, rate)
    publish = Publish(
        incarnation=incarnation,
        version=snapshot.version,
        epoch=epoch.epoch,
        layout_digest=snapshot.layout.digest,
        bucket_bytes=payload.bucket_bytes,
        bucket_checksums=[] if relayed else payload.bucket_checksums,
        checksum=snapshot.checksum,
        timeout_s=bound_s if relayed else epoch.timeout_s,
        canary=snapshot.canary,
        encoding=payload.encoding,
        base_version=payload.base_version,
        payload_bytes=payload.size,
        parts=payload.parts if relayed else [],
        sources=sources or [],
        frozen=snapshot.frozen if payload.encoding != "full" or snapshot.checksum == snapshot.frozen else "",
    )
    snapshot.sent = True
    now = time.perf_counter()
    return Attempt(
        snapshot,
        payload,
        epoch,
        publish=publish,
        members=frozenset(members),
        started=now,
        deadline=now + bound_s,
        done=relayed,
    )


class _Kept(NamedTuple):
    members: frozenset[bytes]
    epoch: Epoch
    group: BroadcastGroup


class Epochs:
    """Numbers the epochs of attempts, and keeps the group of the last broadcast for its members."""

    def __init__(self, transport: str, timeout_s: float, learner_endpoint: str) -> None:
        """`learner_endpoint`: HOST:PORT of the learner, by which members find their interface."""
        self._transport = transport
        self._timeout_s = timeout_s
        self._learner_endpoint = learner_endpoint
        self._numbers = itertools.count(1)
        self._kept: _Kept | None = None

    def relay(self) -> Epoch:
        """A new epoch of one node that fetches."""
        return self._epoch(rank=1, world_size=2, transport="relay")

    def take(self, members: list[bytes]) -> tuple[Epoch, BroadcastGroup | None]:
        """(epoch as rank 0, the kept group of exactly these members); None: a new group must be formed."""
        kept = self._kept
        if kept is not None and kept.members == frozenset(members):
            self._kept = None
            return kept.epoch, kept.group
        self.drop()
        return self._epoch(rank=0, world_size=len(members) + 1, transport=self._transport), None

    def _epoch(self, rank: int, world_size: int, transport: str) -> Epoch:
        return Epoch(
            epoch=next(self._numbers),
            rank=rank,
            world_size=world_size,
            timeout_s=self._timeout_s,
            transport=transport,
            learner_endpoint=self._learner_endpoint,
        )

    def give_back(self, attempt: Attempt) -> None:
        """The attempt is over: keep its group if that can be used again."""
        if attempt.group is None:
            return
        if attempt.failed or attempt.lost:
            attempt.group.close()
        else:
            self._kept = _Kept(attempt.members, attempt.epoch, attempt.group)

    def drop(self, member: bytes | None = None) -> None:
        """Close the kept group; with `member`, a node that is gone, only if that was in it."""
        if self._kept is not None and (member is None or member in self._kept.members):
            self._kept.group.close()
            self._kept = None
