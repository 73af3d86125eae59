"""Broadcasts over gloo, each with a deadline.

When a member dies, the others wait at most for the timeout of one bucket. Some of them get an error from gloo at once;
the rest wait for the timeout.
"""

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch

from common.process.local_address import host_and_port, local_address
from common.weights.collectives import Meeting, dist, from_root
from common.weights.messages import Epoch


class GlooGroup:
    """ProcessGroupGloo of the epoch's members."""

    def __init__(self, epoch: Epoch, meeting: Meeting) -> None:
        """Meet the other members; raises RuntimeError when not all come within `epoch.timeout_s`."""
        self._group: Any = process_group(epoch, meeting)
        self._meeting = meeting  # the group's threads may ask it later

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        group = self._group
        if group is None:
            raise RuntimeError("the group was closed")
        options = from_root()
        options.timeout = datetime.timedelta(seconds=timeout_s)
        return group.broadcast([bucket], options).wait  # one thread works through them: the clock starts with its turn

    def close(self) -> None:
        """Drop the group; its destructor takes tens of milliseconds, so a side thread runs it."""
        doomed, self._group = [self._group], None
        threading.Thread(target=doomed.clear, daemon=True, name="drop-gloo-group").start()


def process_group(epoch: Epoch, meeting: Meeting) -> Any:
    """A ProcessGroupGloo of the epoch's members, on the interface that leads to the learner; raises RuntimeError."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=epoch.timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(*host_and_port(epoch.reach)))]
    return dist.ProcessGroupGloo(meeting, epoch.rank, epoch.world_size, options)
