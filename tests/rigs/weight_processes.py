"""The processes of the weight plane's tests: nodes without engines, and ranks that send weights.

- `receive` receives over any transport, is told what to do message by message, and can be made to fail midway.
- `run_node` is a node: the real control protocol and collectives, a plain buffer as the weights.
- `main` is a node or a rank of a learner that can run on a host of its own.

It reads a line of JSON for each command from the FIFO FOLDER/NAME.do and writes one for each event to FOLDER/NAME.said.
That is a file, because it outlives a process that is killed. OPTIONS are JSON, too. A node's command is [address,
incarnation], and its OPTIONS are those of `node`, and `id`. A learner takes `start`, `share`, `make`, `publish` and
`close`; it may have several publishers. A source is a further rank of the learner; it takes the same but `share`.
"""

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from common.config.schema import WeightsConfig
from common.security.credentials import load_credential
from common.weights.receive import frozen
from common.weights.receive.contract import CanaryRead, Flip, Watch
from common.weights.receive.receiver import Receiver, StagingStatus
from common.weights.receive.weight_client import WeightClient, until_staged
from common.weights.source.publisher import WeightPublisher
from common.weights.source.sources import LeadEndpoint, RemoteSource
from common.weights.transports.groups import BroadcastGroup, RelayedStore, open_group, process_group, receivable
from common.weights.transports.nccl import DeviceGroup
from common.weights.wire import flat_buffer, messages
from common.weights.wire.adapters import merge_version
from common.weights.wire.failures import ProofFailed
from common.weights.wire.messages import Epoch, Publish
from common.weights.wire.pieces import PartBuffer
from tests.rigs import device

CLOSE = b"close"
NCCL = ["nccl"] if device.CUDA else []  # all members share a GPU; their buckets are in host memory
DEVICES = {"device": torch.device("cpu"), "device from host memory": torch.device("cpu", 0)}  # buckets are on the first
_rig: Connection | None = None
LOOK_S = 0.02  # pause between two looks at a publisher's figures
VALUES = 128  # bfloat16 has all whole numbers up to this one


class GlooCommunicator:
    """A library like NCCL, over gloo: what it begins ends at a timeout far beyond every deadline."""

    def __init__(self, epoch: Epoch, store: RelayedStore) -> None:
        self._group = process_group(epoch, store)
        self._work: Any = None

    def broadcast(self, buffer: torch.Tensor) -> None:
        self._work = self._group.broadcast(buffer, 0)

    def pending(self) -> bool:
        if self._work is None or not self._work.is_completed():
            return self._work is not None
        self._work.wait()
        return False

    def abort(self) -> None:
        del self._group


def open_any(epoch: Epoch, store: RelayedStore) -> BroadcastGroup:
    """The transport's group; those of DEVICES are DeviceGroup with the CPU as the device."""
    if epoch.transport in DEVICES:
        return DeviceGroup(epoch, lambda epoch: GlooCommunicator(epoch, store), DEVICES[epoch.transport])
    return open_group(epoch, store)


class FaultyGroup:
    """A group of any transport in a process to which `fault` comes when its bucket `at` has arrived."""

    fault, at, seen = "", -1, 0  # in all groups of the process

    def __init__(self, epoch: Epoch, store: RelayedStore) -> None:
        self.group = open_any(epoch, store)
        self.close = self.group.close

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        wait = self.group.post(bucket, timeout_s)

        def arrived() -> None:
            wait()
            self.count(bucket)

        return arrived

    @classmethod
    def count(cls, data: Any) -> None:
        FaultyGroup.seen += 1
        if FaultyGroup.seen == FaultyGroup.at:
            cls.strike(data)

    @classmethod
    def strike(cls, data: Any) -> None:
        harm(cls.fault)


def count_pieces(kind: type[FaultyGroup]) -> None:
    """Over the relay the fault comes with piece `at`."""
    take_in = PartBuffer.take_in

    def counted(buffer: PartBuffer, number: int, sealed: Any) -> None:
        kind.count(memoryview(sealed))
        take_in(buffer, number, sealed)

    PartBuffer.take_in = counted  # type: ignore[method-assign]


