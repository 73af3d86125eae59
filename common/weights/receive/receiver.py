"""The receiving side of a publish: threads write it into a staging buffer and verify every piece of it.

One Receiver serves one process that has a copy of the weights. It never blocks its caller. A new epoch or a new
publish abandons the running transfer. Its threads then touch only their own buffer. Pieces from the relay are
passed on while the next arrive. After a flip the staging buffer still contains the version, and other nodes may fetch
it until the next version comes.

        Welcome          Epoch             Publish                               Activate
    ------------> layout ----> _Membership -----> _Transfer ---verified---> staged ----> the engine loads it
                               (store, group)     (PartFetches, or a group)    ^              |
                                                       |                       |              v
                                                     failed                 StagingBuffer <- give_back: base, and served
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import torch
import zmq

from common.process.local_address import host_and_port, local_address
from common.weights.receive.frozen import FrozenWeights
from common.weights.transports.groups import BroadcastGroup, GroupFactory, RelayedStore, in_turn, open_group
from common.weights.transports.nccl import own_stream
from common.weights.transports.relay import PartFetches, RelayServer, Stall
from common.weights.wire import delta, flat_buffer
from common.weights.wire.failures import Damaged, Failure, GivenUp, Mismatch
from common.weights.wire.layout import WORDS, XXH3, Layout
from common.weights.wire.messages import (
    ADAPTERS,
    Epoch,
    LearnerMessage,
    Listening,
    Publish,
    Reroute,
    Serve,
    StoreEntries,
    Welcome,
)
from common.weights.wire.pieces import PartBuffer

logger = logging.getLogger(__name__)

State = Literal["idle", "receiving", "staged", "failed"]


class StagingStatus(msgspec.Struct, frozen=True):
    """Where the newest publish stands."""

    state: State = "idle"
    incarnation: int = -1
    version: int = -1
    receive_s: float = 0.0  # from the announcement to the last verified bucket
    failure: Failure | None = None
    share: float = 0.0  # the part that arrived, 0 to 1
    epoch: int = -1
    stalls: dict[int, Stall] = {}  # parts that wait for another source
    entries: dict[str, bytes] = {}  # that this node set in the store of the group of `epoch`
    total_bytes: int = 0  # the size of the whole version


class VersionKey(NamedTuple):
    """A version of one learner; the same number of another incarnation is another version."""

    incarnation: int
    version: int


class StagingBuffer:
    """The one buffer of a receiver: free, lent to a transfer, staged, or lent to the engine. Not thread-safe."""

    def __init__(self) -> None:
        self.free: torch.Tensor | None = None  # no thread writes into it
        self.contents: VersionKey | None = None  # the version in `free`, if it is whole and proven
        self._staged: tuple[VersionKey, torch.Tensor] | None = None
        self._taken: VersionKey | None = None

    def lend(self) -> torch.Tensor | None:
        """The memory for a transfer; None: there is none yet. A version that was never applied is superseded."""
        memory = self.free
        if memory is None and self._staged is not None:
            memory = self._staged[1]
        self.free = self.contents = self._staged = None
        return memory

    def restore(self, flat: torch.Tensor, contents: VersionKey) -> None:
        """A transfer failed before it changed the memory."""
        self.free = flat
        self.contents = contents

    def stage(self, version: VersionKey, flat: torch.Tensor) -> None:
        self._staged = version, flat

    def take(self, version: VersionKey) -> torch.Tensor:
        """Lend a staged version to the engine; raises ValueError when another or none is staged."""
        if self._staged is None:
            raise ValueError(f"version {version.version} is not staged")
        staged, flat = self._staged
        if staged != version:
            raise ValueError(f"version {staged.version} is staged, not {version.version}")
        self._staged = None
        self._taken = version
        return flat

    def give_back(self, flat: torch.Tensor, total_bytes: int) -> None:
        """The memory of `take`; that of an earlier layout has another size and is dropped."""
        if flat.numel() == total_bytes:
            self.free = flat
            self.contents = self._taken
        self._taken = None


@dataclass
class _Membership:
    """This node's place in the group of one epoch."""

    epoch: Epoch
    store: RelayedStore  # where the members meet
    entries: dict[str, bytes]  # that this node set there
    group: BroadcastGroup | None = None  # formed, and not in use by a transfer


