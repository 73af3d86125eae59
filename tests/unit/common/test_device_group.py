"""Device broadcasts up to the library's door, and NCCL where there is no device."""

import os
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from common.errors import UsageError
from common.weights.collectives import Meeting
from common.weights.messages import Epoch
from common.weights.transports import nccl, registry
from common.weights.transports.device import DeviceGroup, own_stream
from tests.waiting import LIMIT_S

CPU = torch.device("cpu")
ANOTHER = torch.device("cpu", 0)  # counts as a device that the buckets are not on
EPOCH = Epoch(1, 1, 2, 0.3, "nccl")
MEETING = Meeting(0.3, lambda key, value: None)


class Library:
    """Blocks in a call until it is aborted, or for ever."""

    def __init__(self, blocks: str, aborts: bool = True) -> None:
        self.blocks, self.aborts = blocks, aborts
        self.woken, self.calls, self.aborted = threading.Event(), 0, threading.Event()
        self.released = threading.Event()

    def form(self, epoch: Epoch) -> "Library":
        self._block("form")
        return self

    def broadcast(self, buffer: torch.Tensor) -> None:
        self.calls += 1
        self._block("broadcast" if self.calls > 1 else "first")
        buffer.fill_(7)

    def abort(self) -> None:
        self.aborted.set()
        if not self.aborts:
            self.released.wait(LIMIT_S)
        self.woken.set()

    def _block(self, where: str) -> None:
        if where == self.blocks and not self.woken.wait(LIMIT_S):
            raise OSError("the library gave up by itself")
        if where == self.blocks:
            raise ValueError("aborted")


@pytest.mark.parametrize("blocks", ["form", "first"])
def test_a_group_that_does_not_form_is_given_up_at_the_deadline(blocks: str) -> None:
    library = Library(blocks)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"epoch 1 did not form within 0.3 s"):
        DeviceGroup(EPOCH, library.form, CPU)
    assert time.monotonic() - began < LIMIT_S
    if blocks == "first":
        assert library.aborted.wait(LIMIT_S)
    library.woken.set()


@pytest.mark.parametrize("aborts", [True, False], ids=["aborts", "hangs in abort"])
def test_a_broadcast_that_hangs_is_aborted_at_the_deadline_and_not_waited_for(aborts: bool) -> None:
    library = Library("broadcast", aborts)
    group = DeviceGroup(EPOCH, library.form, ANOTHER)
    bucket = torch.zeros(10, dtype=torch.uint8)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"a broadcast did not finish within 0.2 s; its communicator was aborted"):
        group.post(bucket, 0.2)()
    assert time.monotonic() - began < LIMIT_S
    assert library.aborted.wait(LIMIT_S)
    assert not bucket.any(), "what comes after the deadline is not written into the buffer"
    with pytest.raises(RuntimeError, match="closed"):
        group.post(bucket, 0.2)()
    library.woken.set()
    library.released.set()


@pytest.mark.parametrize(("ends", "says"), [("close", r"closed|aborted"), ("library", "aborted")])
def test_closing_and_errors_of_the_library_end_a_broadcast(ends: str, says: str) -> None:
    library = Library("broadcast")
    group = DeviceGroup(EPOCH, library.form, CPU)
    ending = threading.Timer(0.2, group.close if ends == "close" else library.woken.set)
    ending.start()
    with pytest.raises(RuntimeError, match=says):
        group.post(torch.zeros(10, dtype=torch.uint8), LIMIT_S)()
    ending.join()
    group.close()


@pytest.mark.parametrize(("device", "at_the_root"), [(ANOTHER, 1), (CPU, 7)], ids=["bounced", "in place"])
def test_only_buckets_that_are_not_on_the_device_pass_through_the_bounce_buffer(
    device: torch.device, at_the_root: int
) -> None:
    for rank, expected in ((1, 7), (0, at_the_root)):
        group = DeviceGroup(structs.replace(EPOCH, rank=rank), Library("never").form, device)
        bucket = torch.ones(10, dtype=torch.uint8)
        for part in (bucket[:4], bucket[4:]):
            group.post(part, LIMIT_S)()
        assert bucket.tolist() == 10 * [expected]
        group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nccl_without_a_device_is_a_usage_error_that_says_what_to_do() -> None:
    says = "weights.transport: nccl needs a CUDA device on learner and nodes; found none; use gloo"
    for ask in (lambda: registry.require("nccl"), lambda: registry.open_group(EPOCH, MEETING)):
        with pytest.raises(UsageError, match=says):
            ask()
    registry.require("gloo")
    registry.require("relay")


def test_names_of_transports_that_do_not_exist_are_refused_and_nodes_always_have_the_relay() -> None:
    with pytest.raises(RuntimeError, match="over 'pigeon', this version knows relay, gloo, nccl"):
        registry.open_group(Epoch(1, 1, 2, 1.0, "pigeon"), MEETING)
    assert registry.receivable("gloo") == ("gloo", "relay")
    assert registry.receivable("relay") == ("relay",)
    assert registry.receivable("nccl")[0] == "nccl"


def test_groups_that_threads_form_are_on_the_device_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[torch.device] = []
    monkeypatch.setattr(nccl, "_device", None)
    monkeypatch.setattr(nccl, "require_device", lambda: None)
    monkeypatch.setattr(nccl.DeviceGroup, "__init__", lambda self, epoch, form, device: formed.append(device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    nccl.remember_device()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # as in a thread that has not chosen one
    nccl.NcclGroup(EPOCH, MEETING)
    assert formed == [torch.device("cuda", 3)]


def test_nccls_communicator_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    class ProcessGroup:
        class Options:
            _timeout = None

        def __init__(self, *_: object) -> None:
            seen.append(os.environ.get(nccl.HANDLING))

        def abort(self) -> None:
            seen.append("aborted")

    monkeypatch.setattr(nccl.dist, "ProcessGroupNCCL", ProcessGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for before in (None, "3"):
        if before is None:
            monkeypatch.delenv(nccl.HANDLING, raising=False)
        else:
            monkeypatch.setenv(nccl.HANDLING, before)
        nccl.NcclCommunicator(EPOCH, MEETING, CPU).abort()
        assert os.environ.get(nccl.HANDLING) == before
    assert seen == ["0", "aborted", "0", "aborted"]


def test_a_broadcast_over_nccl_returns_when_the_devices_stream_has_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class ProcessGroup:
        class Options:
            _timeout = None

        def __init__(self, *_: object) -> None: ...

        def broadcast(self, buffers: list[torch.Tensor], options: object) -> SimpleNamespace:
            return SimpleNamespace(wait=lambda: asked.append(f"wait for {len(buffers[0])}"))

    stream = SimpleNamespace(synchronize=lambda: asked.append("synchronize"))
    monkeypatch.setattr(nccl.dist, "ProcessGroupNCCL", ProcessGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(f"set {device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    device = torch.device("cuda", 1)
    nccl.NcclCommunicator(EPOCH, MEETING, device).broadcast(torch.zeros(5, dtype=torch.uint8))
    assert asked == ["set cuda:1", "wait for 5", "synchronize"]


def test_a_thread_of_a_cuda_group_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream on {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    with own_stream(torch.device("cuda", 2)) as stream:
        assert stream == "stream on cuda:2"
