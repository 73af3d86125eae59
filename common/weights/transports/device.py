"""Broadcasts between devices: every library call has a deadline, and host memory passes through a device's.

A collective between devices may never end when a member is gone. So one thread of the group makes all calls, and asks
the library again and again whether it is through. At the deadline the caller continues, and the thread aborts the
communicator, also one that is still forming, which frees the devices of the survivors. The contract suite runs all of
it over gloo, with the CPU as the device.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from common.weights.collectives import ROOT
from common.weights.messages import Epoch

logger = logging.getLogger(__name__)

LOOK_S = 0.02  # a wait notices within this time that the group was closed
PAUSES_S = 1e-4, 2e-3  # the shortest and the longest of the thread that asks; each is a tenth longer than the last


def own_stream(device: torch.device | None) -> AbstractContextManager[object]:
    """Lets what this thread asks of `device` not wait for what the others have asked for."""
    if device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


class Communicator(Protocol):
    """A library's group, from when it begins to form; its calls wait for no other member."""

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Begin to bring rank 0's bytes into everyone's device `buffer` [n] uint8."""

    def pending(self) -> bool:
        """Whether forming, or the broadcast begun last, is under way; raises when it failed."""
        ...

    def abort(self) -> None:
        """Give up what is under way, and free all that the communicator has."""


class DeviceGroup:
    """A Group on `device`; only buckets that are elsewhere pass through a bounce buffer there."""

    def __init__(self, epoch: Epoch, form: Callable[[Epoch], Communicator], device: torch.device) -> None:
        """Meet the others, at most `epoch.timeout_s`, or raise RuntimeError; the group's thread calls `form`."""
        self._is_root = epoch.rank == ROOT
        self._device = device
        self._bounce = torch.empty(0, dtype=torch.uint8, device=device)
        self._communicator: Communicator | None = None
        self._closing = threading.Event()
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="device-broadcasts").start()

        def connect() -> None:
            self._communicator = form(epoch)
            self._finish(self._communicator)
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device))  # libraries connect at their first use

        self._wait(self._call(connect), epoch.timeout_s, f"epoch {epoch.epoch} did not form")

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Rank 0's bytes into everyone's `bucket` [n] uint8; the wait raises RuntimeError at the deadline."""
        done = self._call(lambda: self._cross(bucket))
        return lambda: self._wait(done, timeout_s, "a broadcast did not finish")

    def close(self) -> None:
        """Drop the group; its thread aborts what is under way."""
        self._closing.set()
        self._calls.put(None)

    def _cross(self, bucket: torch.Tensor) -> None:
        if self._closing.is_set():
            return  # posted behind one that failed: its communicator is being aborted
        if bucket.device == self._device:
            self._broadcast(bucket)
            return
        if self._bounce.numel() < bucket.numel():
            self._bounce = torch.empty(bucket.numel(), dtype=torch.uint8, device=self._device)
        buffer = self._bounce[: bucket.numel()]
        if self._is_root:
            buffer.copy_(bucket)
        self._broadcast(buffer)
        if not self._is_root and not self._closing.is_set():
            bucket.copy_(buffer)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        assert self._communicator is not None
        self._communicator.broadcast(buffer)
        self._finish(self._communicator)

    def _finish(self, communicator: Communicator) -> None:
        pause_s, longest_s = PAUSES_S
        while communicator.pending():
            if self._closing.is_set():
                raise RuntimeError("the group was closed")
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, longest_s)

    def _call(self, call: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._calls.put((call, done))
        return done

    def _wait(self, done: Future[None], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._closing.is_set():
                raise RuntimeError("the group was closed")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.close()
                raise RuntimeError(f"{what} within {timeout_s:g} s; its communicator was aborted")
            try:
                return done.result(min(left_s, LOOK_S))
            except TimeoutError:
                continue  # the call's own errors are RuntimeErrors
            except RuntimeError:
                self.close()
                raise

    def _work(self) -> None:
        with own_stream(self._device):
            while (item := self._calls.get()) is not None:
                call, done = item
                try:
                    call()
                except Exception as error:  # the library's errors are raised where the call is waited for
                    done.set_exception(error if isinstance(error, RuntimeError) else RuntimeError(str(error)))
                else:
                    done.set_result(None)
            try:
                if self._communicator is not None:
                    self._communicator.abort()
            except Exception:  # no caller waits for it
                logger.exception("a communicator could not be aborted")
