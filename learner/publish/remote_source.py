"""A rank of the learner that sends its own part of the weights, from its own machine, as the lead asks for it.

The training thread copies a version, as on the lead. This source's thread computes checksums and deltas, and tells
the lead's control socket. It makes the parts that nodes fetch, and serves them until the lead says that no node does.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterable

import zmq
from torch import Tensor

from common.config.schema import WeightsConfig
from common.errors import SlipstreamError
from common.process.wake import Wake
from common.security.credentials import load_credential
from common.security.curve import secure_client
from common.weights import messages
from common.weights.messages import Keep, Offering, Seal, Sealed
from common.weights.pieces import Shipment, new_part
from common.weights.transports.relay import RelayServer
from learner.publish.other_sources import Lead
from learner.publish.snapshot import Deltas, Named, Snapshot, SnapshotMaker

logger = logging.getLogger(__name__)

LOOK_MS = 1000
OFFER_S = 1.0  # between two offerings of the same version: connections may lose one


class RemoteSource:
    """Source `number`, from 1 on; the lead is source 0."""

    def __init__(
        self,
        number: int,
        parts: list[Named],
        lead: Lead,
        dtype: str,
        weights: WeightsConfig,
        credentials: str | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        """`parts`: names and shapes of all sources' tensors.

        It serves on `weights.address`. Raises zmq.ZMQError, or UsageError when the learner's keys cannot be read.
        """
        self._number, self._incarnation = number, lead.incarnation
        self._secured, self._bucket_bytes = credentials is not None, bucket_bytes or weights.bucket_mib << 20
        self._maker, self._deltas = SnapshotMaker(dtype), Deltas(weights.encoding, weights.anchor_every)
        self._maker.share(parts, number)
        self._server = RelayServer(weights.address, lead.password)
        self._snapshots: dict[int, Snapshot] = {}
        self._served: dict[tuple[int, int], Shipment] = {}  # by version and base
        self._copied: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        self._wake = Wake()
        self._error = ""
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int("[" in lead.address))
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
        """Serve nothing more."""
        self._closing = True
        self._wake.send()
        self._thread.join(5)

    def _run(self) -> None:
        poller, said = zmq.Poller(), time.monotonic()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        try:
            while not self._closing:
                if time.monotonic() - said > OFFER_S:
                    said = time.monotonic()
                    for snapshot in self._snapshots.values():
                        self._offer(snapshot)
                if self._socket in dict(poller.poll(LOOK_MS)):
                    self._obey(messages.decode_from_learner(self._socket.recv()))
                self._wake.drain()
                while not self._copied.empty():
                    snapshot = self._copied.get()
                    self._deltas.seal(snapshot, self._bucket_bytes)
                    self._snapshots[snapshot.version] = snapshot
                    self._offer(snapshot)
        except Exception as error:
            logger.exception("source %d of weights stopped", self._number)
            self._error = f"source {self._number} of weights stopped: {error!r}"
            self._say(Sealed(self._number, self._incarnation, -1, -1, None, self._error[:500]))
        finally:
            self._server.close()
            self._socket.close(linger=1000)
            self._context.term()

    def _offer(self, snapshot: Snapshot) -> None:
        sizes = {base: delta.flat.numel() for base, delta in snapshot.deltas.items()} | {-1: snapshot.flat.numel()}
        self._say(Offering(self._number, self._incarnation, snapshot.version, snapshot.checksum, sizes))

    def _say(self, message: messages.SourceMessage) -> None:
        with contextlib.suppress(zmq.Again):  # the lead reads nothing; it hears of it later
            self._socket.send(messages.encode(message), zmq.NOBLOCK)

    def _obey(self, message: messages.LearnerMessage) -> None:
        if isinstance(message, Seal) and message.version in self._snapshots:
            key = message.version, message.base
            if key not in self._served:
                self._served[key] = self._seal(self._snapshots[message.version], message.base, message.piece_bytes)
            self._say(Sealed(self._number, self._incarnation, *key, self._served[key].part))
        elif isinstance(message, Keep):
            for version in [v for v in self._snapshots if v < max(message.versions) and v not in message.versions]:
                for key in [key for key in self._served if key[0] == version]:
                    self._server.withdraw(self._served.pop(key))
                del self._snapshots[version]  # last: its buffer may be written from here on
        elif isinstance(message, messages.Eject):
            raise SlipstreamError(f"the lead refuses this source: {message.reason}")

    def _seal(self, snapshot: Snapshot, base: int, piece: int) -> Shipment:
        """Make the part of a payload that travels, and serve it."""
        payload = snapshot.full if base < 0 else snapshot.deltas[base]
        snapshot.sent = True
        part = new_part(payload.flat, 0, payload.flat.numel(), piece, self._server.address, self._secured)
        shipment = Shipment(part, payload.flat)
        self._server.offer(shipment)
        return shipment
