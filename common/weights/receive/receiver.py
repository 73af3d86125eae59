"""The receiving side of a publish: threads write it into a staging buffer and verify every piece of it.

One Receiver serves one process that has a copy of the weights. It never blocks its caller. A new epoch or a new
publish abandons the running transfer. Its threads then touch only their own buffer. Pieces from the relay are
passed on while the next arrive. After a flip the staging buffer still contains the version, and other nodes may fetch
it until the next version comes.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch
import zmq

from common.process.local_address import host_and_port, local_address
from common.weights.transports.groups import Group, GroupFactory, RelayedStore, in_turn, open_group, reason_of
from common.weights.transports.relay import Fetch, RelayServer, Stall
from common.weights.wire import delta, flat_buffer
from common.weights.wire.layout import WORDS, XXH3, Layout
from common.weights.wire.messages import (
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


class PartFetches:
    """`run` in one thread; the rest from any."""

    def __init__(self, publish: Publish, password: str) -> None:
        self._publish, self._password = publish, password
        self._lock = threading.Lock()
        self._fetches: list[Fetch] = []
        self._sources = list(publish.sources)
        self._closed = False

    @property
    def stalls(self) -> dict[int, Stall]:
        """The parts that wait for another source."""
        return {number: stall for number, fetch in enumerate(self._fetches) if (stall := fetch.stall) is not None}

    def run(self, payload: torch.Tensor, server: RelayServer | None, note_share: Callable[[float], None]) -> None:
        """Every part into `payload` [n] uint8, while `server` lets other nodes fetch what is here already.

        `note_share` is called with the share that arrived, 0 to 1. Raises ValueError when the parts are not the
        payload, RuntimeError when it was closed or did not arrive in time.
        """
        check_parts(self._publish, payload.numel())
        buffers = [PartBuffer(part, payload, arrived=0) for part in self._publish.parts]
        with self._lock:
            if self._closed:
                raise RuntimeError("given up for another transfer")
            self._fetches = [Fetch(*pair, self._password) for pair in zip(buffers, self._sources, strict=True)]
            for buffer in buffers if server is not None else ():
                server.offer(buffer)  # type: ignore[union-attr]

        def note() -> None:
            note_share(sum(buffer.arrived_bytes for buffer in buffers) / max(payload.numel(), 1))

        def fetch(one: Fetch) -> None:
            try:
                one.run(self._publish.timeout_s, note)
            except BaseException:
                self.close()  # the rest alone is of no use
                raise

        with ThreadPoolExecutor(len(buffers), "fetch-weights") as pool:
            running = [pool.submit(fetch, one) for one in self._fetches]
        failures = [error for one in running if (error := one.exception()) is not None]
        if failures and server is not None:
            server.withdraw(*buffers)
        if failures:
            raise next((error for error in failures if "given up" not in str(error)), failures[0])

    def reroute(self, part: int, source: str) -> None:
        """Fetch the rest of a part from `source`; a part that the publish does not have is ignored."""
        with self._lock:
            if part < len(self._sources):
                self._sources[part] = source
            if part < len(self._fetches):
                self._fetches[part].reroute(source)

    def close(self) -> None:
        """Let `run` end soon."""
        with self._lock:
            self._closed = True
            for fetch in self._fetches:
                fetch.close()


def check_parts(publish: Publish, size: int) -> None:
    """Raises ValueError when the parts of `publish` are not the `size` bytes of its payload, each of them once."""
    parts = sorted(publish.parts, key=lambda part: part.start)
    ends = [part.start + part.size for part in parts]
    if len(parts) != len(publish.sources) or [p.start for p in parts] != [0, *ends[:-1]] or ends[-1:] != [size]:
        raise ValueError(f"version {publish.version} comes in parts that are not its {size} bytes")


logger = logging.getLogger(__name__)

State = Literal["idle", "receiving", "staged", "failed"]


class StagingStatus(msgspec.Struct, frozen=True):
    """Where the newest publish stands."""

    state: State = "idle"
    incarnation: int = -1
    version: int = -1
    receive_s: float = 0.0  # from the announcement to the last verified bucket
    error: str = ""
    share: float = 0.0  # the part that arrived, 0 to 1
    epoch: int = -1
    stalls: dict[int, Stall] = {}  # parts that wait for another source
    entries: dict[str, bytes] = {}  # that this node set in the store where the group of `epoch` meets


@dataclass(eq=False)
class _Transfer:
    """One publish on its way here. Its thread discards its result when it is not the receiver's newest any more."""

    publish: Publish
    layout: Layout
    epoch: Epoch
    store: RelayedStore
    group: Group | None  # None until it is formed, and over the relay
    buffer: torch.Tensor | None  # to be written; with the base of a delta in it
    parts: PartFetches  # over the relay
    started: float = field(default_factory=time.perf_counter)

    @property
    def is_delta(self) -> bool:
        return self.publish.encoding == "delta"

    @property
    def relayed(self) -> bool:
        return self.epoch.transport == "relay"

    def status(self, state: State, receive_s: float = 0.0, error: str = "", share: float = 0.0) -> StagingStatus:
        version = self.publish.incarnation, self.publish.version
        return StagingStatus(state, *version, receive_s, error, share, self.epoch.epoch)

    def give_up(self) -> None:
        """Let its threads end; any thread may call it."""
        self.store.close()
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
        self._group_factory, self._allocate, self._device = group_factory, allocate, device
        self._lock = threading.Lock()
        self.layout: Layout | None = None  # the learner's, from Welcome
        self._epoch: Epoch | None = None
        self._store: RelayedStore | None = None  # where the group of self._epoch meets
        self._entries: dict[str, bytes] = {}  # that this node has set there
        self._password = ""
        self._group: Group | None = None  # the group of self._epoch between two transfers
        self._transfer: _Transfer | None = None  # the newest
        self._buffer: torch.Tensor | None = None  # free for reuse: no thread writes into it
        self._staged: tuple[Publish, torch.Tensor] | None = None
        self._taken: tuple[int, int] | None = None  # (incarnation, version) of the buffer that `take` gave away
        self._contents: tuple[int, int] | None = None  # likewise of self._buffer, if whole and proven
        self._server: RelayServer | None = None  # serves what arrives and what the staging buffer contains
        self._status = StagingStatus()

    @property
    def status(self) -> StagingStatus:
        with self._lock:
            stalls = self._transfer.parts.stalls if self._transfer is not None else {}
            return msgspec.structs.replace(self._status, stalls=stalls, entries=dict(self._entries))

    def handle(self, message: LearnerMessage, node_id: str = "") -> Listening | None:
        """Do what the learner asks for with a message about weights; a Welcome has an answer.

        Raises ValueError for another message, and for a publish that does not fit what was announced.
        """
        with self._lock:
            match message:
                case Welcome():  # a version that was staged before is discarded
                    self._abandon()
                    self._withdraw()
                    self.layout, self._status = message.layout, StagingStatus()
                    self._buffer = self._staged = self._taken = None
                    self._password = message.password
                    return Listening(node_id, self._listen(message.learner_endpoint))
                case Epoch():  # the next publish arrives over its group
                    self._abandon()
                    self._epoch, self._entries = message, (entries := dict[str, bytes]())
                    self._store = RelayedStore(message.timeout_s, entries.__setitem__)
                case Publish():
                    self._start(message)
                case StoreEntries():
                    if self._store is not None and self._epoch is not None and self._epoch.epoch == message.epoch:
                        self._store.add_entries(message.entries)
                case Reroute():
                    if self._transfer is not None and self._transfer.epoch.epoch == message.epoch:
                        self._transfer.parts.reroute(message.part, message.source)
                case Serve():
                    self._serve(message)
                case _:
                    raise ValueError(f"{type(message).__name__} is nothing for a receiver of weights")
        return None

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
        if self._group is not None:
            self._group.close()
        if self._transfer is not None:
            self._transfer.give_up()
        self._group = self._transfer = None

    def _withdraw(self) -> None:
        """The buffer is about to be written: its contents count no more, and no node may fetch them."""
        self._contents = None
        if self._server is not None:
            self._server.withdraw()

    def _start(self, publish: Publish) -> None:
        """Begin to receive it."""
        if self.layout is None or self.layout.digest != publish.layout_digest:
            raise ValueError(f"version {publish.version} has another layout than the one that was announced")
        if self._epoch is None or self._store is None or self._epoch.epoch != publish.epoch:
            raise ValueError(f"version {publish.version} is sent to epoch {publish.epoch}, which this node is not in")
        self._check_encoding(publish, self.layout)
        self._withdraw()
        group, self._group = self._group, None  # the thread owns group and buffer until it succeeds
        buffer, self._buffer = self._buffer, None
        if buffer is None and self._staged is not None:
            buffer = self._staged[1]  # a newer version supersedes one that was never applied
        self._staged = None
        self._abandon()
        parts = PartFetches(publish, self._password)
        self._transfer = _Transfer(publish, self.layout, self._epoch, self._store, group, buffer, parts)
        self._status = self._transfer.status("receiving")
        threading.Thread(target=self._receive, args=(self._transfer,), daemon=True, name="receive-weights").start()

    def _check_encoding(self, publish: Publish, layout: Layout) -> None:
        """Raises ValueError when it is unknown, or a delta to a base that the buffer does not contain."""
        if publish.encoding == "full":
            return
        if publish.encoding != "delta":
            raise ValueError(f"version {publish.version} comes as {publish.encoding!r}, which is not known here")
        base = (publish.incarnation, publish.base_version)
        if self._buffer is None or self._contents != base:
            has = f"the staging buffer has {self._contents}"
            raise ValueError(f"version {publish.version} comes as a delta to {base}, {has}")
        most = sum(delta.largest(part.stop - part.start, delta.BUCKET_BYTES) for part in layout.parts)
        if not 0 < publish.payload_bytes <= most:
            raise ValueError(f"a delta of {publish.payload_bytes} bytes to {layout.total_bytes}")

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
            if self.layout is not None and flat.numel() == self.layout.total_bytes:
                self._buffer, self._contents = flat, self._taken
            self._taken = None

    def _serve(self, serve: Serve) -> None:
        """Let other nodes fetch a part of the staging buffer's version; they hear of it if it is not there."""
        here = self._contents == (serve.incarnation, serve.version)
        in_host = self.layout is not None and self._on_device(self.layout) is None
        if self._server is None or self._buffer is None or not (here and in_host):
            logger.info("version %d is not in host memory; others cannot fetch it here", serve.version)
            return
        self._server.offer(PartBuffer(serve.part, self._buffer))

    def close(self) -> None:
        """Drop the group, abandon what is under way, and stop serving other nodes."""
        with self._lock:
            self._abandon()
            self._epoch = None
            if self._server is not None:
                self._server.close()

    def _on_device(self, layout: Layout) -> torch.device | None:
        """Where the staging buffer of this learner's versions is; None: in host memory."""
        return self._device if layout.checksums == WORDS else None

    def _new_buffer(self, layout: Layout) -> torch.Tensor:
        """A zeroed [total_bytes] uint8 staging buffer."""
        device = self._on_device(layout)
        if device is None:
            return self._allocate(layout.total_bytes)
        flat = flat_buffer.buffer(layout.total_bytes, device)
        flat_buffer.finish(flat)
        return flat

    def _receive(self, transfer: _Transfer) -> None:
        publish = transfer.publish
        base = transfer.buffer if transfer.is_delta else None  # None as soon as it is changed
        try:
            # Zeros, not empty: a bucket that never arrives must not be able to look like an older version.
            flat = transfer.buffer if transfer.buffer is not None else self._new_buffer(transfer.layout)
            apart = transfer.is_delta or (transfer.relayed and self._on_device(transfer.layout) is not None)
            payload = flat_buffer.buffer(publish.payload_bytes) if apart else flat
            if transfer.relayed:
                transfer.parts.run(payload, self._server, lambda share: self._note_share(transfer, share))
            else:
                group = self._join_group(transfer)
                kind = transfer.layout.checksums
                receive_buckets(group, payload, publish, lambda share: self._note_share(transfer, share), kind)
            if transfer.is_delta:
                base = None
                self._apply(transfer, payload, flat)
            elif apart:
                flat.copy_(payload)
            if transfer.is_delta or transfer.relayed:
                found = flat_buffer.version_checksum(flat, transfer.layout)
                if found != publish.checksum:
                    what = f"the delta from version {publish.base_version} gives" if transfer.is_delta else "arrived:"
                    raise ValueError(f"{what} {found}, published was {publish.checksum}")
        except Exception as error:  # any failure means that the version did not arrive; the learner gets the reason
            if isinstance(error, torch.OutOfMemoryError):
                self._device = None  # the next attempt uses host memory
            self._fail(transfer, reason_of(error), base)
            return
        with self._lock:
            if transfer is self._transfer:
                self._group, self._transfer, self._staged = transfer.group, None, (publish, flat)
                self._status = transfer.status("staged", time.perf_counter() - transfer.started)
            elif transfer.group is not None:
                transfer.group.close()

    def _apply(self, transfer: _Transfer, payload: torch.Tensor, flat: torch.Tensor) -> None:
        """Change the base in `flat` into the version; over the relay every source has a delta of its own."""
        streams = [payload[part.start : part.start + part.size] for part in transfer.publish.parts] or [payload]
        for stream, where in zip(streams, transfer.layout.parts, strict=True):
            delta.apply(stream, flat[where], delta.BUCKET_BYTES)

    def _join_group(self, transfer: _Transfer) -> Group:
        """The transfer's group, formed if there is none yet."""
        formed = transfer.group if transfer.group is not None else self._group_factory(transfer.epoch, transfer.store)
        with self._lock:
            transfer.group = formed  # later calls may close it from now on
            if transfer is not self._transfer:
                raise RuntimeError("given up for another transfer")
        return formed

    def _note_share(self, transfer: _Transfer, share: float) -> None:
        with self._lock:
            if transfer is self._transfer:
                self._status = transfer.status("receiving", share=share)

    def _fail(self, transfer: _Transfer, reason: str, base: torch.Tensor | None) -> None:
        logger.warning("version %d did not arrive: %s", transfer.publish.version, reason)
        with self._lock:
            if transfer is self._transfer:
                if base is not None:
                    self._buffer = base
                    self._contents = (transfer.publish.incarnation, transfer.publish.base_version)
                self._transfer, self._status = None, transfer.status("failed", error=reason.split("\n")[0])
            transfer.give_up()


def receive_buckets(
    group: Group, flat: torch.Tensor, publish: Publish, note: Callable[[float], None] = lambda _: None, kind: str = XXH3
) -> None:
    """All buckets of `publish` into `flat` [payload_bytes] uint8, verified against its checksums, which are of `kind`.

    `note` is called after every bucket with the share of them that arrived, 0 to 1. Raises as `in_turn`, and
    ValueError, which names the bucket, when other bytes arrived than were sent.
    """
    checksums, count = publish.bucket_checksums, -(-len(flat) // publish.bucket_bytes)
    if len(checksums) != count:
        raise ValueError(f"{len(checksums)} checksums for {count} buckets")
    bad: list[int] = []
    arriving = in_turn(group, flat, publish.bucket_bytes, publish.timeout_s)
    for i, (bucket, expected) in enumerate(zip(arriving, checksums, strict=True)):
        if flat_buffer.checksum(bucket, kind) != expected:
            bad.append(i)  # receive to the end, because the other members of the group still do
        note((i + 1) / count)
    if bad:
        raise ValueError(f"checksum mismatch in bucket {', '.join(map(str, bad))} of {count}")
