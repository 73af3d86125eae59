"""The protocol of every transport of buckets, and the parts that the collective transports share.

The learner uses torch.distributed's default group, so this module leaves it alone. The learner is rank 0 and hosts the
store where the members of a collective meet. Each transport is a module in transports/; registry.py lists them.
"""

import contextlib
import datetime
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import distributed

from common.weights.messages import Epoch

ROOT = 0
POSTED = 2  # buckets under way: the one that is waited for and the next
dist: Any = distributed  # these classes are public in use but untyped in torch


class Group(Protocol):
    """A formed group of the learner (rank 0) and the nodes of one epoch, or one node's way to a relay.

    Buckets are CPU memory on both sides. Completion proves nothing, so receivers verify every bucket.
    """

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Send rank 0's bytes into everyone's `bucket` [n] uint8; returns a function that waits for it.

        Buckets go out and are waited for in the order of posting. `timeout_s` counts from the end of the one before.
        Raises RuntimeError, here or from the wait, when it failed or was late; the group is of no use then.
        """
        ...

    def close(self) -> None:
        """Give up at once; any thread may call it, also while another one waits."""
        ...


GroupFactory = Callable[[Epoch], Group]


def in_turn(group: Group, payload: torch.Tensor, bucket_bytes: int, publish_timeout_s: float) -> Iterator[torch.Tensor]:
    """Broadcast `payload` [n] uint8; yields every bucket when it is through, while the next ones travel.

    Raises as `Group.post`. When it ends, also by an error, nothing is under way and the payload's memory may be used
    again. An early end closes the group.
    """
    posted = deque[tuple[torch.Tensor, Callable[[], None]]]()
    try:
        for at in range(0, len(payload), bucket_bytes):
            bucket = payload[at : at + bucket_bytes]
            posted.append((bucket, group.post(bucket, bucket_timeout(publish_timeout_s))))
            if len(posted) == POSTED:
                yield _arrived(posted)
        while posted:
            yield _arrived(posted)
    finally:
        if posted:
            group.close()
        while posted:
            with contextlib.suppress(Exception):  # an earlier failure is being raised already
                _arrived(posted)


def _arrived(posted: deque[tuple[torch.Tensor, Callable[[], None]]]) -> torch.Tensor:
    bucket, wait = posted.popleft()
    wait()
    return bucket


class Store:
    """The learner's rendezvous store, listening on one interface only."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of `address` (host name or IP); raises OSError when it cannot be bound."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        limit = datetime.timedelta(seconds=30)
        with socket.create_server((address, 0), family=family, backlog=128) as listener:
            self.host: str = address
            self.port: int = listener.getsockname()[1]
            # TCPStore binds every interface by itself; a listening socket handed over keeps it on this one.
            fd = listener.detach()
            self._server = dist.TCPStore(
                address, self.port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=fd
            )


def epoch_store(epoch: Epoch) -> Any:
    """The part of the learner's store that belongs to `epoch`, for a process group; raises RuntimeError."""
    timeout = datetime.timedelta(seconds=epoch.timeout_s)
    store = dist.TCPStore(epoch.store_host, epoch.store_port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(f"epoch/{epoch.epoch}", store)


def from_root() -> Any:
    """Options of a broadcast of one tensor from rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = ROOT, 0
    return options


def bucket_timeout(publish_timeout_s: float) -> float:
    """Seconds that one bucket may take when the whole publish may take `publish_timeout_s`."""
    return max(0.5, publish_timeout_s / 4)


def reason_of(error: Exception) -> str:
    """The first line of a transport's error, without gloo's source path and advice."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    text = re.sub(r"\[/[^\]]*\.cc:\d+\]\s*", "", text)
    return text.split(". This is typically caused")[0]
