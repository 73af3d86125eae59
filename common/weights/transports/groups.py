"""The protocol of the collective transports of buckets, and what they share.

The learner uses torch.distributed's default group, so this module leaves it alone. The learner is rank 0. The members
of a group meet through a store whose entries travel over the control socket. `GROUPS` lists the transports.
"""

import contextlib
import datetime
import importlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import distributed

from common.process.local_address import host_and_port, local_address
from common.weights.wire.failures import GivenUp, GroupFailed, Late
from common.weights.wire.messages import Epoch

ROOT = 0
POSTED = 2  # buckets under way: the one that is waited for and the next
MOST_ENTRIES = 1 << 16  # in the store of one group
dist: Any = distributed  # these classes are public in use but untyped in torch


class BroadcastGroup(Protocol):
    """A formed group of the learner (rank 0) and the nodes of one epoch.

    Buckets are in host memory or, for transports between devices, in a device's. Completion proves nothing, so
    receivers verify every bucket.
    """

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Send rank 0's bytes into everyone's `bucket` [n] uint8; returns a function that waits for it.

        Buckets go out and are waited for in the order of posting. `timeout_s` counts from the end of the one before.
        Raises RuntimeError, here or from the wait, when it failed or was late; the group is of no use then.
        """
        ...

    def close(self) -> None:
        """Give up at once; any thread may call it, also while another one waits."""


GroupFactory = Callable[[Epoch, "RelayedStore"], BroadcastGroup]


def in_turn(
    group: BroadcastGroup, payload: torch.Tensor, bucket_bytes: int, publish_timeout_s: float
) -> Iterator[torch.Tensor]:
    """Broadcast `payload` [n] uint8; yields every bucket when it is through, while the next ones travel.

    Raises as `BroadcastGroup.post`. When it ends, also by an error, nothing is under way, and the memory may be used
    again. An early end closes the group.
    """
    posted = deque[tuple[torch.Tensor, Callable[[], None]]]()
    try:
        for at in range(0, len(payload), bucket_bytes):
            bucket = payload[at : at + bucket_bytes]
            posted.append((bucket, group.post(bucket, bucket_timeout(publish_timeout_s))))
            if len(posted) == POSTED:
                yield _arrived(posted)
        while posted:
            yield _arrived(posted)
    finally:
        if posted:
            group.close()
        while posted:
            with contextlib.suppress(Exception):  # an earlier failure is being raised already
                _arrived(posted)


def _arrived(posted: deque[tuple[torch.Tensor, Callable[[], None]]]) -> torch.Tensor:
    bucket, wait = posted.popleft()
    wait()
    return bucket


class RelayedStore(dist.Store):
    """The store where the members of one group meet. Each has a copy, and new entries travel as StoreEntries messages.

    Each key has one writer, so the first value of a key stays. Any thread may call it.
    """

    def __init__(self, timeout_s: float, tell: Callable[[str, bytes], None]) -> None:
        """`tell` gets every entry that this member sets."""
        super().__init__()  # type: ignore
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout_s = timeout_s
        self._tell = tell
        self._closed = False

    def add_entries(self, entries: Mapping[str, bytes]) -> None:
        """Entries of other members; beyond MOST_ENTRIES they are ignored."""
        with self._changed:
            for key, value in entries.items():
                if len(self._entries) < MOST_ENTRIES:
                    self._entries.setdefault(key, value)
            self._changed.notify_all()

    def close(self) -> None:
        """Let those who wait give up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.add_entries({key: data})
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """Raises Late when it does not come in time, GivenUp when the store is closed."""
        self.wait([key])
        return self._entries[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Raises Late when they do not all come in time, GivenUp when the store is closed."""
        limit_s = self._timeout_s if timeout is None else min(timeout.total_seconds(), self._timeout_s)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._entries.keys() >= set(keys), limit_s)
            missing = set(keys) - self._entries.keys()
        if missing:
            if self._closed:
                raise GivenUp(f"the group was given up: {len(missing)} entries are missing")
            raise Late(f"not all members came within {limit_s:g} s: {len(missing)} entries are missing")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return self._entries.keys() >= set(keys)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._timeout_s)

    def has_extended_api(self) -> bool:
        return False


def silence_bound(timeout_s: float) -> float:
    """Seconds without a message after which a node counts as dead while an attempt is under way."""
    return min(3.0, timeout_s / 4)


def from_root() -> Any:
    """Options of a broadcast of one tensor from rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = ROOT
    options.rootTensor = 0
    return options


def bucket_timeout(publish_timeout_s: float) -> float:
    """Seconds that one bucket may take when the whole publish may take `publish_timeout_s`."""
    return max(0.5, publish_timeout_s / 4)


class GlooGroup:
    """ProcessGroupGloo of the epoch's members.

    When a member dies, the others wait at most for the timeout of one bucket. Some of them get an error from gloo at
    once; the rest wait for the timeout.
    """

    def __init__(self, epoch: Epoch, store: RelayedStore) -> None:
        """Meet the other members; raises RuntimeError when not all come within `epoch.timeout_s`."""
        self._group: Any = process_group(epoch, store)
        self._store = store  # the group's threads may ask it later

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        group = self._group
        if group is None:
            raise GivenUp("the group was closed")
        options = from_root()
        options.timeout = datetime.timedelta(seconds=timeout_s)
        return group.broadcast([bucket], options).wait  # one thread works through them: the clock starts with its turn

    def close(self) -> None:
        """Drop the group; its destructor takes tens of milliseconds, so a side thread runs it."""
        doomed = [self._group]
        self._group = None
        threading.Thread(target=doomed.clear, daemon=True, name="drop-gloo-group").start()


def process_group(epoch: Epoch, store: RelayedStore) -> Any:
    """A ProcessGroupGloo of the epoch's members, on the interface that leads to the learner; raises RuntimeError."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=epoch.timeout_s)
    options._threads = 1
    interface = local_address(*host_and_port(epoch.learner_endpoint))
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
    return dist.ProcessGroupGloo(store, epoch.rank, epoch.world_size, options)


GROUPS = {"gloo": f"{__name__}:GlooGroup", "nccl": "common.weights.transports.nccl:NcclGroup"}  # by transport


def receivable(transport: str) -> tuple[str, ...]:
    """The transports of a node whose config says `transport`, its choice first; the relay always works."""
    return {"relay": ("relay",), "nccl": ("nccl", "gloo", "relay")}.get(transport, (transport, "relay"))


def require(transport: str) -> None:
    """Raises UsageError when this machine cannot use `transport`, and says what to do."""
    if transport == "nccl":
        from common.weights.transports.nccl import require_device

        require_device()


def open_group(epoch: Epoch, store: RelayedStore) -> BroadcastGroup:
    """A group of the epoch's transport; waits and raises as that transport's class does, or RuntimeError."""
    if epoch.transport not in GROUPS:
        raise GroupFailed(f"weights travel over {epoch.transport!r}, this version knows relay, {', '.join(GROUPS)}")
    module, _, name = GROUPS[epoch.transport].partition(":")
    form: GroupFactory = getattr(importlib.import_module(module), name)
    return form(epoch, store)
