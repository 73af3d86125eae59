"""A process that receives over any transport, told what to do message by message, and can be made to fail midway."""

import base64
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from common.weights.receive.receiver import Receiver
from common.weights.transports.groups import BroadcastGroup, RelayedStore, open_group, process_group
from common.weights.transports.nccl import DeviceGroup
from common.weights.wire import flat_buffer, messages
from common.weights.wire.messages import Epoch
from common.weights.wire.pieces import PartBuffer
from tests import device

CLOSE = b"close"
NCCL = ["nccl"] if device.CUDA else []  # all members share a GPU; their buckets are in host memory
DEVICES = {"device": torch.device("cpu"), "device from host memory": torch.device("cpu", 0)}  # buckets are on the first


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

    def counted(buffer: PartBuffer, sealed: Any) -> None:
        kind.count(sealed)
        take_in(buffer, sealed)

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


def main(commands: Connection, fault: str = "", at: int = -1) -> None:
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
