"""Checks every request between the broker's socket and its handlers: who sends it, and how often; logs refusals."""

import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from broker import wire
from broker.contract import LEDGER_LINES
from broker.delivery.state import DeliveryState
from broker.server import flood_guard
from broker.server.flood_guard import FloodGuard, TokenBucket
from common.security.credentials import Identity, belongs_to, load_server
from common.security.curve import CurveGate, KeyRing

logger = logging.getLogger(__name__)

ROLES = ("learner", "observer", "node", "broker")
REPLY_BYTES_A_SECOND = 256 << 20  # to all observers together, because replies that are not read fill the memory
REPLY_BURST_BYTES = 512 << 20
LEDGER_ENTRY_BYTES = 128  # estimates of a reply
NODE_BYTES = 1024
EVENTS_BYTES = 1 << 20
LOGGED_A_MINUTE = 20
KEPT_MESSAGES = 32  # in RUN/quarantine, by all brokers of the run together
KEPT_BYTES = 64 << 10  # longer headers are cut
PERMITTED: dict[str, tuple[type[wire.Request[Any]], ...]] = {
    "learner": (wire.LearnerRequest, wire.ObserverRequest, wire.Gather, wire.Stop, wire.SetWeights),
    "node": (wire.NodeRequest, wire.AskStatus),
    "observer": (wire.ObserverRequest,),
    "broker": (wire.ObserverRequest,),  # another broker process of the run, which asks whether this one is alive
}


class Denied(wire.WireError):
    """A request that its sender may not send."""


class RateLimited(wire.WireError):
    """A request that its sender must repeat later."""


class KeptMessage(msgspec.Struct, frozen=True):
    """RUN/quarantine/N.json, beside the first bytes of the header in N.bin."""

    time_s: float
    client: str
    reason: str
    header_bytes: int
    payloads: int


class RejectionLog:
    """Counts refused messages in `state`, logs them at a bounded rate and keeps the first that did not decode."""

    def __init__(self, state: DeliveryState, quarantine: Path | None = None) -> None:
        self._state = state
        self._folder = quarantine
        numbers = [file.stem for file in quarantine.glob("*.json")] if quarantine is not None else []
        self._newest = max((int(number) for number in numbers if number.isdigit()), default=0)
        self._lines = TokenBucket(LOGGED_A_MINUTE / 60, LOGGED_A_MINUTE, state.clock)
        self._silent = 0

    def note(self, client: bytes, error: wire.WireError, header: bytes, payloads: int) -> None:
        counts = self._state.rejected
        counts.refused += 1
        who = anonymous(client)
        if isinstance(error, Denied):
            counts.denied += 1
        elif self._folder is not None and self._newest < KEPT_MESSAGES:
            self._newest += 1
            counts.kept += 1
            self._keep(self._folder, KeptMessage(time.time(), who, str(error), len(header), payloads), header)
        if not self._lines.spend(1):
            self._silent += 1
            return
        if self._silent:
            logger.warning("%d more refused messages were not logged one by one", self._silent)
            self._silent = 0
        reason = str(error)[:500]
        logger.warning("refused message %d from %s: %s", counts.refused, who, reason)
        self._state.event_log.add("refused_message", client=who, reason=reason, count=counts.refused)

    def _keep(self, folder: Path, about: KeptMessage, header: bytes) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self._newest}.bin").write_bytes(header[:KEPT_BYTES])
            (folder / f"{self._newest}.json").write_bytes(msgspec.json.encode(about))
        except OSError as error:
            logger.error("a refused message could not be kept: %s", error)


class RequestGuard:
    """The checks of one broker. Without credentials every sender may send everything, on a loopback address.

    `context` is that of the broker's socket, `credentials` a key folder, `quarantine` a folder for refused messages.
    Raises UsageError when the broker's keys or the list of allowed ones cannot be read.
    """

    def __init__(
        self, context: zmq.Context[Any], state: DeliveryState, credentials: str | None, quarantine: Path | None
    ) -> None:
        self.rejections = RejectionLog(state, quarantine)
        self.curve: CurveGate | None = None
        self._ring: KeyRing | None = None
        self._state = state
        self._replies = TokenBucket(REPLY_BYTES_A_SECOND, REPLY_BURST_BYTES)
        self._floods: FloodGuard | None = None
        if credentials is not None:
            keys = load_server(credentials)
            self._ring = KeyRing(credentials, ROLES)
            self.curve = CurveGate(context, keys, self._ring)

    def watch(self, router: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
        """Begin to cut connections that flood the broker. Call it right after the socket was bound."""
        allowed = max(flood_guard.UNEXPLAINED_BYTES, 2 * max_message_bytes)
        self._floods = FloodGuard(router, allowed, max_message_bytes)

    def receive(self, router: "zmq.Socket[bytes]") -> tuple[bytes, Identity | None]:
        """Read the first frame of the next message: its connection and its sender. Raises zmq.Again."""
        alert = self._floods is not None and self._floods.alert
        if self._ring is None and not alert:
            return router.recv(zmq.NOBLOCK), None
        frame = router.recv(zmq.NOBLOCK, copy=False)
        if alert and self._floods is not None:
            self._floods.heard(frame)
        return frame.bytes, self._ring.sender(frame) if self._ring is not None else None

    def check(self, sender: Identity | None, request: wire.AnyRequest) -> None:
        """Raise Denied when `sender` may not send this request, RateLimited when it must wait.

        The learner never waits, so that observers cannot delay training.
        """
        reason = refusal(sender, request) if self.curve is not None else ""
        if reason:
            raise Denied(reason, request.id)
        limited = isinstance(request, wire.ObserverRequest) and (sender is None or sender.role != "learner")
        if limited and not self._replies.spend(reply_bytes(request, self._state)):
            raise RateLimited("the broker limits the replies to observers; it answers as soon as it may", request.id)

    def tick(self) -> None:
        """Run about once a second: read added and revoked keys, and check the broker's memory."""
        if self._floods is not None:
            tasks = self._state.tasks
            self._floods.tick(tasks.bytes_in_memory + tasks.history.memory_bytes)
        if self._ring is not None:
            self._ring.refresh()

    def close(self) -> None:
        """Call it after the socket was closed and before the context is."""
        if self._floods is not None:
            self._floods.close()
        if self.curve is not None:
            self.curve.close()


def refusal(sender: Identity | None, request: wire.AnyRequest) -> str:
    """The reason for which `sender` may not send this request; '' when it may.

    A node id begins with the name of its credential, so no node can take, read or end the leases of another one.
    """
    if sender is None:
        return "this key was revoked"
    if not isinstance(request, PERMITTED[sender.role]):
        return f"credential {sender.name!r} has the role {sender.role}, which may not send {type(request).__name__}"
    node_id = request.node if isinstance(request, wire.NodeRequest) else None
    if node_id is None or belongs_to(node_id, sender.name):
        return ""
    return f"credential {sender.name!r} may use the node ids {sender.name} and {sender.name}:ANYTHING, not {node_id!r}"


def reply_bytes(request: wire.AnyRequest, state: DeliveryState) -> int:
    if isinstance(request, wire.AskLedger):
        return LEDGER_ENTRY_BYTES * min(LEDGER_LINES, state.tasks.next_serial)
    if isinstance(request, wire.AskStatus):
        return NODE_BYTES * (len(state.fleet.nodes) + len(state.services.known)) + len(state.run.config)
    return EVENTS_BYTES


def anonymous(client: bytes) -> str:
    """A name for a connection in logs and events. Its real id is secret, because it identifies the connection."""
    return hashlib.blake2b(client, digest_size=6).hexdigest()
