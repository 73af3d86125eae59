"""Builders for tests of the broker: facts of a run, a delivery state, reports, a server in a thread, a job's config."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from broker import wire
from broker.contract import LearnerReport, NodeReport, RunInfo
from broker.delivery.state import DeliveryState
from broker.server.server import BrokerServer
from common.config.schema import BrokerConfig, Config, LearnerConfig, ModelConfig, RunConfig, TasksConfig
from common.rollouts import GroupMeta, Task
from common.security.credentials import Credential
from common.security.curve import secure_client
from tests.waiting import LIMIT_S

META = GroupMeta(version_min=0, version_max=0, reward_mean=0.5, sampled_tokens=10)
MAX_MESSAGE_BYTES = 1 << 20


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
