"""The learner's control thread under thousands of nodes: python bench/weight_control.py [--nodes 100 1000 2000 5000].

Real publisher with its control thread and sockets. The nodes are connections of one other process. They answer over
the real wire but receive nothing. After a pause they say that a tiny version is staged, and then that it is active.

- join: all nodes at once, to a learner that has a version; until all were welcomed, and until all run the version;
- idle: nothing is under way;
- publish, relay: nodes stage at even times within `--transfer` seconds, as along a chain.

CPU is that of the control thread alone. A turn is one pass of its loop. `ejected` must be 0, since every node answers.

- groups: real nodes without engines, threads of one process, form a group of gloo; messages of the store where they
  meet, as the learner reads and sends them, until the first version is active on all.
"""

import asyncio
import contextlib
import heapq
import itertools
import select
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from threading import enumerate as threads
from typing import Any, Literal

import harness
import torch
import zmq

from common.config.schema import WeightsConfig
from common.process import lifecycle
from common.weights.receive.weight_client import WeightClient
from common.weights.source import control
from common.weights.source.publisher import WeightPublisher
from common.weights.wire import messages
from common.weights.wire.sockets import ControlSocket
from tests.rigs.weight_processes import BufferTarget

TENSORS = [(f"layers.{i}.weight", torch.full((64,), 1.0)) for i in range(400)]  # names as of a model of 8B
PER_MACHINE = 8
FLIP_S = 0.2
PATIENCE_S = 90.0
LOOK_S = 0.02


class Counted(ControlSocket):
    """Counts turns and messages; a turn begins with a wait."""

    turns = 0
    count: Counter[str] = Counter()

    def wait(self, timeout_ms: int) -> None:
        Counted.turns += 1
        super().wait(timeout_ms)

    def received(self) -> Iterator[Any]:
        for identity, message in super().received():
            Counted.count[f"{type(message).__name__} read"] += 1
            yield identity, message

    def send(self, identity: bytes, message: Any) -> bool:
        Counted.count[type(message).__name__] += 1
        return super().send(identity, message)


class Learner:
    """A publisher over one transport, and the figures of its control thread."""

    def __init__(self, transport: Literal["relay", "gloo"]) -> None:
        control.ControlSocket = Counted  # type: ignore[misc]
        config = WeightsConfig(transport=transport, timeout_s=20.0)
        self.publisher = WeightPublisher(0, "bfloat16", config)
        self.address = self.publisher.start()
        thread = next(t for t in threads() if t.name == "weight-plane")
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._published = 0
        self.start()

    def start(self) -> None:
        """Count from here."""
        self._began, self._cpu, self._turns = time.perf_counter(), time.clock_gettime(self._clock), Counted.turns

    def counted(self) -> dict[str, float]:
        """Seconds and turns since `start`."""
        cpu_s, turns = time.clock_gettime(self._clock) - self._cpu, Counted.turns - self._turns
        return {
            "seconds": round(time.perf_counter() - self._began, 3),
            "cpu_s": round(cpu_s, 4),
            "turns": turns,
            "cpu_ms_per_turn": round(1e3 * cpu_s / max(turns, 1), 3),
        }

    def publish(self) -> None:
        self.publisher.publish(self._published, TENSORS, None)
        self._published += 1

    def active(self, nodes: int) -> bool:
        """Whether so many nodes run the newest version, before patience ends."""
        end = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < end:
            stats = self.publisher.stats()
            if stats.nodes == nodes and stats.version_active == self._published - 1 == stats.published - 1:
                return True
            time.sleep(LOOK_S)
        return False


