"""Builders for tests of the broker: facts of a run, states, reports, servers in a thread, a job's config, bare sockets.

`MemoryBroker` is the reference backend: the delivery contract in one process, without sockets or threads. The contract
suite runs against it as well as against the server; simulations use it with their own clock. `DurableRig` is a durable
state, for tests that write a store, break it and read it again.
"""

import asyncio
import itertools
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from broker import wire
from broker.client.calls import LearnerBroker, NodeBroker
from broker.contract import LearnerReport, Lease, NodeReport, RunInfo
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.logs import EventLog
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.journal.file_store import open_file_store
from broker.journal.journal import SEGMENT_BYTES, Journal
from broker.journal.recovery import recover
from broker.journal.store import Store
from broker.server.handlers import Handlers, NotYet
from broker.server.server import BrokerServer
from common.config.schema import BrokerConfig, Config, LearnerConfig, ModelConfig, RunConfig, TasksConfig
from common.errors import BrokerUnreachable
from common.rollouts import GroupMeta, Task
from common.security.credentials import Credential
from common.security.curve import secure_client
from tests.rigs.waiting import LIMIT_S, until

META = GroupMeta(version_min=0, version_max=0, reward_mean=0.5, sampled_tokens=10)
MAX_MESSAGE_BYTES = 1 << 20
POLL_S = 0.005
R = TypeVar("R")
RUN = RunInfo("rig", "/nowhere", 2, 3, 3, 10.0, 1 << 30)


def run_info(**changed: Any) -> RunInfo:
    """Steps of two groups, staleness 1, three attempts, leases of 30 s."""
    facts: dict[str, Any] = {
        "name": "test",
        "run_dir": "/nowhere",
        "groups_per_step": 2,
        "max_staleness": 1,
        "max_attempts": 3,
        "lease_s": 30.0,
        "max_bytes": 1 << 30,
    }
    return RunInfo(**(facts | changed))


def new_state(run: RunInfo | None = None, clock: Callable[[], float] = time.monotonic) -> DeliveryState:
    """An empty state in memory."""
    return DeliveryState(run or run_info(), clock)


def numbered_state(run: RunInfo, clock: Callable[[], float] = lambda: 0.0) -> DeliveryState:
    """As `new_state`, with the numbers 0, 1, 2, ... as tokens."""
    numbers = itertools.count()
    return DeliveryState(run, clock, lambda: str(next(numbers)))


def node_report(node_id: str = "n0", pid: int = 1, version: int = 0, **fields: Any) -> NodeReport:
    """A node that generates."""
    return NodeReport(node_id, pid, "host", "generating", version, **fields)


def learner_report(
    state: str = "training", incarnation: int = 1, step: int = 0, instance: str = "", weights: str = ""
) -> LearnerReport:
    """A learner of process 5 at the version of its step."""
    return LearnerReport(
        5, incarnation, state, policy_version=step, step=step, instance=instance, weights_address=weights
    )


@contextmanager
def serving(
    address: str = "tcp://127.0.0.1:0", state: DeliveryState | None = None, **more: Any
) -> Iterator[BrokerServer]:
    """A server that runs in a thread; `more` are arguments of BrokerServer."""
    server = BrokerServer(state or new_state(), [address], more.pop("max_message_bytes", MAX_MESSAGE_BYTES), **more)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def job(run_dir: Path, groups_per_step: int = 2, name: str = "test", **broker: Any) -> Config:
    """The config of a job whose model and tasks are never loaded."""
    return Config(
        run=RunConfig(name=name, dir=str(run_dir), steps=10),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
        learner=LearnerConfig(groups_per_step=groups_per_step),
        broker=BrokerConfig(**broker),
    )


