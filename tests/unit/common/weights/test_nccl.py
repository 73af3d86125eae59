"""Device broadcasts up to the library's door, and NCCL where there is no device."""

import ctypes
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from common.config.schema import WeightsConfig
from common.errors import UsageError
from common.weights.source.publisher import WeightPublisher
from common.weights.transports import groups, nccl
from common.weights.transports.groups import RelayedStore
from common.weights.transports.nccl import DeviceGroup, own_stream
from common.weights.wire.failures import GivenUp, GroupFailed, Late
from common.weights.wire.messages import Epoch
from tests.rigs.waiting import LIMIT_S, until

CPU = torch.device("cpu")
ANOTHER = torch.device("cpu", 0)  # counts as a device that the buckets are not on
EPOCH = Epoch(1, 1, 2, 0.3, "nccl")
EPOCH_OF_ROOT = structs.replace(EPOCH, rank=0, timeout_s=10.0)
STORE = RelayedStore(0.3, lambda key, value: None)


class Library:
    """A library that in a call, or with what it has begun, is not through until it is woken."""

    def __init__(self, blocks: str, aborts: bool = True) -> None:
        self.blocks, self.aborts = blocks, aborts
        self.woken, self.calls, self.aborted = threading.Event(), 0, threading.Event()
        self.released = threading.Event()
        self.buffer = torch.empty(0)

    def form(self, epoch: Epoch) -> "Library":
        if self.blocks == "form":
            self.woken.wait(LIMIT_S)
        return self

    def broadcast(self, buffer: torch.Tensor) -> None:
        self.calls += 1
        self.buffer = buffer

    def pending(self) -> bool:
        if self.blocks == ("forming", "first", "broadcast")[min(self.calls, 2)]:
            if self.woken.is_set():
                raise ValueError("aborted")
            return True
        self.buffer.fill_(7)
        return False

    def abort(self) -> None:
        self.aborted.set()
        if not self.aborts:
            self.released.wait(LIMIT_S)


def until_no_thread_is_left() -> None:
    until(lambda: "device-broadcasts" not in [t.name for t in threading.enumerate()], "the end of the groups' threads")


@pytest.mark.parametrize("blocks", ["form", "forming", "first"])
def test_a_group_that_does_not_form_is_given_up_at_the_deadline_and_leaves_nothing(blocks: str) -> None:
    library = Library(blocks)
    began = time.monotonic()
    with pytest.raises(Late):
        DeviceGroup(EPOCH, library.form, CPU)
    assert time.monotonic() - began < LIMIT_S
    if blocks == "form":
        library.woken.set()  # a communicator that is there too late
    assert library.aborted.wait(LIMIT_S)
    until_no_thread_is_left()


@pytest.mark.parametrize("aborts", [True, False], ids=["aborts", "hangs in abort"])
def test_a_broadcast_that_hangs_is_aborted_at_the_deadline_and_not_waited_for(aborts: bool) -> None:
    library = Library("broadcast", aborts)
    group = DeviceGroup(EPOCH, library.form, ANOTHER)
    bucket = torch.zeros(10, dtype=torch.uint8)
    began = time.monotonic()
    with pytest.raises(Late):
        group.post(bucket, 0.2)()
    assert time.monotonic() - began < LIMIT_S
    assert library.aborted.wait(LIMIT_S)
    assert not bucket.any(), "what comes after the deadline is not written into the buffer"
    with pytest.raises(GivenUp):
        group.post(bucket, 0.2)()
    library.released.set()
    until_no_thread_is_left()


@pytest.mark.parametrize(("ends", "error"), [("close", (GivenUp, GroupFailed)), ("library", GroupFailed)])
def test_closing_and_errors_of_the_library_end_a_broadcast(ends: str, error: Any) -> None:
    library = Library("broadcast")
    group = DeviceGroup(EPOCH, library.form, CPU)
    ending = threading.Timer(0.2, group.close if ends == "close" else library.woken.set)
    ending.start()
    with pytest.raises(error):
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
    for ask in (lambda: groups.require("nccl"), lambda: groups.open_group(EPOCH, STORE)):
        with pytest.raises(UsageError, match=says):
            ask()
    groups.require("gloo")
    groups.require("relay")


def test_a_setting_that_lets_nccl_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    with pytest.raises(UsageError, match="NCCL_COMM_BLOCKING"):
        groups.require("nccl")