@dataclass(eq=False)
class _Transfer:
    """One publish on its way here. Its thread discards its result when it is not the receiver's newest any more."""

    publish: Publish
    layout: Layout
    member: _Membership
    group: BroadcastGroup | None  # None until it is formed, and over the relay
    buffer: torch.Tensor | None  # to be written; with the base of a delta in it
    parts: PartFetches  # over the relay
    frozen: FrozenWeights
    started: float = field(default_factory=time.perf_counter)
    given_up: threading.Event = field(default_factory=threading.Event)

    @property
    def version(self) -> VersionKey:
        return VersionKey(self.publish.incarnation, self.publish.version)

    @property
    def is_delta(self) -> bool:
        return self.publish.encoding == "delta"

    @property
    def apart(self) -> bool:
        """The payload is made into the version, in memory of its own."""
        return self.publish.encoding != "full"

    @property
    def relayed(self) -> bool:
        return self.member.epoch.transport == "relay"

    def status(
        self, state: State, receive_s: float = 0.0, failure: Failure | None = None, share: float = 0.0
    ) -> StagingStatus:
        return StagingStatus(
            state=state,
            incarnation=self.publish.incarnation,
            version=self.publish.version,
            receive_s=receive_s,
            failure=failure,
            share=share,
            epoch=self.publish.epoch,
            total_bytes=self.layout.total_bytes,
        )

    def give_up(self) -> None:
        """Let its threads end; any thread may call it."""
        self.given_up.set()
        self.member.store.close()
        if self.group is not None:
            self.group.close()
        self.parts.close()