def harm(fault: str) -> None:
    """Do to this process what the world does to nodes."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "cut":
        cut_off()


def cut_off() -> None:
    """Shut every TCP connection of this process down, as a network that fails between the machines."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            found = socket.socket(fileno=os.dup(int(entry.name)))
            with found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    found.getpeername()  # listening sockets stay
                    found.shutdown(socket.SHUT_RDWR)


def receive(commands: Connection, fault: str = "", at: int = -1) -> None:
    """Encoded messages of the learner come in; JSON of every outcome, and new entries of stores, go out."""
    torch.set_num_threads(1)
    os.environ |= device.sharing(os.getpid())
    FaultyGroup.fault, FaultyGroup.at = fault, at
    count_pieces(FaultyGroup)
    receiver = Receiver(FaultyGroup, device=DEVICES["device"])

    def say(**what: object) -> None:
        commands.send_bytes(json.dumps(what).encode())

    def watch(version: int) -> None:
        entries: set[str] = set()
        while (status := receiver.status).version == version and status.state == "receiving":
            new = {k: base64.b64encode(v).decode() for k, v in status.entries.items() if k not in entries}
            if new:
                entries |= new.keys()
                say(event="met", epoch=status.epoch, entries=new)
            pause.wait(0.003)
        if status.version != version:
            return
        if status.state == "failed":
            assert status.failure is not None
            say(event="failed", version=version, kind=status.failure.kind, reason=status.failure.text)
        elif status.state == "staged":
            flat = receiver.take(status.incarnation, version)
            assert receiver.layout is not None
            found = flat_buffer.version_checksum(flat, receiver.layout)
            receiver.give_back(flat)
            say(event="staged", version=version, checksum=found)

    pause = threading.Event()
    while (data := commands.recv_bytes()) != CLOSE:
        message = messages.decode_from_learner(data)
        answer = receiver.handle(message, "peer")
        if isinstance(message, messages.Publish):
            threading.Thread(target=watch, args=(message.version,), daemon=True).start()
        elif answer is not None:
            say(event="listening", address=answer.address)
    receiver.close()
    say(event="closed", threads=[t.name for t in threading.enumerate() if t.name == "relay-weights"])


def say(event: str, **what: object) -> None:
    if _rig is not None:
        _rig.send_bytes(json.dumps({"event": event, "time": time.time(), **what}).encode())


class PlaneGroup(FaultyGroup):
    """It tells of its fault. Two more are possible: no collective forms, or the bucket is changed."""

    def __init__(self, epoch: Epoch, store: RelayedStore) -> None:
        if self.fault == "no collective":
            raise RuntimeError("no route to the others")
        super().__init__(epoch, store)

    @classmethod
    def strike(cls, data: Any) -> None:
        say("fault", kind=cls.fault)
        super().strike(data)
        if cls.fault == "corrupt":
            data[7] ^= 1


def merge_oddly(*arguments: Any, given_up: Callable[[], bool]) -> None:
    """As on a processor that computes the last bit of an element otherwise."""
    merge_version(*arguments, given_up=given_up)
    arguments[-1][0] ^= 1


