"""Receivers in processes of their own, and a sender of each transport, for the contract of the weight transports."""

import base64
import contextlib
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import torch

from common.weights.transports.groups import RelayedStore, in_turn
from common.weights.transports.relay import RelayServer
from common.weights.wire import flat_buffer, messages
from common.weights.wire.layout import Layout
from common.weights.wire.messages import Epoch, Part, Publish, StoreEntries
from common.weights.wire.pieces import PartBuffer, new_part
from tests import forked
from tests.contract.transport_receiver import CLOSE, main, open_any
from tests.waiting import LIMIT_S


class Child:
    """transport_receiver.py in a process."""

    def __init__(self, layout: Layout, fault: str = "", at: int = -1) -> None:
        self.pipe, theirs = forked.context().Pipe()
        self.process: BaseProcess = forked.start(main, theirs, fault, at)
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
