"""Fetches of single nodes: from a peer, a node that has the version, or else from the learner's own relay server.

A peer is asked first (Serve), so that the learner's link stays free. The node verifies the payload against the
learner's checksums. Where the fleet has keys it also compares a SHA-256, which a peer cannot forge.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from common.security.curve import NO_KEYS, Keys, new_keys
from common.weights.messages import Serve, Serving, Source
from common.weights.transports.relay import RelayServer
from learner.publish.attempt import Attempt
from learner.publish.receiver_state import Receiver, State
from learner.publish.snapshot import Snapshot

PEER_FETCHES = 2  # that one node serves at a time


@dataclass(frozen=True)
class Fetching:
    """A relayed attempt: the payload's name at its source, the peer that serves it, and the keys made for it."""

    attempt: Attempt
    key: str
    peer: bytes | None = None
    keys: Keys = NO_KEYS


class Relays:
    """Used by the control thread."""

    def __init__(self, host: str, secured: bool, reach: str) -> None:
        """`reach`: the control endpoint's HOST:PORT. The server starts with the first fetch from the learner."""
        self._host, self._secured, self._reach = host, secured, reach
        self._server: RelayServer | None = None
        self._fetches: dict[int, Fetching] = {}  # by epoch
        self._poor: set[tuple[bytes, int]] = set()  # (peer, version) of fetches that failed

    def peer_for(self, receiver: Receiver, everyone: Iterable[Receiver], snapshot: Snapshot) -> Receiver | None:
        """The least busy node that could serve `snapshot` to `receiver`; None: the learner must."""
        busy = [fetch.peer for fetch in self._fetches.values()]
        fit = [
            r
            for r in everyone
            if r.state is State.IDLE and r.version == snapshot.version and r.identity != receiver.identity
            and "relay" in r.transports and (r.identity, r.version) not in self._poor
            and busy.count(r.identity) < PEER_FETCHES
        ]  # fmt: skip
        if not fit:
            return None
        if self._secured and not snapshot.sha256:
            snapshot.hash_behind()  # for the newcomers after this one
            return None
        return min(fit, key=lambda r: busy.count(r.identity))

    def ask(self, attempt: Attempt, peer: Receiver) -> Serve:
        """The request to `peer` that lets the attempt's node fetch from it."""
        keys = new_keys() if self._secured else NO_KEYS
        fetch, publish = Fetching(attempt, secrets.token_hex(8), peer.identity, keys), attempt.publish
        self._fetches[publish.epoch] = fetch
        return Serve(publish.incarnation, publish.version, fetch.key, publish.timeout_s, self._reach, keys.public)

    def answered(self, peer: bytes, answer: Serving) -> tuple[bytes, Source | None] | None:
        """(the node that `peer` was asked to serve, the source or None if it cannot be used); None: no node waits."""
        for fetch in self._fetches.values():
            if fetch.key == answer.key and fetch.peer == peer:
                usable = answer.address.startswith("tcp://") and bool(answer.public) == self._secured
                found = Source(answer.address, fetch.key, answer.public, fetch.keys.public, fetch.keys.secret)
                return next(iter(fetch.attempt.members)), found if usable else None
        return None

    def own_source(self, attempt: Attempt) -> Source:
        """Serve the attempt from here; raises zmq.ZMQError when no port can be bound."""
        self.over(attempt)
        if self._server is None:
            self._server = RelayServer(self._host, self._secured)
        fetch = Fetching(attempt, secrets.token_hex(8))
        self._fetches[attempt.publish.epoch] = fetch
        return self._server.source(fetch.key, attempt.payload.flat, 2 * attempt.publish.timeout_s)

    def over(self, attempt: Attempt) -> None:
        """The attempt ended or goes another way: serve nothing more for it."""
        fetch = self._fetches.pop(attempt.publish.epoch, None)
        if fetch is None:
            return
        if fetch.peer is None:
            if self._server is not None:
                self._server.withdraw(fetch.key)
        elif attempt.failed:
            self._poor = {(peer, v) for peer, v in self._poor if v == attempt.version}
            self._poor.add((fetch.peer, attempt.version))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