@contextmanager
def dealer(address: str, credential: Credential | None = None, public: str = "") -> Iterator["zmq.Socket[bytes]"]:
    """A bare socket of a client; `public` is the key of the other side unless that is the broker."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)  # sent messages must arrive
        socket.setsockopt(zmq.RECONNECT_IVL, 1)  # the other side cuts a connection that sends too much
        socket.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1000))
        if credential is not None:
            secure_client(socket, credential, public or credential.server_public)
        socket.connect(address)
        yield socket


def ask(socket: "zmq.Socket[bytes]", request: wire.Request[Any], *payloads: bytes) -> Any:
    """The answer to one request, or the reply where that is no answer."""
    socket.send_multipart([wire.encode(request), *payloads])
    header, *rest = socket.recv_multipart()
    reply = wire.decode_reply(header)
    return request.read(reply.value, rest) if isinstance(reply, wire.Answer) else reply


def tasks(count: int, first: int = 0) -> list[Task]:
    """Tasks of two samples."""
    return [Task(serial, b"{}", serial, 2) for serial in range(first, first + count)]


class MemoryBroker:
    """A shared state; `learner()` and `node()` return clients of it."""

    def __init__(self, run: RunInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = DeliveryState(run, clock)
        self.state.address = "memory"

    def learner(self) -> "MemoryLearner":
        return MemoryLearner(self.state)

    def node(self) -> "MemoryNode":
        return MemoryNode(self.state)


class MemoryLearner(LearnerBroker):
    """A client for a learner or an observer."""

    closed = False

    def __init__(self, state: DeliveryState) -> None:
        self.use(state)

    def use(self, state: DeliveryState) -> None:
        """Ask another broker from now on."""
        self._handlers = Handlers(state)

    def close(self) -> None:
        self.closed = True

    def ask(self, request: wire.Request[R], wait_s: float = 0.0) -> R:
        if self.closed:
            raise BrokerUnreachable("the connection was closed")
        for reply in _looks(self._handlers, request, wait_s):
            if reply is not None:
                self.position = reply.position or self.position
                return reply.value
            time.sleep(POLL_S)
        return None if isinstance(request, wire.Take) else []  # type: ignore[return-value]


class MemoryNode(NodeBroker):
    """A client for a node."""

    def __init__(self, state: DeliveryState) -> None:
        self.use(state)

    def use(self, state: DeliveryState) -> None:
        """Ask another broker from now on."""
        self._handlers = Handlers(state)

    async def ask(self, request: wire.Request[R], wait_s: float = 0.0, payload: bytes | None = None) -> R:
        for reply in _looks(self._handlers, request, wait_s, payload):
            if reply is not None:
                return reply.value
            await asyncio.sleep(POLL_S)
        return []  # type: ignore[return-value]


def _looks(
    handlers: Handlers, request: wire.Request[R], wait_s: float, payload: bytes | None = None
) -> Iterator[wire.Answer[R] | None]:
    """Yield the answer as it is now, and again whenever the caller comes back within `wait_s`; None: not yet."""
    end = time.monotonic() + wait_s
    look: Any = partial(handlers.answers.first, payload=payload)
    while True:
        handlers.answers.nodes.expire()
        try:
            reply = look(request)
            if payloads := handlers.payloads(reply):
                sent = [group for group in reply.value if not group.held]
                for group, data in zip(sent, payloads, strict=True):
                    msgspec.structs.force_setattr(group, "payload", data)
            yield reply
        except NotYet:
            yield None
        look = handlers.answers.again
        if time.monotonic() >= end:
            return


def meta(version: int = 0) -> GroupMeta:
    return GroupMeta(version, version, 0.5, 10)


def newest(store: Path) -> Path:
    """The segment that a broker wrote last."""
    return max(store.glob("0*.log"))


@contextmanager
def full_disk(store: Path, room: int = 0) -> Iterator[None]:
    """No file grows beyond the newest segment of the store and `room` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = max((segment.stat().st_size for segment in store.glob("0*.log")), default=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


class DurableRig:
    """One life of a broker without its sockets: `state` records, `settle` waits until that is acknowledged."""

    def __init__(
        self,
        store: Path | Store,
        sync: Literal["fsync", "everysec"] = "fsync",
        segment_bytes: int = SEGMENT_BYTES,
        retain_steps: int = 2,
    ) -> None:
        self.store: Any = open_file_store(store, "rig") if isinstance(store, Path) else store
        self.events = EventLog()
        self.journal = Journal(self.store, sync, segment_bytes)
        store_id = self.store.store_id
        self.state = DeliveryState(
            RUN, events=self.events, recorder=self.journal, retain_steps=retain_steps, store_id=store_id
        )
        try:
            self.found = recover(self.journal, self.state)
        except BaseException:
            self.store.close()
            raise

    def __enter__(self) -> "DurableRig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> "DurableRig":
        """With a learner and a node."""
        LearnerRules(self.state).attach(LearnerReport(1, 1, "training", 0))
        NodeRules(self.state).register(node_report())
        return self

    def offer(self, count: int) -> None:
        LearnerRules(self.state).offer(tasks(count, self.state.tasks.next_serial))

    def lease(self, count: int = 2) -> Sequence[Lease]:
        return NodeRules(self.state).lease("n0", 1 << 20, count)

    def complete(self, lease: Lease, size: int = 100) -> bytes:
        payload = b"%d." % lease.task.serial * size
        assert NodeRules(self.state).complete("n0", lease.token, meta(), payload, len(payload))
        return payload

    def ready(self, count: int = 1, size: int = 100) -> list[bytes]:
        """Groups that are offered, leased and handed in; their payloads."""
        self.offer(count)
        return [self.complete(lease, size) for lease in self.lease(count)]

    def step(self, number: int, size: int = 100) -> list[bytes]:
        """Two tasks from the offer to the take; their payloads."""
        payloads = self.ready(2, size)
        assert LearnerRules(self.state).take(number, 2) is not None
        return payloads

    def settle(self) -> None:
        last = self.journal.end_turn()
        until(
            lambda: self.journal.acknowledged >= last or self.journal.end_turn() < 0,
            "acknowledged records",
            told=lambda: self.journal.stuck,
            every_s=0.001,
        )

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.after(-1)]

    def close(self) -> None:
        assert self.journal.close()
