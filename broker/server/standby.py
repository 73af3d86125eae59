"""A broker that stands by: it answers every request with the address of the leader, until it leads itself."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import quote

import zmq

from broker import wire
from broker.journal.redis_store import Leader
from broker.journal.store import StoreUnavailable
from broker.server.request_guard import ROLES
from broker.sockets import bind_router, frame_limit, reachable
from common.config.schema import BrokerConfig
from common.errors import UsageError
from common.process.lock_file import AlreadyLocked, take_lock
from common.security.credentials import curve_credentials, load_server
from common.security.curve import CurveGate, KeyRing

logger = logging.getLogger(__name__)

POLL_S = 0.5
LINGER_MS = 100


class Standby:
    """Binds on construction the first of `addresses` that is an address of this machine and free; raises UsageError.

    Clients connect to `address`; the leading broker must bind `bound`. Locks in the run folder show two brokers on one
    machine which address the other has.
    """

    def __init__(self, config: BrokerConfig, run_dir: Path, addresses: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._lock: IO[str] | None = None  # keeps the address for this process while the leading broker binds it
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._curve: CurveGate | None = None
        self._stopping = False
        try:
            keys = curve_credentials(config.credentials)
            if keys is not None:
                self._curve = CurveGate(self._context, load_server(keys), KeyRing(keys, ROLES))
            limit = frame_limit(config.max_message_bytes)
            self._router = bind_router(self._context, addresses, limit, self._curve, self._claim)
        except BaseException:
            self._close()
            raise
        self.bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = reachable(self.bound)

    def _claim(self, address: str) -> None:
        try:
            self._lock = take_lock(self._run_dir / f".broker-{quote(address, safe='')}.lock")
        except AlreadyLocked as error:
            raise UsageError(f"broker.address: {address} is that of process {error.holder}") from None
        except OSError as error:
            raise UsageError(f"{self._run_dir}: the file that locks {address} cannot be locked: {error}") from error

    def stop(self) -> None:
        """End `run`; may be called from a signal handler."""
        self._stopping = True

    def run(self, take: Callable[[], Leader | None]) -> bool:
        """Stand by until `take` returns no leader, because this broker leads; False when it was stopped. Closes."""
        known = ""
        away = ""
        try:
            while not self._stopping:
                try:
                    leader = take()
                    if leader is None:
                        return True
                    if known != leader.name or away:
                        logger.info("standing by at %s; the broker of %s leads", self.address, leader.address)
                    known = leader.name
                    away = ""
                    self._answer_all(leader.address)
                except StoreUnavailable as error:
                    if not away:
                        logger.warning("%s; asking again", error)
                    away = str(error)
                    self._answer_all("")
            return False
        finally:
            self._router.close(linger=LINGER_MS)
            self._close()

    def release(self) -> None:
        """Let other processes have the address, once this one neither stands by nor leads."""
        if self._lock is not None:
            self._lock.close()

    def _answer_all(self, leader: str) -> None:
        """Answer what arrives until it is time to ask Redis again."""
        end = time.monotonic() + POLL_S
        while not self._stopping and (left_s := end - time.monotonic()) > 0:
            self._router.poll(int(1000 * left_s) + 1)
            try:
                client, header, *payloads = self._router.recv_multipart(zmq.NOBLOCK)
            except (zmq.Again, ValueError):
                continue  # no message, or one without a header
            try:
                request_id = wire.decode_request(header, len(payloads)).id
            except wire.WireError as error:
                request_id = error.request_id
            with contextlib.suppress(zmq.ZMQError):  # the client has gone
                self._router.send_multipart([client, wire.encode(wire.NotLeading(id=request_id, leader=leader))])

    def _close(self) -> None:
        if self._curve is not None:
            self._curve.close()
        self._context.term()