class BufferTarget:
    """EngineWeights whose engine is a buffer."""

    def __init__(
        self,
        break_load: bool = False,
        spoil_served: bool = False,
        loads: bool = True,
        decoding_differs: float = 0.125,
        odd_merge: bool = False,
    ) -> None:
        """Without `loads` a flip takes no time: nothing is copied, and nothing is proven beyond what was received."""
        if odd_merge:
            frozen.merge_version = merge_oddly
        self.decoding_differs = decoding_differs
        self.receiver = Receiver(PlaneGroup, device=torch.device("cpu"))
        self.break_load, self.spoil_served, self.loads = break_load, spoil_served, loads
        self.weights: torch.Tensor | None = None

    async def tell(self, message: bytes, node_id: str) -> bytes:
        told = messages.decode_from_learner(message)
        if isinstance(told, Epoch):
            say("epoch", epoch=told.epoch, size=told.world_size, transport=told.transport)
        elif isinstance(told, Publish):
            say("publish", version=told.version, encoding=told.encoding, sources=told.sources)
        elif isinstance(told, messages.Reroute | messages.Serve):
            say(type(told).__name__.lower(), to=getattr(told, "source", ""))
        answer = self.receiver.handle(told, node_id)
        if answer is None:
            return b""
        say("listens", address=answer.address)
        return messages.encode(answer)

    async def stage(self, publish: bytes, watch: Watch) -> float:
        async def status() -> StagingStatus:
            now = self.receiver.status
            if now.state == "failed":
                assert now.failure is not None
                say("failed", version=now.version, kind=now.failure.kind, reason=now.failure.text)
            return now

        await self.tell(publish, "")
        return await until_staged(status, watch)

    async def flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        flat = self.receiver.take(incarnation, version)
        self.weights = flat.clone() if self.loads else flat
        if self.spoil_served:
            flat[9] ^= 1
        self.receiver.give_back(flat)
        if not self.loads:
            return Flip(0.0, expected_checksum)
        if self.break_load:
            self.weights[0] ^= 1
        assert self.receiver.layout is not None
        found = flat_buffer.version_checksum(self.weights, self.receiver.layout)
        if found != expected_checksum:
            raise ProofFailed(f"found {found}, published {expected_checksum}")
        return Flip(0.0, found)

    async def canary(self, tokens: list[int]) -> CanaryRead:
        return CanaryRead([-0.5] * (len(tokens) - 1), [0.125, self.decoding_differs])

    async def exclude(self, reason: str) -> None:
        say("excluded", reason=reason)


async def node(node_id: str, credentials: str = "", transport: str = "gloo", **faults: Any) -> None:
    FaultyGroup.fault, FaultyGroup.at = faults.pop("fault", ""), faults.pop("at", -1)
    count_pieces(PlaneGroup)
    target = BufferTarget(**faults)
    credential = load_credential(credentials, "node", node_id) if credentials else None
    client = WeightClient(node_id, target, credential=credential, transports=receivable(transport))
    rig = _rig
    assert rig is not None
    asyncio.get_running_loop().add_reader(rig.fileno(), lambda: client.follow(*json.loads(rig.recv_bytes())))
    say("up")
    state = client.state
    while True:
        now = await client.wait_change(1)
        if (now.version, now.incarnation) != (state.version, state.incarnation):
            assert target.weights is not None
            value = next(iter(flat_buffer.view(target.weights, target.receiver.layout)))[1].view(-1)[0].item()  # type: ignore[arg-type]
            say("active", version=now.version, incarnation=now.incarnation, value=value)
        state = now


def run_node(node_id: str, options: dict[str, Any], rig: Connection) -> None:
    """The process: addresses to follow come in, JSON of every event goes out; `options` are those of `node`."""
    global _rig
    _rig = rig
    torch.set_num_threads(1)
    asyncio.run(node(node_id, **options))


class Lines:
    """The rig's end as a node uses it: commands come in and events go out."""

    def __init__(self, folder: Path, name: str) -> None:
        self._commands = os.open(folder / f"{name}.do", os.O_RDWR)  # as its own writer it never reads an end
        self._said = os.open(folder / f"{name}.said", os.O_WRONLY | os.O_APPEND)

    def fileno(self) -> int:
        return self._commands

    def recv_bytes(self) -> bytes:
        """The next command; waits for it."""
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._commands, 1)
        return line

    def send_bytes(self, data: bytes) -> None:
        os.write(self._said, data + b"\n")

    def say(self, event: str, **what: object) -> None:
        self.send_bytes(json.dumps({"event": event, "time": time.time(), **what}).encode())


def value(version: int) -> float:
    """The first element of a version, which nodes tell."""
    return float(version % VALUES)


