"""Ranks of the learner that send parts of their own, each from its machine: as the lead sees them, and such a rank.

On such a rank the training thread copies a version, as on the lead. The source's thread computes checksums and deltas,
and tells the lead's control socket. It makes the parts that nodes fetch, and serves them until the lead says that no
node does.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable

import msgspec
import zmq
from torch import Tensor

from common.config.schema import WeightsConfig
from common.errors import SlipstreamError
from common.process.local_address import needs_ipv6
from common.process.wake import Wake
from common.security.credentials import load_credential
from common.security.curve import secure_client
from common.weights.source.snapshot import Deltas, Payload, Snapshot, SnapshotMaker, TensorSpecs
from common.weights.transports.relay import RelayServer
from common.weights.wire import messages
from common.weights.wire.messages import Keep, LearnerMessage, PartReady, PartSealed, SealPart, SourceMessage
from common.weights.wire.pieces import PartBuffer, new_part

logger = logging.getLogger(__name__)

LOOK_MS = 1000
OFFER_S = 1.0  # between two announcements that a part is ready: connections may lose one
PATIENCE_S = 10.0  # for a part, before the log says who has not offered it
SEAL_S = 1.0  # between two requests for the same part: connections may lose one


class LeadEndpoint(msgspec.Struct, frozen=True):
    """The lead's control socket, for the ranks that send parts of their own."""

    address: str
    incarnation: int
    password: str  # all servers of parts ask for it


class OtherSources:
    """Used by the control thread. A version is whole when every source has its part of it."""

    def __init__(self, incarnation: int, send: Callable[[bytes, LearnerMessage], object]) -> None:
        self._incarnation = incarnation
        self._send = send
        self.count = 0  # how many sources there are beside the lead
        self._connections: dict[int, bytes] = {}  # by source number
        self._offered: dict[int, dict[int, PartReady]] = {}  # by version and source number
        self._waiting: list[Snapshot] = []  # newer than the newest whole one, in order
        self._needed: set[int] = set()  # versions
        self._asked: dict[int, float] = {}  # by source number: when it was asked for its part of the newest payload
        self._warned: Snapshot | None = None

    def add(self, snapshot: Snapshot) -> None:
        """The lead has its own part of a version."""
        self._waiting.append(snapshot)

    def hear(self, identity: bytes, message: SourceMessage, current: Snapshot | None) -> None:
        """A message of a source. Raises RuntimeError when the source has failed."""
        if message.incarnation != self._incarnation:
            return
        if isinstance(message, PartReady):
            self._connections[message.number] = identity
            if message.version >= max(self._needed, default=0):
                self._offered.setdefault(message.version, {})[message.number] = message
            if self._needed:
                self._send(identity, Keep(sorted(self._needed)))
        elif self._connections.get(message.number) == identity:
            if message.part is None:
                raise RuntimeError(f"source {message.number} cannot send weights: {message.reason}")
            if current is not None and current.version == message.version:
                payload = current.full if message.base < 0 else current.deltas.get(message.base)
                if payload is not None and message.number in payload.elsewhere:
                    payload.add_parts(message.number, [message.part])

    def whole(self, wanted: Collection[int] = ()) -> list[Snapshot]:
        """The versions up to the newest that became whole; older ones are superseded, whole or not.

        None goes before a `wanted` version that is not whole.
        """
        missing = [s.version for s in self._waiting if len(self._offered.get(s.version, {})) < self.count]
        first = min((version for version in missing if version in wanted), default=math.inf)
        ends = [n for n, s in enumerate(self._waiting, 1) if s.version not in missing and s.version < first]
        if self._waiting and not ends:
            self._warn(self._waiting[0])
        end = ends[-1] if ends else 0
        found = self._waiting[:end]
        self._waiting = self._waiting[end:]
        for snapshot in found:
            offered = self._offered.get(snapshot.version, {})
            snapshot.whole = len(offered) >= self.count
            if snapshot.whole and self.count:
                snapshot.add_parts([one for _, one in sorted(offered.items())])
        return found

    def _warn(self, snapshot: Snapshot) -> None:
        """Say once which sources have not offered their part."""
        if self._warned is not snapshot and time.perf_counter() - snapshot.started > PATIENCE_S:
            self._warned = snapshot
            missing = set(range(1, self.count + 1)) - self._offered.get(snapshot.version, {}).keys()
            logger.warning("version %d waits for the parts of sources %s", snapshot.version, sorted(missing))

    def seal(self, version: int, payload: Payload, piece_bytes: int) -> None:
        """Let those make their parts of a payload that have not; call it until all have."""
        now = time.perf_counter()
        for number in payload.elsewhere.keys() - payload.sealed.keys():
            if not payload.sealing or now - self._asked.get(number, 0.0) > SEAL_S:
                self._asked[number] = now
                self._send(self._connections[number], SealPart(version, payload.base_version, piece_bytes))

    def keep(self, versions: set[int]) -> None:
        """These versions are needed; older ones are forgotten."""
        if versions != self._needed:
            self._needed = versions
            self._offered = {v: found for v, found in self._offered.items() if v >= max(versions)}
            for identity in self._connections.values():
                self._send(identity, Keep(sorted(versions)))


