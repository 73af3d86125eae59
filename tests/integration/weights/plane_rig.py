"""The weight plane with real processes, sockets and transports, for tests; only the engine is replaced by a buffer."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from common.config.schema import WeightsConfig
from common.weights.source.publisher import WeightPublisher
from common.weights.transports.groups import GroupFactory, open_group
from common.weights.wire.messages import Canary
from tests import forked
from tests.integration.weights import weight_plane_node
from tests.waiting import LIMIT_S, until

BUCKET = 64 << 10


class NodeProcess:
    """weight_plane_node.py as a child; its events arrive in order."""

    def __init__(self, node_id: str, options: dict[str, Any]) -> None:
        self._pipe, theirs = forked.context().Pipe()
        self.process = forked.start(weight_plane_node.run, node_id, options, theirs)
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
        raise AssertionError(f"no {event} {fields} within {limit_s:g} s; saw {self.events}")

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
