"""The weight plane with real processes, sockets and transports: senders, publishers, and children that receive.

Only the engine is replaced by a buffer. Children are forked from a process that has imported torch already, which costs
seconds of CPU each time.
"""

import base64
import contextlib
import itertools
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import torch

from common.config.schema import WeightsConfig
from common.weights.source.publisher import WeightPublisher
from common.weights.transports.groups import GroupFactory, RelayedStore, in_turn, open_group
from common.weights.transports.relay import RelayServer
from common.weights.wire import flat_buffer, messages
from common.weights.wire.layout import Layout
from common.weights.wire.messages import Canary, Epoch, Part, Publish, StoreEntries
from common.weights.wire.pieces import PartBuffer, new_part
from tests.rigs import processes
from tests.rigs.waiting import LIMIT_S, until
from tests.rigs.weight_processes import CLOSE, open_any, receive, run_node

BUCKET = 64 << 10


class NoEvent(AssertionError):
    """A node did not say what was waited for."""


class NodeProcess:
    """A node as a child; its events arrive in order."""

    def __init__(self, node_id: str, options: dict[str, Any]) -> None:
        self._pipe, theirs = processes.context().Pipe()
        self.process = processes.start(run_node, node_id, options, theirs)
        theirs.close()
        self.events: list[dict[str, object]] = []

    def follow(self, address: str, incarnation: int = 0) -> None:
        self._pipe.send_bytes(json.dumps([address, incarnation]).encode())

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def heard(self) -> list[dict[str, object]]:
        """Every event so far."""
        while self._pipe.poll():
            self.events.append(json.loads(self._pipe.recv_bytes()))
        return self.events

    def wait(self, event: str, limit_s: float = LIMIT_S, **fields: object) -> dict[str, object]:
        """The next event of this kind with these fields; earlier ones are kept in `events`."""
        end = time.monotonic() + limit_s
        while self._pipe.poll(max(0.01, end - time.monotonic())):
            got = json.loads(self._pipe.recv_bytes())
            self.events.append(got)
            if got["event"] == event and all(got.get(k) == v for k, v in fields.items()):
                return got
        raise NoEvent(f"no {event} {fields} within {limit_s:g} s; saw {self.events}")

    def close(self) -> None:
        self.process.kill()  # also one that stands still
        self.process.join(LIMIT_S)
        self._pipe.close()


class Plane:
    """Starts publishers and nodes, and ends them."""

    def __init__(self) -> None:
        self.closing: list[Callable[[], None]] = []

    def publisher(
        self,
        incarnation: int = 0,
        factory: GroupFactory = open_group,
        credentials: str | None = None,
        dtype: str = "float32",
        bucket_bytes: int = BUCKET,
        **config: Any,
    ) -> WeightPublisher:
        """`config`: keys of `weights` that differ from their defaults."""
        weights = msgspec.structs.replace(WeightsConfig(anchor_every=0, timeout_s=60.0), **config)
        publisher = WeightPublisher(
            incarnation,
            dtype,
            weights,
            credentials=credentials,
            group_factory=factory,
            bucket_bytes=bucket_bytes,
        )
        self.closing.append(publisher.close)
        return publisher

    def fleet(self, *ids: str, loads: bool = True, **config: Any) -> tuple[WeightPublisher, str, list[NodeProcess]]:
        """A publisher, its address, and nodes that it knows."""
        publisher = self.publisher(**config)
        address = publisher.start()
        nodes = self.following(address, *ids, loads=loads)
        until(lambda: publisher.stats().nodes == len(ids))
        return publisher, address, nodes

    def following(self, address: str, *ids: str, **options: Any) -> list[NodeProcess]:
        """Nodes that are up and follow the publisher there."""
        nodes = [NodeProcess(i, options) for i in ids]
        self.closing.extend(n.close for n in nodes)
        for node in nodes:
            node.wait("up")
            node.follow(address)
        return nodes

    def close(self) -> None:
        for close in reversed(self.closing):
            close()
        for thread in threading.enumerate():
            if thread.name.startswith("send-weights"):  # in a library that must not see the interpreter end around it
                thread.join(LIMIT_S)


