"""The gloo group of one epoch: formed fast, every operation bounded, dropped off the path.

torch.distributed's default group is not touched; a learner may hold its own. The learner is rank 0 and hosts
the store; a node that died leaves the others waiting at most for the timeout of one bucket.
"""

import datetime
import re
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import distributed

from common.weights.messages import Epoch

ROOT = 0
_dist: Any = distributed  # these classes are public in use but untyped in torch


class Group(Protocol):
    """A formed group of the learner (rank 0) and the nodes of one epoch."""

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> None:
        """Rank 0's bytes into everyone's `bucket` [n] uint8; raises RuntimeError when it does not finish in time."""
        ...

    def close(self) -> None: ...


GroupFactory = Callable[[Epoch], Group]


class Store:
    """The learner's rendezvous store, listening on one interface only."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of `address` (host name or IP); raises OSError when it cannot be bound."""
        with socket.create_server((address, 0), family=_family(address), backlog=128) as listener:
            self.host: str = address
            self.port: int = listener.getsockname()[1]
            # TCPStore binds every interface by itself; a listening socket handed over keeps it on this one.
            self._server = _dist.TCPStore(
                address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=30),
                master_listen_fd=listener.detach(),
            )


class GlooGroup:
    """ProcessGroupGloo over a store prefix of the epoch."""

    def __init__(self, epoch: Epoch) -> None:
        """Meet the other members; blocks until all came.

        Raises:
            RuntimeError: not everyone came within `epoch.timeout_s`, or the store is gone.
        """
        timeout = datetime.timedelta(seconds=epoch.timeout_s)
        store = _dist.TCPStore(
            epoch.store_host, epoch.store_port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        options = _dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._threads = 1
        options._devices = [
            _dist.ProcessGroupGloo.create_device(hostname=_local_address(epoch.store_host, epoch.store_port))
        ]
        self._group = _dist.ProcessGroupGloo(
            _dist.PrefixStore(f"epoch/{epoch.epoch}", store), epoch.rank, epoch.world_size, options
        )

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> None:
        """Rank 0's bytes into everyone's `bucket` [n] uint8; raises RuntimeError when it does not finish in time."""
        options = _dist.BroadcastOptions()
        options.rootRank = ROOT
        options.rootTensor = 0
        options.timeout = datetime.timedelta(seconds=timeout_s)
        self._group.broadcast([bucket], options).wait()

    def close(self) -> None:
        """Drop the group; its destructor takes tens of milliseconds, so a side thread runs it."""
        doomed = [self._group]
        del self._group
        threading.Thread(target=doomed.clear, daemon=True, name="drop-gloo-group").start()


def bucket_timeout(publish_timeout_s: float) -> float:
    """Seconds that one bucket may take when the whole publish may take `publish_timeout_s`."""
    return max(0.5, publish_timeout_s / 4)


def reason_of(error: Exception) -> str:
    """The first line of a collective's error, without gloo's source path and advice."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    text = re.sub(r"\[/[^\]]*\.cc:\d+\]\s*", "", text)
    return text.split(". This is typically caused")[0]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _local_address(host: str, port: int) -> str:
    """The address of this machine that reaches `host`; gloo listens on it and on no other."""
    with socket.create_connection((host, port), timeout=5) as connection:
        return str(connection.getsockname()[0])