def test_names_of_transports_that_do_not_exist_are_refused_and_nodes_always_have_the_relay() -> None:
    with pytest.raises(GroupFailed) as refused:
        groups.open_group(Epoch(1, 1, 2, 1.0, "pigeon"), STORE)
    assert all(name in str(refused.value) for name in ("'pigeon'", "relay", "gloo", "nccl"))
    assert groups.receivable("gloo") == ("gloo", "relay")
    assert groups.receivable("relay") == ("relay",)
    assert groups.receivable("nccl")[0] == "nccl"


@pytest.mark.parametrize(
    "note",
    [nccl.remember_device, lambda: WeightPublisher(0, "bfloat16", WeightsConfig(transport="nccl"))],
    ids=["worker", "learner with buffers on the host"],
)
def test_groups_that_threads_form_are_on_the_device_of_the_worker(
    note: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    formed: list[torch.device] = []
    monkeypatch.setattr(nccl, "_device", None)
    monkeypatch.setattr(nccl, "require_device", lambda: None)
    monkeypatch.setattr(nccl.DeviceGroup, "__init__", lambda self, epoch, form, device: formed.append(device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    note()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # as in a thread that has not chosen one
    nccl.NcclGroup(EPOCH, STORE)
    assert formed == [torch.device("cuda", 3)]


class FakeNccl:
    """The functions of libnccl.so.2 that are used. Like NCCL it listens in a thread of its own for the members."""

    def __init__(self, states: list[int], init: int = nccl.IN_PROGRESS) -> None:
        self.states, self.init = states, init  # the answers of ncclCommGetAsyncError; the last one stays
        self.asked: list[str] = []
        self.listening: list[threading.Thread] = []

    def ncclGetUniqueId(self, unique: "ctypes._Pointer") -> int:
        bound = socket.create_server(("127.0.0.1", 0))
        packed = struct.pack("=8sH", bytes(8), socket.AF_INET) + struct.pack(">H", bound.getsockname()[1])
        ctypes.memmove(ctypes.addressof(unique._obj), packed, len(packed))

        def wait_for_members() -> None:
            with bound, suppress(OSError):
                bound.accept()

        self.listening.append(threading.Thread(target=wait_for_members, daemon=True))
        self.listening[0].start()
        return 0

    def ncclCommInitRankConfig(self, made: Any, size: int, unique: Any, rank: int, config: Any) -> int:
        self.asked.append(f"init {rank} of {size}, blocking {config._obj.blocking}, {config._obj.size} bytes")
        made._obj.value = 1234
        return self.init

    def ncclCommGetAsyncError(self, communicator: ctypes.c_void_p, state: Any) -> int:
        state._obj.value = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return 0

    def ncclBroadcast(self, source: int, target: int, size: int, kind: int, root: int, *rest: object) -> int:
        assert source == target
        self.asked.append(f"broadcast {size} of type {kind} from {root}")
        return nccl.IN_PROGRESS

    def ncclCommAbort(self, communicator: ctypes.c_void_p) -> int:
        self.asked.append(f"abort {communicator.value}")
        return 0

    def ncclGetErrorString(self, code: int) -> bytes:
        return b"remote error" if code == 6 else b"system error"

    def ncclGetLastError(self, communicator: None) -> bytes:
        return b"a peer has left"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    """Puts a FakeNccl, and a stream whose events are through at the second look, into a device's place."""

    def put(library: FakeNccl) -> FakeNccl:
        looks = iter(100 * [False, True])
        stream = SimpleNamespace(cuda_stream=5, record_event=lambda: SimpleNamespace(query=lambda: next(looks)))
        monkeypatch.setattr(nccl, "library", lambda: library)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: library.asked.append(f"set {device}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        return library

    return put


def nccl_group(rank: int = 0, store: RelayedStore = STORE) -> DeviceGroup:
    return DeviceGroup(structs.replace(EPOCH, rank=rank), lambda epoch: nccl.NcclCommunicator(epoch, store, CPU), CPU)


BEGUN = ["set cpu", "init 0 of 2, blocking 0, 20 bytes"]


def test_a_member_of_an_nccl_group_that_dies_before_it_forms_leaves_no_thread_and_no_socket(fake) -> None:
    library = fake(FakeNccl([nccl.IN_PROGRESS]))
    with pytest.raises(Late):
        nccl_group()
    until_no_thread_is_left()
    assert library.asked == [*BEGUN, "abort 1234"]
    library.listening[0].join(LIMIT_S)
    assert not library.listening[0].is_alive()


@pytest.mark.parametrize(("init", "states", "code"), [(2, [0], 2), (nccl.IN_PROGRESS, [nccl.IN_PROGRESS, 6], 6)])
def test_an_nccl_group_that_fails_to_form_says_why_and_leaves_nothing(
    fake, init: int, states: list[int], code: int
) -> None:
    library = fake(FakeNccl(states, init))
    with pytest.raises(GroupFailed) as failed:
        nccl_group().close()
    for told in (library.ncclGetErrorString(code), library.ncclGetLastError(None)):
        assert told.decode() in str(failed.value)
    library.listening[0].join(LIMIT_S)
    if init == 2:
        assert library.asked == [*BEGUN, "abort 1234"]


def test_a_broadcast_over_nccl_ends_when_the_devices_stream_is_through_or_the_library_fails(fake) -> None:
    busy = nccl.IN_PROGRESS
    library = fake(FakeNccl([busy, busy, 0, 0, busy, 0, 0, busy, 0, 0, busy, 6]))
    group = nccl_group()
    group.post(torch.zeros(5, dtype=torch.uint8), LIMIT_S)()
    assert library.asked == [*BEGUN, "broadcast 1 of type 1 from 0", "broadcast 5 of type 1 from 0"]
    assert library.states == [busy, 6]
    library.listening[0].join(LIMIT_S)
    assert not library.listening[0].is_alive()
    with pytest.raises(GroupFailed) as failed:
        group.post(torch.zeros(6, dtype=torch.uint8), LIMIT_S)()
    assert library.ncclGetErrorString(6).decode() in str(failed.value)
    group.close()
    until_no_thread_is_left()
    assert library.asked[-1] == "abort 1234"


def test_other_members_of_an_nccl_group_get_the_id_from_the_store(fake) -> None:
    library = fake(FakeNccl([0]))
    store = RelayedStore(LIMIT_S, lambda key, value: None)
    store.add_entries({nccl.KEY: bytes(128)})
    nccl_group(1, store).close()
    assert library.asked[1].startswith("init 1 of 2") and not library.listening
    store = RelayedStore(LIMIT_S, lambda key, value: None)
    store.add_entries({nccl.KEY: b"short"})
    with pytest.raises(GroupFailed):
        nccl_group(1, store)
    assert sum(asked.startswith("init") for asked in library.asked) == 1, "no group is begun with a short id"


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_listening_socket_is_found_by_its_port_until_it_is_shut_down(family: int, address: str) -> None:
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        with socket.create_connection((address, port)), nccl.listener(port) as found:
            assert found.fileno() != server.fileno() and found.getsockname() == server.getsockname()
            found.shutdown(socket.SHUT_RDWR)
        assert nccl.listener(port) is None


def test_nccl_itself_stops_listening_for_members_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device NCCL refuses to form the group, and its own thread still listens."""
    try:
        nccl.library()
    except UsageError:
        pytest.skip("needs libnccl.so.2, of nvidia-nccl-cu13")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    if device == CPU:
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = os.listdir("/proc/self/task")
    ports: list[int] = []
    found = nccl.listener
    monkeypatch.setattr(nccl, "listener", lambda port: ports.append(port) or found(port))
    with pytest.raises(GroupFailed if device == CPU else Late):
        DeviceGroup(EPOCH_OF_ROOT, lambda epoch: nccl.NcclCommunicator(epoch, STORE, device), device)
    until(lambda: nccl.listener(ports[0]) is None, "the end of NCCL's thread")
    if device == CPU:
        until(lambda: len(os.listdir("/proc/self/task")) <= len(before), "the end of all threads")


def test_a_thread_has_a_stream_of_its_own_and_a_purpose_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream {next(numbers)} on {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    nccl._stream_for.cache_clear()
    where = torch.device("cuda", 2)
    for purpose, number in (("", 0), ("", 1), ("prove", 2), ("receive", 3), ("prove", 2)):
        with own_stream(where, purpose) as stream:
            assert stream == f"stream {number} on cuda:2"
    nccl._stream_for.cache_clear()
    for nowhere in (None, CPU):
        with own_stream(nowhere, "prove") as stream:
            assert stream is None
