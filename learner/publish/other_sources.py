"""The other ranks of the learner that send parts of their own, as the lead's control thread sees them."""

import logging
import math
import time
from collections.abc import Callable, Collection

import msgspec

from common.weights.messages import Keep, LearnerMessage, Offering, Seal, SourceMessage
from learner.publish.snapshot import Payload, Snapshot

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0  # for a part, before the log says who has not offered it
SEAL_S = 1.0  # between two requests for the same part: connections may lose one


class Lead(msgspec.Struct, frozen=True):
    """The control endpoint, its incarnation, and the password of all servers of parts."""

    address: str
    incarnation: int
    password: str


class OtherSources:
    """Used by the control thread. A version is whole when every source has its part of it."""

    def __init__(self, incarnation: int, send: Callable[[bytes, LearnerMessage], object]) -> None:
        self._incarnation, self._send = incarnation, send
        self.count = 0  # how many sources there are beside the lead
        self._connections: dict[int, bytes] = {}  # by source number
        self._offered: dict[int, dict[int, Offering]] = {}  # by version and source number
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
        if isinstance(message, Offering):
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
                    payload.add_part(message.number, message.part)

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
        found, self._waiting = self._waiting[:end], self._waiting[end:]
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
                self._send(self._connections[number], Seal(version, payload.base_version, piece_bytes))

    def keep(self, versions: set[int]) -> None:
        """These versions are needed; older ones are forgotten."""
        if versions != self._needed:
            self._needed = versions
            self._offered = {v: found for v, found in self._offered.items() if v >= max(versions)}
            for identity in self._connections.values():
                self._send(identity, Keep(sorted(versions)))
