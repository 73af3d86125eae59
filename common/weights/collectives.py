"""What every transport of buckets is to the rest of the weight plane, and what the collective ones share.

torch.distributed's default group is not touched; a learner may hold its own. The learner is rank 0 and hosts the
store where the members of a collective meet. transports/ has a module for each way, transports/registry.py the list.
"""

import contextlib
import datetime
import re
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import distributed

from common.weights.messages import Epoch

ROOT = 0
POSTED = 2  # buckets: the one that is waited for and the one behind it
_dist: Any = distributed  # these classes are public in use but untyped in torch


class Group(Protocol):
    """A formed group of the learner (rank 0) and the nodes of one epoch, or one node's way to a relay.

    Buckets are CPU memory on both sides, whatever lies between. Completion proves nothing: whoever receives verifies.
    """

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Rank 0's bytes into everyone's `bucket` [n] uint8, behind what was posted before; returns what waits for it.

        Posted buckets are waited for in their order, and `timeout_s` counts from the end of the one before.

        Raises:
            RuntimeError: here or from the wait: it did not finish within `timeout_s`, a member is gone, or the group
                was closed meanwhile. The group is of no use any more, whatever else was posted.
        """
        ...

    def begin(self, payload_bytes: int) -> None:
        """What is posted next carries a payload of so many bytes from its start; called by every member before it."""
        ...

    def close(self) -> None:
        """Give everything up, at once; any thread may call it, also while another one waits."""
        ...


GroupFactory = Callable[[Epoch], Group]


def in_turn(group: Group, buckets: Iterable[torch.Tensor], timeout_s: float) -> Iterator[torch.Tensor]:
    """Broadcast `buckets`, each [n] uint8, and yield every one when it is through.

    The next ones are under way while the caller looks at one: they travel while it is verified. Raises
    RuntimeError as `Group.post` does. When it ends, nothing is under way any more: whatever happened, the buckets'
    memory may be used for something else. Where it ends early, the group is closed.
    """
    posted = deque[tuple[torch.Tensor, Callable[[], None]]]()
    try:
        for bucket in buckets:
            posted.append((bucket, group.post(bucket, timeout_s)))
            if len(posted) == POSTED:
                yield _arrived(posted)
        while posted:
            yield _arrived(posted)
    finally:
        if posted:
            group.close()
        while posted:
            with contextlib.suppress(Exception):  # who comes here has a failure already
                _arrived(posted)


def _arrived(posted: deque[tuple[torch.Tensor, Callable[[], None]]]) -> torch.Tensor:
    bucket, wait = posted.popleft()
    wait()
    return bucket


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


def meeting_place(epoch: Epoch) -> Any:
    """The part of the learner's store that belongs to `epoch`, for a process group; raises RuntimeError."""
    timeout = datetime.timedelta(seconds=epoch.timeout_s)
    store = _dist.TCPStore(epoch.store_host, epoch.store_port, is_master=False, wait_for_workers=False, timeout=timeout)
    return _dist.PrefixStore(f"epoch/{epoch.epoch}", store)


def bucket_timeout(publish_timeout_s: float) -> float:
    """Seconds that one bucket may take when the whole publish may take `publish_timeout_s`."""
    return max(0.5, publish_timeout_s / 4)


def reason_of(error: Exception) -> str:
    """The first line of a transport's error, without gloo's source path and advice."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    text = re.sub(r"\[/[^\]]*\.cc:\d+\]\s*", "", text)
    return text.split(". This is typically caused")[0]


def local_address(host: str, port: int) -> str:
    """The address of this machine that reaches `host`, the one to listen on. Sends nothing; raises OSError."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connection:
        connection.connect(place)
        return str(connection.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
