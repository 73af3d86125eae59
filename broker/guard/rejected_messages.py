"""Counts refused messages, logs them at a bounded rate, and keeps the first ones for inspection."""

import hashlib
import logging
import time
from pathlib import Path

import msgspec

from broker.delivery.state import DeliveryState
from broker.messaging.wire import WireError

logger = logging.getLogger(__name__)

LOGGED_A_MINUTE = 20
KEPT_MESSAGES = 32  # in RUN/quarantine, by all brokers of the run together
KEPT_BYTES = 64 << 10  # longer headers are cut


class Denied(WireError):
    """A request that its sender may not send."""


class Later(WireError):
    """A request that its sender must repeat later."""


class KeptMessage(msgspec.Struct, frozen=True):
    """RUN/quarantine/N.json, beside the first bytes of the header in N.bin."""

    time_s: float
    client: str
    reason: str
    header_bytes: int
    payloads: int


class Refusals:
    """Writes refusals to the counters and events of `state`; `quarantine`: folder for messages that did not decode."""

    def __init__(self, state: DeliveryState, quarantine: Path | None = None) -> None:
        self._state, self._folder = state, quarantine
        numbers = [file.stem for file in quarantine.glob("*.json")] if quarantine is not None else []
        self._kept = max((int(number) for number in numbers if number.isdigit()), default=0)
        self._minute, self._logged, self._silent = 0.0, 0, 0

    def note(self, client: bytes, error: WireError, header: bytes, payloads: int) -> None:
        """Count and log a refusal, and keep the message if it is one of the first that did not decode."""
        self._state.refused_messages += 1
        who = anonymous(client)
        if isinstance(error, Denied):
            self._state.denied_requests += 1
        else:
            self._keep(who, str(error), header, payloads)
        now, reason = time.monotonic(), str(error)[:500]
        if now - self._minute > 60:
            if self._silent:
                logger.warning("%d more refused messages were not logged one by one", self._silent)
            self._minute, self._logged, self._silent = now, 0, 0
        if self._logged >= LOGGED_A_MINUTE:
            self._silent += 1
            return
        self._logged += 1
        count = self._state.refused_messages
        logger.warning("refused message %d from %s: %s", count, who, reason)
        self._state.event_log.add("refused_message", client=who, reason=reason, count=count)

    def _keep(self, who: str, reason: str, header: bytes, payloads: int) -> None:
        if self._folder is None or self._kept >= KEPT_MESSAGES:
            return
        self._kept += 1
        self._state.quarantined_messages += 1
        about = KeptMessage(time.time(), who, reason, len(header), payloads)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{self._kept}.bin").write_bytes(header[:KEPT_BYTES])
            (self._folder / f"{self._kept}.json").write_bytes(msgspec.json.encode(about))
        except OSError as error:
            logger.error("a refused message could not be kept: %s", error)


def anonymous(client: bytes) -> str:
    """A name for a connection in logs and events. Its real id is secret, because it identifies the connection."""
    return hashlib.blake2b(client, digest_size=6).hexdigest()
