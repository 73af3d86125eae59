"""The weight plane with real processes, sockets and transports, for tests; only the engine is replaced by a buffer."""

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any

import msgspec
import torch

from common.config.schema import WeightsConfig
from common.weights.collectives import GroupFactory
from common.weights.transports.registry import open_group
from learner.publish.publisher import WeightPublisher
from tests import forked
from tests.integration.weights import weight_plane_node
from tests.waiting import LIMIT_S

BUCKET = 64 << 10


class NodeProcess:
    """weight_plane_node.py as a child; its events arrive in order."""

    def __init__(self, node_id: str, *arguments: str) -> None:
        self.node_id = node_id
        theirs, self._orders = os.pipe()
        said, ours = os.pipe()
        self.process = forked.start(weight_plane_node.run, [node_id, *arguments], DupFd(theirs), DupFd(ours))
        os.close(theirs)
        os.close(ours)
        self._said = os.fdopen(said)
        self.events: list[dict[str, object]] = []
        self._queue: queue.Queue[dict[str, object]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._said:
            self._queue.put(json.loads(line))

    def follow(self, address: str, incarnation: int = 0) -> None:
        os.write(self._orders, f"{address} {incarnation}\n".encode())

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, event: str, limit_s: float = LIMIT_S, **fields: object) -> dict[str, object]:
        """The next event of this kind with these fields; earlier ones are kept in `events`."""
        end = time.monotonic() + limit_s
        while True:
            try:
                got = self._queue.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event} {fields} within {limit_s:g} s; saw {self.events}") from None
            self.events.append(got)
            if got["event"] == event and all(got.get(k) == v for k, v in fields.items()):
                return got

    def close(self) -> None:
        self.process.kill()  # also one that stands still
        self.process.join(LIMIT_S)
        self._reader.join(LIMIT_S)
        self._said.close()
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1


class Plane:
    """Starts publishers and nodes, and ends them."""

    def __init__(self) -> None:
        self.closing: list[Callable[[], None]] = []

    def publisher(
        self,
        incarnation: int = 0,
        factory: GroupFactory = open_group,
        credentials: str | None = None,
        **config: Any,
    ) -> WeightPublisher:
        """`config`: keys of `weights` that differ from their defaults."""
        weights = msgspec.structs.replace(WeightsConfig(anchor_every=0, timeout_s=60.0), **config)
        publisher = WeightPublisher(incarnation, "float32", weights, credentials, factory, BUCKET)
        self.closing.append(publisher.close)
        return publisher

    def following(self, address: str, *ids: str, arguments: tuple[str, ...] = ()) -> list[NodeProcess]:
        """Nodes that are up and follow the publisher there."""
        nodes = [NodeProcess(i, *arguments) for i in ids]
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


def weights(version: int, floats: int = 200_000) -> list[tuple[str, torch.Tensor]]:
    """About 13 buckets; every element tells the version."""
    return [("a.weight", torch.full((floats // 2, 2), float(version))), ("b.weight", torch.full((33,), float(version)))]
