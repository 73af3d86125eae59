"""Receivers in processes of their own, and a sender of each transport, for the contract of the weight transports."""

import itertools
import json
import threading
import time
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import torch

from common.weights import messages, packing
from common.weights.collectives import Store, in_turn
from common.weights.layout import Layout
from common.weights.messages import Epoch, Publish
from common.weights.transports.relay import RelayServer
from tests import forked
from tests.contract.transport_receiver import CLOSE, main, open_any
from tests.waiting import LIMIT_S


class Child:
    """transport_receiver.py in a process."""

    def __init__(self, layout: Layout, fault: str = "", at: int = -1) -> None:
        self.pipe, theirs = forked.context().Pipe()
        self.process: BaseProcess = forked.start(main, theirs, fault, at)
        theirs.close()
        self.tell(messages.Welcome(0, layout))

    def tell(self, message: messages.LearnerMessage) -> None:
        self.pipe.send_bytes(messages.encode(message))

    def hear(self, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """The next outcome; {} when none came in time."""
        return json.loads(self.pipe.recv_bytes()) if self.pipe.poll(timeout_s) else {}

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
        self.store = Store("127.0.0.1") if transport != "relay" else None
        self.server = RelayServer("127.0.0.1", secured=False) if transport == "relay" else None
        self.group: Any = None
        self.epoch: Epoch | None = None

    def form(self, children: list[Child], size: int = 0) -> None:
        """A new epoch of these children; `size` when more are expected. Relayed ones get theirs with each payload."""
        if self.server is not None:
            return
        assert self.store is not None
        self.drop()
        self.epoch = Epoch(
            next(self.numbers), 0, size or len(children) + 1, self.store.host, self.store.port, self.timeout_s,
            self.transport,
        )  # fmt: skip
        for rank, child in enumerate(children, start=1):
            child.tell(msgspec.structs.replace(self.epoch, rank=rank))

    def announce(self, children: list[Child], flat: torch.Tensor, bucket: int, spoil: int = -1) -> Publish:
        """Tell the children what comes; the checksum of bucket `spoil` is wrong."""
        layout = layout_of(flat)
        sums = packing.all_checksums(flat, bucket)[0]
        if spoil >= 0:
            sums[spoil] = "0" * 32
        made = Publish(
            0, next(self.versions), 0, layout.digest, bucket, sums, packing.checksum(flat), self.timeout_s,
            payload_bytes=flat.numel(),
        )  # fmt: skip
        for child in children:
            if self.server is not None:
                source = self.server.source(f"{made.version}-{id(child)}", flat, LIMIT_S)
                epoch = Epoch(next(self.numbers), 1, 2, "", 0, self.timeout_s, "relay", source)
                child.tell(epoch)
            else:
                assert self.epoch is not None
                epoch = self.epoch
            child.tell(msgspec.structs.replace(made, epoch=epoch.epoch))
        return made

    def send(self, flat: torch.Tensor, bucket: int) -> str:
        """Take part in the broadcast, as learner/publish/attempt.py does; the error, '' when there was none."""
        if self.server is not None:
            return ""
        try:
            self.group = self.group if self.group is not None else open_any(self.epoch)  # type: ignore[arg-type]
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