class Receiver:
    """Stages the publishes of one learner incarnation after another."""

    def __init__(
        self,
        group_factory: GroupFactory = open_group,
        allocate: Callable[[int], torch.Tensor] = flat_buffer.buffer,
        device: torch.device | None = None,
    ) -> None:
        """`allocate(n)` gives a zeroed [n] uint8 buffer. On `device` are those for a learner that has its own there."""
        self._group_factory = group_factory
        self._allocate = allocate
        self._device = device
        self._lock = threading.Lock()
        self.layout: Layout | None = None  # the learner's, from Welcome
        self._password = ""
        self._member: _Membership | None = None  # in the group of the newest epoch
        self._transfer: _Transfer | None = None  # the newest
        self._buffer = StagingBuffer()
        self._frozen = FrozenWeights()
        self._server: RelayServer | None = None  # serves what arrives and what the staging buffer contains
        self._status = StagingStatus()

    @property
    def status(self) -> StagingStatus:
        with self._lock:
            stalls = self._transfer.parts.stalls if self._transfer is not None else {}
            entries = dict(self._member.entries) if self._member is not None else {}
            return msgspec.structs.replace(self._status, stalls=stalls, entries=entries)

    def handle(self, message: LearnerMessage, node_id: str = "") -> Listening | None:
        """Do what the learner asks for with a message about weights; a Welcome has an answer.

        A publish that does not fit what was announced fails, as `status` shows. Raises ValueError for a message that is
        not about weights.
        """
        with self._lock:
            match message:
                case Welcome():  # a version that was staged before is discarded
                    return self._welcome(message, node_id)
                case Epoch():  # the next publish arrives over its group
                    self._abandon()
                    entries: dict[str, bytes] = {}
                    self._member = _Membership(message, RelayedStore(message.timeout_s, entries.__setitem__), entries)
                case Publish():
                    self._start(message)
                case StoreEntries():
                    if self._member is not None and self._member.epoch.epoch == message.epoch:
                        self._member.store.add_entries(message.entries)
                case Reroute():
                    if self._transfer is not None and self._transfer.publish.epoch == message.epoch:
                        self._transfer.parts.reroute(message.part, message.source)
                case Serve():
                    self._serve(message)
                case _:
                    raise ValueError(f"{type(message).__name__} is nothing for a receiver of weights")
        return None

    def _welcome(self, message: Welcome, node_id: str) -> Listening:
        self._abandon()
        self._withdraw()
        self.layout = message.layout
        self._frozen = self._frozen.welcome(message)
        self._status = StagingStatus()
        self._buffer = StagingBuffer()
        self._password = message.password
        return Listening(node_id, self._listen(message.learner_endpoint))

    def _listen(self, learner_endpoint: str) -> str:
        """Serve other nodes on the interface that leads to the learner; the address, '' where that does not work."""
        if not learner_endpoint:
            return ""
        try:
            interface = local_address(*host_and_port(learner_endpoint))
            server = self._server
            if server is not None and (server.host, server.password) != (interface, self._password):
                server.close()
                self._server = None
            if self._server is None:
                self._server = RelayServer(interface, self._password)
        except (OSError, ValueError, zmq.ZMQError) as error:
            logger.warning("this node cannot serve weights to others: %s", error)
            return ""
        return self._server.address

    def _abandon(self) -> None:
        """Give up the transfer that is under way, and drop the group."""
        if self._member is not None and self._member.group is not None:
            self._member.group.close()
            self._member.group = None
        if self._transfer is not None:
            self._transfer.give_up()
            self._transfer = None

    def _withdraw(self) -> None:
        """The buffer is about to be written: its contents count no more, and no node may fetch them."""
        self._buffer.contents = None
        if self._server is not None:
            self._server.withdraw()

    def _start(self, publish: Publish) -> None:
        try:
            layout, member = self._check(publish)
        except Mismatch as mismatch:
            self._abandon()
            logger.warning("version %d is refused: %s", publish.version, mismatch)
            self._status = StagingStatus(
                state="failed",
                incarnation=publish.incarnation,
                version=publish.version,
                failure=Failure.of(mismatch),
                epoch=publish.epoch,
            )
            return
        self._withdraw()
        group = member.group  # the thread owns group and buffer until it succeeds
        member.group = None
        memory = self._buffer.lend()
        self._abandon()
        parts = PartFetches(publish, self._password)
        self._transfer = _Transfer(
            publish, layout, member, group=group, buffer=memory, parts=parts, frozen=self._frozen
        )
        self._status = self._transfer.status("receiving")
        threading.Thread(target=self._receive, args=(self._transfer,), daemon=True, name="receive-weights").start()

    def _check(self, publish: Publish) -> tuple[Layout, _Membership]:
        """The layout and the group that the version is for; raises Mismatch when it cannot be received."""
        layout, member = self.layout, self._member
        name = f"version {publish.version}"
        if layout is None or layout.digest != publish.layout_digest:
            raise Mismatch(f"{name} has another layout than the one that was announced")
        if member is None or member.epoch.epoch != publish.epoch:
            raise Mismatch(f"{name} is sent to epoch {publish.epoch}, which this node is not in")
        if publish.encoding == "full":
            return layout, member
        if publish.encoding in ADAPTERS:
            self._frozen.check(publish)
            return layout, member
        if publish.encoding != "delta":
            raise Mismatch(f"{name} comes as {publish.encoding!r}, which is not known here")
        base = VersionKey(publish.incarnation, publish.base_version)
        contents = self._buffer.contents
        if self._buffer.free is None or contents != base:
            here = contents and tuple(contents)
            raise Mismatch(f"{name} comes as a delta to {tuple(base)}, the staging buffer has {here}")
        most = sum(delta.largest(part.stop - part.start, delta.BLOCK_BYTES) for part in layout.parts)
        if not 0 < publish.payload_bytes <= most:
            raise Mismatch(f"a delta of {publish.payload_bytes} bytes to {layout.total_bytes}")
        return layout, member

    def take(self, incarnation: int, version: int) -> torch.Tensor:
        """The verified [total_bytes] uint8 buffer, yours until `give_back`; raises ValueError when it is not staged."""
        with self._lock:
            return self._buffer.take(VersionKey(incarnation, version))

    def give_back(self, flat: torch.Tensor) -> None:
        """The buffer from `take`, unchanged; it may be served, and written again."""
        with self._lock:
            self._buffer.give_back(flat, self.layout.total_bytes if self.layout is not None else -1)

    def _serve(self, serve: Serve) -> None:
        """Let other nodes fetch a part of the staging buffer's version; they hear of it if it is not there."""
        memory = self._buffer.free
        here = self._buffer.contents == (serve.incarnation, serve.version)
        in_host = self.layout is not None and self._on_device(self.layout) is None
        if self._server is None or memory is None or not (here and in_host):
            logger.info("version %d is not in host memory; others cannot fetch it here", serve.version)
            return
        self._server.offer(PartBuffer(serve.part, memory))

    def close(self) -> None:
        """Drop the group, abandon what is under way, and stop serving other nodes."""
        with self._lock:
            self._abandon()
            self._member = None
            if self._server is not None:
                self._server.close()

    def _on_device(self, layout: Layout) -> torch.device | None:
        """Where the staging buffer of this learner's versions is; None: in host memory."""
        return self._device if layout.checksums == WORDS else None

    def _new_buffer(self, layout: Layout) -> torch.Tensor:
        """A zeroed [total_bytes] uint8 staging buffer.

        Zeros, not empty: a bucket that never arrives must not be able to look like an older version.
        """
        device = self._on_device(layout)
        if device is None:
            return self._allocate(layout.total_bytes)
        flat = flat_buffer.buffer(layout.total_bytes, device)
        flat_buffer.finish(flat)
        return flat

    def _receive(self, transfer: _Transfer) -> None:
        """The thread of a transfer: receive the payload, make the version of it, and verify that.

        Its work on a device does not wait for the engine's.
        """
        publish, layout = transfer.publish, transfer.layout
        base = transfer.buffer if transfer.is_delta else None  # None as soon as it is changed
        frozen = transfer.frozen
        try:
            with own_stream(self._on_device(layout), "receive"):
                flat = transfer.buffer if transfer.buffer is not None else self._new_buffer(layout)
                apart = transfer.apart or (transfer.relayed and self._on_device(layout) is not None)
                payload = flat_buffer.buffer(publish.payload_bytes) if apart else flat
                self._receive_payload(transfer, payload)
                if transfer.is_delta:
                    base = None
                    apply_deltas(publish, payload, layout, flat)
                elif transfer.apart:
                    frozen.merge(publish, payload, flat, transfer.given_up.is_set)
                elif apart:
                    flat.copy_(payload)
                if apart:  # else its pieces or buckets were verified where they are
                    check_version(publish, layout, flat)
                frozen.keep(publish, flat)
        except Exception as error:  # any failure means that the version did not arrive; the learner gets the reason
            if isinstance(error, torch.OutOfMemoryError):
                self._device = None  # the next attempt uses host memory
            self._fail(transfer, Failure.of(error), base)
            return
        with self._lock:
            if transfer is self._transfer:
                self._transfer = None
                transfer.member.group = transfer.group
                self._buffer.stage(transfer.version, flat)
                self._status = transfer.status("staged", time.perf_counter() - transfer.started)

    def _receive_payload(self, transfer: _Transfer, payload: torch.Tensor) -> None:
        def note(share: float) -> None:
            with self._lock:
                if transfer is self._transfer:
                    self._status = transfer.status("receiving", share=share)

        if transfer.relayed:
            transfer.parts.run(payload, self._server, note)
        else:
            group = self._join_group(transfer)
            receive_buckets(group, payload, transfer.publish, note, kind=transfer.layout.checksums)

    def _join_group(self, transfer: _Transfer) -> BroadcastGroup:
        """The transfer's group, formed if there is none yet."""
        formed = transfer.group
        if formed is None:
            formed = self._group_factory(transfer.member.epoch, transfer.member.store)
        with self._lock:
            transfer.group = formed  # later calls may close it from now on
            if transfer is not self._transfer:
                raise GivenUp("given up for another transfer")
        return formed

    def _fail(self, transfer: _Transfer, failure: Failure, base: torch.Tensor | None) -> None:
        """Note the failure of a transfer; `base`: its memory, if that still has the base of the delta."""
        logger.warning("version %d did not arrive: %s", transfer.publish.version, failure.text)
        with self._lock:
            if transfer is self._transfer:
                if base is not None:
                    contents = VersionKey(transfer.publish.incarnation, transfer.publish.base_version)
                    self._buffer.restore(base, contents)
                self._transfer = None
                self._status = transfer.status("failed", failure=failure)
            transfer.give_up()