class Receivers:
    """Connections that answer as nodes do. `answers` are the delayed ones."""

    def __init__(self, address: str, count: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 100)
        self._epoll = select.epoll()
        self._sockets: dict[int, tuple[str, zmq.Socket[bytes]]] = {}
        self._answers: list[tuple[float, int, int, messages.NodeMessage]] = []
        self._order = itertools.count()
        self._published: dict[int, messages.Publish] = {}
        self.transfer_s = 0.0
        self.welcomed = 0
        for number in range(count):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            self._sockets[socket.FD] = f"n{number}", socket  # type: ignore[index]

    def join(self) -> None:
        for number, (handle, (name, _)) in enumerate(self._sockets.items()):
            self._epoll.register(handle, select.EPOLLIN | select.EPOLLET)
            self._say(handle, messages.Join(name, 1, transports=("relay",), machine=f"machine-{number // PER_MACHINE}"))

    def turn(self) -> None:
        """Answer what has come, and what is due."""
        for handle, _ in self._epoll.poll(0.005, 256):
            self._drain(handle)
        now = time.monotonic()
        while self._answers and self._answers[0][0] <= now:
            _, _, handle, message = heapq.heappop(self._answers)
            self._say(handle, message)

    def _drain(self, handle: int) -> None:
        """Read all: a handle is ready only once for all messages of its socket."""
        _, socket = self._sockets[handle]
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            self._hear(handle, messages.decode_from_learner(socket.recv(zmq.NOBLOCK)))

    def _hear(self, handle: int, message: messages.LearnerMessage) -> None:
        name, _ = self._sockets[handle]
        number = int(name[1:])
        match message:
            case messages.Ping():
                self._say(handle, messages.Pong(name))
            case messages.Welcome():
                self.welcomed += 1
                self._say(
                    handle, messages.Listening(name, f"tcp://10.{number >> 11}.{number // 8 % 256}.1:{number % 8 + 1}")
                )
            case messages.Publish():
                self._published[handle] = message
                staged = messages.Staged(name, 0, message.version, receive_s=0.1, epoch=message.epoch)
                self._later(handle, self.transfer_s * (number + 1) / len(self._sockets), staged)
            case messages.Activate():
                active = messages.Active(
                    name, 0, message.version, stall_s=0.0, checksum=self._published[handle].checksum
                )
                self._later(handle, FLIP_S, active)
            case _:
                pass

    def _later(self, handle: int, delay_s: float, message: messages.NodeMessage) -> None:
        heapq.heappush(self._answers, (time.monotonic() + delay_s, next(self._order), handle, message))

    def _say(self, handle: int, message: messages.NodeMessage) -> None:
        self._sockets[handle][1].send(messages.encode(message))
        if not isinstance(message, messages.Pong):
            self._drain(handle)  # a send swallows the sign that something came


def receive(address: str, count: int, pipe: Connection) -> None:
    """Do what comes over the pipe, and answer the learner meanwhile."""
    lifecycle.raise_open_files()
    receivers = Receivers(address, count)
    pipe.send("connected")
    with contextlib.suppress(EOFError):
        while True:
            if pipe.poll(0):
                word = pipe.recv()
                if word == "join":
                    receivers.join()
                else:
                    receivers.transfer_s = word
            receivers.turn()
            if receivers.welcomed == count:
                receivers.welcomed = 0
                pipe.send("welcomed")


def relay(nodes: int, options: harness.Options) -> dict[str, Any]:
    learner = Learner("relay")
    learner.publish()
    with contextlib.closing(learner.publisher):
        pipe = harness.spawned(receive, learner.address, nodes)
        harness.received(pipe)
        found: dict[str, Any] = {"nodes": nodes}
        learner.start()
        pipe.send("join")
        welcomed = pipe.poll(PATIENCE_S) and pipe.recv()
        found["welcomed_s"] = learner.counted()["seconds"] if welcomed else None
        complete = learner.active(nodes)
        found["join"] = learner.counted()
        learner.start()
        time.sleep(options.idle)
        found["idle"] = learner.counted()
        pipe.send(options.transfer)
        publishes = list[dict[str, float]]()
        for _ in range(options.rounds if complete else 0):
            learner.start()
            learner.publish()
            complete &= learner.active(nodes)
            publishes.append(learner.counted())
        found["publish"] = harness.medians(publishes, 4) if publishes else dict.fromkeys(found["idle"])
        found["complete"] = complete
        found["ejected"] = learner.publisher.stats().ejections
        return found


def meet(address: str, count: int, pipe: Connection) -> None:
    """Real nodes that follow a learner, until the process ends."""

    async def follow() -> None:
        clients = [WeightClient(f"n{i}", BufferTarget(loads=False), transports=("gloo", "relay")) for i in range(count)]
        for client in clients:
            client.follow(address, 0)
        await asyncio.Event().wait()

    torch.set_num_threads(1)
    lifecycle.raise_open_files()
    asyncio.run(follow())


def group(members: int) -> dict[str, Any]:
    learner = Learner("gloo")
    with contextlib.closing(learner.publisher):
        Counted.count.clear()
        pipe = harness.spawned(meet, learner.address, members)
        while learner.publisher.stats().nodes < members:
            time.sleep(LOOK_S)
        learner.start()
        learner.publish()
        complete = learner.active(members)
        found = learner.counted()
        pipe.close()
    read, sent = Counted.count["StoreEntries read"], Counted.count["StoreEntries"]
    return {"members": members, "complete": complete, "entries_read": read, "entries_sent": sent, **found}


@harness.script(
    nodes=[100, 1000, 2000, 5000], members=[8, 16, 32, 64], rounds=2, idle=5.0, transfer=5.0, name="weight_control"
)
def main(options: harness.Options) -> harness.Figures:
    torch.set_num_threads(1)
    lifecycle.raise_open_files()
    runs = list[dict[str, Any]]()
    for nodes in options.nodes:
        runs.append(harness.apart(relay, nodes, options))
        print(runs[-1], flush=True)
    groups = list[dict[str, Any]]()
    for members in options.members:
        groups.append(harness.apart(group, members))
        print(groups[-1], flush=True)
    return {"rounds": options.rounds, "relay": runs, "groups": groups}
