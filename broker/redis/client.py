"""The synchronous Redis client: the learner's side of the contract, and the observers'."""

import secrets
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec

from broker.contract import Attached, BrokerEvent, BrokerStatus, LearnerReport, LedgerEntry, StoredGroup
from broker.redis import reading
from broker.redis.endpoint import endpoint
from broker.redis.moves import Command
from broker.redis.store_link import StoreLink
from common.errors import BrokerError
from common.redis_address import parse_redis
from common.rollouts import Task
from common.security.credentials import Role

OFFER_TASKS = 512  # in one move
FETCH_GROUPS = 16  # payloads in one pipeline

_task = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()


class RedisClient:
    """LearnerBroker and ObserverBroker over Redis; any thread may call, each has a connection of its own.

    Args:
        address: see common/redis_address.py.
        role: decides which ACL user this is.
        credentials: folder, see broker/redis/endpoint.py.
        deadline_s: without an answer for this long (beyond what the request itself waits), give up.

    Every method raises BrokerUnreachable at the deadline and BrokerError when a move is refused; StoreGone, a
    BrokerError, when Redis has lost what it had acknowledged since `attach`.
    """

    def __init__(
        self,
        address: str,
        *,
        role: Role = "learner",
        credentials: str | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        self._endpoint = endpoint(address, role, credentials)
        self.address = address
        self._role, self._deadline_s, self._run = role, deadline_s, parse_redis(address).run
        self._local = threading.local()
        self._links: list[StoreLink] = []
        self._lock = threading.Lock()
        self._sender: tuple[str, str] = ("", "")  # incarnation and instance, once attached
        self._store = ""  # likewise

    def __enter__(self) -> "RedisClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close every thread's connection; no call may be under way."""
        with self._lock:
            for link in self._links:
                link.close()
            self._links.clear()

    # ---------------------------------------------------------------- learner

    def attach(self, report: LearnerReport) -> Attached:
        """See LearnerBroker."""
        link = self._link()
        link.forget_store()
        next_serial, committed = link.move("attach", lambda _: _report(report))
        self._sender, self._store = (str(report.incarnation), report.instance), link.store
        return Attached(next_serial, link.store, committed)

    def offer(self, tasks: list[Task]) -> int:
        """See LearnerBroker. Long lists go in several moves."""
        new = 0
        for start in range(0, len(tasks), OFFER_TASKS):
            part: list[str | bytes] = []
            for task in tasks[start : start + OFFER_TASKS]:
                part += [str(task.serial), _task.encode(task)]
            new += self._offer(secrets.token_hex(8), part)
        return new

    def _offer(self, nonce: str, pairs: list[str | bytes]) -> int:
        move = self._link().move
        return move("offer", lambda repeated: (*self._sender, nonce, int(repeated), *pairs), self._store)[0]

    def take(self, step: int, count: int, wait_s: float, in_order: bool = False) -> list[StoredGroup] | None:
        """See LearnerBroker."""
        link, nonce, end = self._link(), secrets.token_hex(8), time.monotonic() + wait_s
        while True:
            left_s = end - time.monotonic()
            waiting = nonce if left_s > 0 else ""
            answer = link.move("take", lambda _, w=waiting: (*self._sender, step, count, int(in_order), w), self._store)
            if answer:
                return self._fetch(link, answer[1])
            if not waiting:
                return None
            link.wait(nonce, left_s)

    def regenerate(self, step: int, serials: list[int]) -> None:
        """See LearnerBroker."""
        self._link().move("regenerate", lambda _: (*self._sender, step, *serials), self._store)

    def filter(self, step: int, serials: list[int], most_replaced: int) -> None:
        """See LearnerBroker."""
        self._link().move("filter", lambda _: (*self._sender, step, most_replaced, *serials), self._store)

    def commit(self, step: int) -> None:
        """See LearnerBroker."""
        self._link().move("commit", lambda _: (*self._sender, step), self._store)

    def report(self, report: LearnerReport) -> None:
        """See LearnerBroker."""
        self._link().move("report", lambda _: _report(report), self._store)

    # ---------------------------------------------------------------- observers

    def status(self) -> BrokerStatus:
        """See ObserverBroker."""
        link = self._swept()
        replies = link.read(lambda moves: reading.status_commands(moves.keys))
        nodes = link.read(lambda moves: reading.node_commands(moves.keys, replies))
        return reading.status(self.address, replies, nodes)

    def ledger(self) -> list[LedgerEntry]:
        """See ObserverBroker."""
        return reading.ledger(self._swept().read(lambda moves: reading.ledger_commands(moves.keys)))

    def events(self, after: int) -> list[BrokerEvent]:
        """See ObserverBroker."""
        return reading.events(self._swept().read(lambda moves: [reading.events_command(moves.keys, after)])[0])

    # ---------------------------------------------------------------- inside

    def _swept(self) -> StoreLink:
        """The connection, after expired leases were taken back; an observer only reads, the keeper sweeps for it."""
        link = self._link()
        if self._role != "observer":
            link.move("sweep", lambda _: ())
        return link

    def _fetch(self, link: StoreLink, groups: Sequence[Sequence[Any]]) -> list[StoredGroup]:
        found: list[StoredGroup] = []
        for start in range(0, len(groups), FETCH_GROUPS):
            part = groups[start : start + FETCH_GROUPS]
            keys = link.keys
            commands: list[Command] = [("GET", keys.payload(name)) for _, _, _, name in part]
            for (serial, node, meta, _), payload in zip(part, link.ask(commands), strict=True):
                if payload is None:
                    raise BrokerError(
                        f"Redis no longer has the payload of task {serial}; was it evicted? maxmemory-policy must be "
                        "noeviction"
                    )
                found.append(StoredGroup(serial, node.decode(), reading.decode_meta(meta), payload))
        return found

    def _link(self) -> StoreLink:
        link: StoreLink | None = getattr(self._local, "link", None)
        if link is None:
            link = self._local.link = StoreLink(self._endpoint, self._role, self._run, self._deadline_s)
            with self._lock:
                self._links.append(link)
        return link


def _report(report: LearnerReport) -> tuple[bytes | str | int, ...]:
    return (report.incarnation, report.instance, report.state, report.pid, report.step, _json.encode(report))