def parts(size_bytes: int, sources: int) -> list[list[tuple[str, tuple[int]]]]:
    """Names and shapes of bfloat16 tensors: one for each source, of about the same size."""
    words = size_bytes // 2
    ends = [words * (i + 1) // sources for i in range(sources)]
    return [[(f"weights.{i}", (end - start,))] for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


class Rank:
    """A source's part of every version: one tensor of random bits."""

    def __init__(self, lines: Lines) -> None:
        self.say, self._words = lines.say, torch.zeros(0, dtype=torch.int16)
        self._named: list[tuple[str, torch.Tensor]] = []

    def obey(self, command: dict[str, Any]) -> None:
        getattr(self, command.pop("do"))(**command)

    def make(self, version: int, size_bytes: int, changed: float | None, number: int, sources: int) -> None:
        """Event `made`. `changed`: the share that moves by one unit since the version before; None: all is new.

        Few elements of bfloat16 weights change in a step of RL, nearly all by one unit (docs/delta.md).
        """
        ((name, (count,)),) = parts(size_bytes, sources)[number]
        chance = torch.Generator().manual_seed(version * sources + number)
        if changed is None:
            self._words = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16, generator=chance)
        else:
            at = torch.randint(1, count, (int(changed * count),), generator=chance)
            self._words[at] += 2 * torch.randint(0, 2, at.shape, dtype=torch.int16, generator=chance) - 1
        weights = self._words.view(torch.bfloat16)
        weights[0] = value(version)
        self._named = [(name, weights)]
        self.say("made", version=version)


class Learner(Rank):
    """Publishers by name. Publishing to several at once is a star: each of them sends a copy of its own."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self._publishers: dict[str, WeightPublisher] = {}
        self._told: dict[str, dict[str, Any]] = {}
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def start(self, name: str, incarnation: int, weights: dict[str, Any], credentials: str | None) -> None:
        """Event `listening`: a publisher with these keys of `weights` is up at `address`."""
        publisher = WeightPublisher(incarnation, "bfloat16", WeightsConfig(**weights), credentials=credentials)
        address = publisher.start()
        self._publishers[name] = publisher
        self.say("listening", name=name, address=address)

    def share(self, name: str, size_bytes: int, sources: int) -> None:
        """Send the first part only. Event `shared`, with what the other sources must know."""
        publisher = self._publishers[name]
        publisher.share(parts(size_bytes, sources))  # type: ignore[arg-type]
        self.say("shared", name=name, lead=msgspec.to_builtins(publisher.lead))

    def publish(self, names: list[str], version: int) -> None:
        """Event `published`; its time is the one before the first publisher got the version."""
        began = time.time()
        for name in names:
            self._publishers[name].publish(version, self._named, None)
        self.say("published", version=version, time=began, copied_s=time.time() - began)

    def close(self, names: list[str]) -> None:
        """Event `closed`."""
        for name in names:
            self._publishers.pop(name).close()
        self.say("closed", names=names)

    def _watch(self) -> None:
        """Event `stats`, whenever the figures of a publisher have changed."""
        while True:
            for name, publisher in list(self._publishers.items()):
                figures = asdict(publisher.stats())
                del figures["undelivered"]  # it changes all the time
                if figures != self._told.get(name):
                    self._told[name] = figures
                    self.say("stats", name=name, **figures)
            time.sleep(LOOK_S)


class Source(Rank):
    """A rank beside the lead."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self._remote: RemoteSource | None = None

    def start(
        self, number: int, size_bytes: int, sources: int, lead: object, weights: dict[str, Any], credentials: str | None
    ) -> None:
        """Serve part `number`; `lead` is that of `shared`. Event `started`."""
        named, told = parts(size_bytes, sources), msgspec.convert(lead, LeadEndpoint)
        options = {"dtype": "bfloat16", "weights": WeightsConfig(**weights), "credentials": credentials}
        self._remote = RemoteSource(number, named, told, **options)  # type: ignore[arg-type]
        self.say("started", incarnation=told.incarnation)

    def publish(self, version: int, names: list[str]) -> None:
        """Event `published`, with the time before."""
        assert self._remote is not None, "publish before start"
        began = time.time()
        self._remote.publish(version, self._named)
        self.say("published", version=version, time=began)

    def close(self, names: list[str]) -> None:
        """Event `closed`."""
        if self._remote is not None:
            self._remote.close()
        self._remote = None
        self.say("closed", names=names)


def main(kind: str, folder: str, name: str, options: str) -> None:
    """`kind` is node, learner or source."""
    torch.set_num_threads(1)
    lines, given = Lines(Path(folder), name), json.loads(options)
    if kind == "node":
        run_node(given.pop("id"), given, lines)  # type: ignore[arg-type]
    rank = {"learner": Learner, "source": Source}[kind](lines)
    lines.say("up")
    while True:
        rank.obey(json.loads(lines.recv_bytes()))