class RemoteSource:
    """Source `number`, from 1 on; the lead is source 0."""

    def __init__(
        self,
        number: int,
        parts: list[TensorSpecs],
        lead: LeadEndpoint,
        *,
        dtype: str,
        weights: WeightsConfig,
        credentials: str | None = None,
    ) -> None:
        """`parts`: names and shapes of all sources' tensors.

        It serves on `weights.address`. Raises zmq.ZMQError, or UsageError when the learner's keys cannot be read.
        """
        self._number = number
        self._incarnation = lead.incarnation
        self._secured = credentials is not None
        self._maker = SnapshotMaker(dtype)
        self._deltas = Deltas(weights.encoding, weights.anchor_every)
        self._maker.share(parts, number)
        self._server = RelayServer(weights.address, lead.password)
        self._snapshots: dict[int, Snapshot] = {}
        self._served: dict[tuple[int, int], PartBuffer] = {}  # by version and base
        self._copied: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        self._wake = Wake()
        self._error = ""
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(needs_ipv6(lead.address)))
        if credentials is not None:
            keys = load_credential(credentials, "learner")
            secure_client(self._socket, keys, keys.learner_public)
        self._socket.connect(lead.address)
        self._thread = threading.Thread(target=self._run, daemon=True, name="weight-source")
        self._thread.start()

    def publish(self, version: int, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's part of a version; returns when the parameters may change again.

        Raises SlipstreamError when an earlier version could not be sent, ValueError as `WeightPublisher.publish`.
        """
        snapshot = self._maker.make(version, named, None)
        if self._error:
            raise SlipstreamError(self._error)
        self._copied.put(snapshot)
        self._wake.send()

    def close(self) -> None:
        self._closing = True
        self._wake.send()
        self._thread.join(5)

    def _run(self) -> None:
        poller = zmq.Poller()
        said = time.monotonic()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        try:
            while not self._closing:
                if time.monotonic() - said > OFFER_S:
                    said = time.monotonic()
                    for snapshot in self._snapshots.values():
                        self._offer(snapshot)
                if self._socket in dict(poller.poll(LOOK_MS)):
                    self._handle(messages.decode_from_learner(self._socket.recv()))
                self._wake.drain()
                while not self._copied.empty():
                    snapshot = self._copied.get()
                    self._deltas.prepare(snapshot, bucket_bytes=0)  # only pieces of it travel
                    self._snapshots[snapshot.version] = snapshot
                    self._offer(snapshot)
        except Exception as error:
            logger.exception("source %d of weights stopped", self._number)
            self._error = f"source {self._number} of weights stopped: {error!r}"
            self._say(PartSealed(self._number, self._incarnation, version=-1, base=-1, reason=self._error[:500]))
        finally:
            self._server.close()
            self._socket.close(linger=1000)
            self._context.term()

    def _offer(self, snapshot: Snapshot) -> None:
        sizes = {base: delta.flat.numel() for base, delta in snapshot.deltas.items()} | {-1: snapshot.flat.numel()}
        self._say(PartReady(self._number, self._incarnation, snapshot.version, snapshot.checksum, sizes))

    def _say(self, message: messages.SourceMessage) -> None:
        with contextlib.suppress(zmq.Again):  # the lead reads nothing; it hears of it later
            self._socket.send(messages.encode(message), zmq.NOBLOCK)

    def _handle(self, message: messages.LearnerMessage) -> None:
        if isinstance(message, SealPart) and message.version in self._snapshots:
            key = message.version, message.base
            if key not in self._served:
                self._served[key] = self._seal(self._snapshots[message.version], message)
            part = self._served[key].part
            self._say(PartSealed(self._number, self._incarnation, message.version, base=message.base, part=part))
        elif isinstance(message, Keep):
            for version in [v for v in self._snapshots if v < max(message.versions) and v not in message.versions]:
                for key in [key for key in self._served if key[0] == version]:
                    self._server.withdraw(self._served.pop(key))
                del self._snapshots[version]  # last: its buffer may be written from here on
        elif isinstance(message, messages.Eject):
            raise SlipstreamError(f"the lead refuses this source: {message.reason}")

    def _seal(self, snapshot: Snapshot, asked: SealPart) -> PartBuffer:
        """Make the part of a payload that travels, and serve it."""
        payload = snapshot.full if asked.base < 0 else snapshot.deltas[asked.base]
        snapshot.sent = True
        part = new_part(
            payload.flat,
            0,
            payload.flat.numel(),
            piece=asked.piece_bytes,
            origin=self._server.address,
            secured=self._secured,
        )
        buffer = PartBuffer(part, payload.flat)
        self._server.offer(buffer)
        return buffer