def spread(publisher: WeightPublisher, version: int, *nodes: NodeProcess, canary: Canary | None = None) -> int:
    """Publish the version's weights and see every node run them; the size of the version in bytes."""
    size = publisher.publish(version, weights(version), canary)
    running(version, *nodes)
    return size


def running(version: int, *nodes: NodeProcess) -> None:
    """Wait until every node runs the version, with its weights."""
    for node in nodes:
        assert node.wait("active", version=version)["value"] == float(version)


def weights(version: int, floats: int = 200_000) -> list[tuple[str, torch.Tensor]]:
    """About 13 buckets; every element tells the version."""
    return [("a.weight", torch.full((floats // 2, 2), float(version))), ("b.weight", torch.full((33,), float(version)))]


class Child:
    """`receive` as a child."""

    def __init__(self, layout: Layout, fault: str = "", at: int = -1) -> None:
        self.pipe, theirs = processes.context().Pipe()
        self.process: BaseProcess = processes.start(receive, theirs, fault, at)
        theirs.close()
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.met: Callable[[Child, int, dict[str, bytes]], None] = lambda child, epoch, entries: None
        threading.Thread(target=self._listen, daemon=True).start()
        self.tell(messages.Welcome(0, layout, "127.0.0.1:1"))
        self.address = str(self.hear()["address"])

    def tell(self, message: messages.LearnerMessage) -> None:
        with contextlib.suppress(OSError):  # it is dead
            self.pipe.send_bytes(messages.encode(message))

    def hear(self, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """The next outcome; {} when none came in time."""
        try:
            return self.said.get(timeout=timeout_s)
        except queue.Empty:
            return {}

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                said = json.loads(self.pipe.recv_bytes())
                if said["event"] == "met":
                    entries = {key: base64.b64decode(value) for key, value in said["entries"].items()}
                    self.met(self, said["epoch"], entries)
                else:
                    self.said.put(said)

    def end(self) -> dict[str, Any]:
        """Close the receiver; what it said at the end."""
        self.pipe.send_bytes(CLOSE)
        said = self.hear()
        self.process.join(LIMIT_S)
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_S)
        self.pipe.close()


class Sender:
    """The learner's side of one transport: a payload to some children over a new epoch, or the last one again."""

    def __init__(self, transport: str, timeout_s: float) -> None:
        self.transport, self.timeout_s = transport, timeout_s
        self.numbers, self.versions = itertools.count(1), itertools.count(1)
        self.server = RelayServer("127.0.0.1") if "relay" in transport else None
        self.parts: list[Part] = []  # that are served
        self.group: Any = None
        self.store: RelayedStore | None = None
        self.members: list[Child] = []  # who are in the group
        self.lock = threading.Lock()
        self.epoch: Epoch | None = None

    def form(self, children: list[Child], size: int = 0) -> None:
        """A new epoch of these children; `size` when more are expected. Relayed ones get theirs with each payload."""
        if self.server is not None:
            return
        self.drop()
        self.epoch = Epoch(
            next(self.numbers), 0, size or len(children) + 1, self.timeout_s, self.transport, "127.0.0.1:1"
        )
        self.members, self.entries = [], dict[str, bytes]()
        self.store = RelayedStore(self.timeout_s, lambda key, value: self.meet(None, self.epoch.epoch, {key: value}))
        for rank, child in enumerate(children, start=1):
            self.admit(child, rank)

    def admit(self, child: Child, rank: int) -> None:
        """Tell a member of the group and where to meet it."""
        assert self.epoch is not None
        child.tell(msgspec.structs.replace(self.epoch, rank=rank))
        with self.lock:
            child.met = self.meet
            self.members.append(child)
            child.tell(StoreEntries(self.epoch.epoch, dict(self.entries)))

    def meet(self, sender: Child | None, epoch: int, entries: dict[str, bytes]) -> None:
        """Pass entries of the store on, as the learner does."""
        with self.lock:
            if self.epoch is None or epoch != self.epoch.epoch:
                return
            self.entries |= entries
            if sender is not None and self.store is not None:
                self.store.add_entries(entries)
            for child in self.members:
                if child is not sender:
                    child.tell(StoreEntries(epoch, entries))

    def announce(self, children: list[Child], flat: torch.Tensor, bucket: int, spoil: int = -1) -> Publish:
        """Tell the children what comes; the checksum of bucket `spoil` is wrong."""
        layout = layout_of(flat)
        sums = flat_buffer.all_checksums(flat, bucket)[0]
        if spoil >= 0:
            sums[spoil] = "0" * 32
        made = Publish(
            0, next(self.versions), 0, layout.digest, bucket, sums, flat_buffer.checksum(flat), self.timeout_s,
            payload_bytes=flat.numel(),
        )  # fmt: skip
        if self.server is not None:
            made = msgspec.structs.replace(made, parts=self.parts_of(flat, bucket, spoil))
        for number, child in enumerate(children):
            if self.server is not None:
                self.fetch(child, made, children[number - 1].address if number else self.server.address)
            else:
                assert self.epoch is not None
                child.tell(msgspec.structs.replace(made, epoch=self.epoch.epoch))
        return made

    def parts_of(self, flat: torch.Tensor, piece: int, spoil: int = -1) -> list[Part]:
        """Two parts of the payload that the server offers; the digest of piece `spoil` is wrong."""
        assert self.server is not None
        half, secured = flat.numel() // 3, "sealed" in self.transport
        parts = []
        for start, size in ((0, half), (half, flat.numel() - half)):
            part = new_part(flat, start, size, piece=min(piece, 1 << 20), origin=self.server.address, secured=secured)
            self.server.offer(PartBuffer(part, flat))
            if spoil >= 0:
                each = 32 if secured else 16
                digests = bytearray(part.digests)
                digests[spoil * each] ^= 1
                part = msgspec.structs.replace(part, digests=bytes(digests))
            parts.append(part)
        return parts

    def fetch(self, child: Child, made: Publish, source: str) -> Epoch:
        """Let a child fetch all parts from there, in an epoch of its own."""
        epoch = Epoch(next(self.numbers) + 1000, 1, 2, self.timeout_s, "relay", "127.0.0.1:1")
        child.tell(epoch)
        child.tell(msgspec.structs.replace(made, epoch=epoch.epoch, sources=[source] * len(made.parts)))
        return epoch

    def send(self, flat: torch.Tensor, bucket: int) -> str:
        """Take part in the broadcast, as common/weights/source/attempt.py does; the error, '' when there was none."""
        if self.server is not None:
            return ""
        try:
            self.group = self.group or open_any(self.epoch, self.store)  # type: ignore[arg-type]
            for _ in in_turn(self.group, flat, bucket, self.timeout_s):
                pass
        except RuntimeError as error:
            self.drop()
            return str(error)
        return ""

    def send_behind(self, flat: torch.Tensor, bucket: int) -> tuple[threading.Thread, list[Any]]:
        """`send` in a thread; the list gets (error, seconds)."""
        found: list[Any] = []
        began = time.monotonic()
        thread = threading.Thread(target=lambda: found.append((self.send(flat, bucket), time.monotonic() - began)))
        thread.start()
        return thread, found

    def drop(self) -> None:
        if self.store is not None:
            self.store.close()
        if self.group is not None:
            self.group.close()
        self.group = None

    def close(self) -> None:
        self.drop()
        if self.server is not None:
            self.server.close()


def payload(size: int, seed: int) -> torch.Tensor:
    """[size] random bytes, a whole number of floats."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def layout_of(flat: torch.Tensor) -> Layout:
    return Layout.of([("w", "bfloat16", (flat.numel() // 2,))])
