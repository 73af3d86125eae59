"""Fetches of single nodes: from the learner's own relay server, or from a node that holds the version.

A peer is asked first (Serve), so that the learner's link stays free. If it refuses, is silent for PEER_WAIT_S, or the
fetch from it fails, the learner serves the node itself. What a node fetched is verified against the learner's
checksums, and where the fleet has keys also against a SHA-256, which a peer cannot forge.
"""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from common.weights.messages import Serve, Serving, Source
from common.weights.transports.relay_server import RelayServer
from learner.publish.receivers import Member
from learner.publish.snapshot import Snapshot
from learner.publish.transfer import Transfer

PEER_WAIT_S = 1.0  # for a peer's answer
PEER_FETCHES = 2  # that one node serves at a time


@dataclass
class Fetch:
    """A relayed transfer: the payload's name at its source, and the keys made for it ('' without credentials)."""

    transfer: Transfer
    key: str
    public: str = ""
    secret: str = ""
    peer: Member | None = None


class Relays:
    """Used by the control thread."""

    def __init__(self, host: str, secured: bool, reach: str, timeout_s: float) -> None:
        """`reach`: the control endpoint's HOST:PORT. The server starts with the first fetch from the learner."""
        self._host, self._secured, self._reach, self._timeout_s = host, secured, reach, timeout_s
        self._server: RelayServer | None = None
        self._fetches: dict[int, Fetch] = {}  # by epoch

    def peer_for(self, member: Member, everyone: Iterable[Member], snapshot: Snapshot) -> Member | None:
        """The least busy node that could serve `snapshot` to `member`; None: the learner must."""
        fit = [
            m
            for m in everyone
            if m.settled and m.version == snapshot.version and m.transfer is None and m is not member
            and "relay" in m.transports and not m.poor_source and m.quarantined is None and m.serving < PEER_FETCHES
        ]  # fmt: skip
        if not fit:
            return None
        if self._secured and not snapshot.sha256:
            snapshot.hash_behind()  # ready for those who come next
            return None
        return min(fit, key=lambda m: m.serving)

    def ask(self, transfer: Transfer, incarnation: int, peer: Member) -> Serve:
        """What to ask `peer`, so that the transfer's node may fetch from it."""
        fetch = Fetch(transfer, secrets.token_hex(8), peer=peer)
        if self._secured:
            fetch.public, fetch.secret = (k.decode() for k in zmq.curve_keypair())
        self._fetches[transfer.epoch.epoch] = fetch
        peer.serving += 1
        transfer.peer, transfer.peer_until = peer.identity, time.perf_counter() + min(PEER_WAIT_S, self._timeout_s / 8)
        version = transfer.snapshot.version
        return Serve(incarnation, version, fetch.key, self._timeout_s, self._reach, fetch.public)

    def answered(self, peer: Member, answer: Serving) -> tuple[Transfer, Source | None] | None:
        """The transfer that was waiting for this answer, and its source if there is one; None: nobody waits."""
        for fetch in self._fetches.values():
            if fetch.key == answer.key and fetch.peer is peer and fetch.transfer.peer_until is not None:
                usable = answer.address.startswith("tcp://") and bool(answer.public) == self._secured
                found = Source(answer.address, fetch.key, answer.public, fetch.public, fetch.secret)
                return fetch.transfer, found if usable else None
        return None

    def own_source(self, transfer: Transfer) -> Source:
        """Serve the transfer from here; raises zmq.ZMQError when no port can be bound."""
        self.over(transfer)
        if self._server is None:
            self._server = RelayServer(self._host, self._secured)
        fetch = Fetch(transfer, secrets.token_hex(8))
        self._fetches[transfer.epoch.epoch] = fetch
        transfer.peer = None
        return self._server.source(fetch.key, transfer.payload.flat, 2 * self._timeout_s)

    def over(self, transfer: Transfer) -> None:
        """The transfer ended or goes another way: hand out nothing more for it."""
        fetch = self._fetches.pop(transfer.epoch.epoch, None)
        if fetch is None:
            return
        if fetch.peer is not None:
            fetch.peer.serving -= 1
            fetch.peer.poor_source |= transfer.failed_at is not None
        elif self._server is not None:
            self._server.withdraw(fetch.key)

    def close(self) -> None:
        """Serve nobody any more."""
        if self._server is not None:
            self._server.close()