def apply_deltas(publish: Publish, payload: torch.Tensor, layout: Layout, flat: torch.Tensor) -> None:
    """Change the base in `flat` into the version; over the relay every source has a delta of its own."""
    streams = [payload[part.start : part.start + part.size] for part in publish.parts] or [payload]
    for stream, where in zip(streams, layout.parts, strict=True):
        delta.apply(stream, flat[where], delta.BLOCK_BYTES)


def check_version(publish: Publish, layout: Layout, flat: torch.Tensor) -> None:
    """Raises Damaged when the whole version is not the published one, Mismatch when adapters give another one."""
    found = flat_buffer.version_checksum(flat, layout)
    if found != publish.checksum and publish.encoding in ADAPTERS:
        raise Mismatch(f"the adapters beside the frozen weights give {found}, published was {publish.checksum}")
    if found != publish.checksum:
        delta_from = publish.base_version if publish.encoding == "delta" else None
        what = "arrived:" if delta_from is None else f"the delta from version {delta_from} gives"
        raise Damaged(f"{what} {found}, published was {publish.checksum}")


def receive_buckets(
    group: BroadcastGroup,
    flat: torch.Tensor,
    publish: Publish,
    note: Callable[[float], None] = lambda _: None,
    kind: str = XXH3,
) -> None:
    """All buckets of `publish` into `flat` [payload_bytes] uint8, verified against its checksums, which are of `kind`.

    `note` is called after every bucket with the share of them that arrived, 0 to 1. Raises as `in_turn`, and Damaged,
    which names the bucket, when other bytes arrived than were sent.
    """
    checksums = publish.bucket_checksums
    count = -(-len(flat) // publish.bucket_bytes)
    if len(checksums) != count:
        raise Mismatch(f"{len(checksums)} checksums for {count} buckets")
    bad: list[int] = []
    arriving = in_turn(group, flat, publish.bucket_bytes, publish.timeout_s)
    for i, (bucket, expected) in enumerate(zip(arriving, checksums, strict=True)):
        if flat_buffer.checksum(bucket, kind) != expected:
            bad.append(i)  # receive to the end, because the other members of the group still do
        note((i + 1) / count)
    if bad:
        raise Damaged(f"checksum mismatch in bucket {', '.join(map(str, bad))} of {count}")
