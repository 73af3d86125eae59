"""When this node's process reached each stage on its way into the job, from its start to its first group."""

import os
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from broker.contract import JoinTimes
from common.process.lifecycle import start_ticks

Stage = Literal["registered", "engine", "staged", "active", "leased", "delivered"]


class JoinTimer:
    """The stages of broker.contract.JoinTimes; each counts when it is reached for the first time."""

    def __init__(self, age_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`age_s`: as `process_age_s`, which stands in for None."""
        age_s = process_age_s() if age_s is None else age_s
        self._clock, self._origin = clock, clock() - age_s
        self.times = JoinTimes(started_s=time.time() - age_s)  # may be read from any thread

    def reached(self, stage: Stage) -> bool:
        """Note a stage; True when it is new. For one thread."""
        if getattr(self.times, stage):
            return False
        self.times = msgspec.structs.replace(self.times, **{stage: self._clock() - self._origin})
        return True


def process_age_s() -> float:
    """Seconds since this process started, to a hundredth; 0 where the operating system does not say (not Linux)."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
