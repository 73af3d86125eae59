"""When the broker's memory grows without reason: who is cut off, and who is not."""

import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from broker.server import flood_guard
from broker.server.flood_guard import FloodGuard, own_memory, unread_bytes
from broker.sockets import tcp_bytes
from tests.faults.fuzz.attacks import FRAME, speaking
from tests.rigs.processes import ROOT
from tests.rigs.waiting import until

MIB = 1 << 20
HISTORY = """
from broker.contract import LedgerEntry
from broker.delivery.task_table import History
from broker.server.flood_guard import own_memory

history = History()
before = own_memory()
for serial in range(400_000):
    nodes = [f"node-{serial % 500}", f"node-{serial % 400}"]
    history.add(LedgerEntry(serial, "dead", 2, nodes, None, None, None, None, reason=f"it failed at {serial}"))
print(history.memory_bytes, own_memory() - before)
"""


class Rig:
    """A bound ROUTER under guard, and the memory that the guard believes in."""

    def __init__(self, router: "zmq.Socket[bytes]", patch: pytest.MonkeyPatch) -> None:
        self.router = router
        self.memory = 100 * MIB
        patch.setattr(flood_guard, "own_memory", lambda: self.memory)
        patch.setattr(flood_guard, "free_memory", lambda: self.free)
        self.free = 1000 * MIB
        self.guard = FloodGuard(router, 50 * MIB, 8 * MIB)
        self.port = router.bind_to_random_port("tcp://127.0.0.1")

    def read(self) -> None:
        while self.router.poll(0):
            first = self.router.recv(copy=False)
            if self.guard.alert:
                self.guard.heard(first)
            while self.router.getsockopt(zmq.RCVMORE):
                self.router.recv()

    def connect(self, size: int) -> socket.socket:
        """A client that has sent `size` bytes of a message without an end."""
        client = speaking(self.port)
        self.guard.tick(0)
        self.send(client, size)
        return client

    def send(self, client: socket.socket, size: int) -> None:
        """Send `size` further bytes, and wait for them."""
        end = self.received() + size
        for _ in range(-(-size // len(FRAME))):
            client.sendall(FRAME)
        until(lambda: self.received() >= end)

    def received(self) -> int:
        return sum(tcp_bytes(fd)[0] for fd in self.guard.connections)


@contextmanager
def rigged() -> Iterator[Rig]:
    with zmq.Context() as context, pytest.MonkeyPatch.context() as patch:
        router = context.socket(zmq.ROUTER)
        rig = Rig(router, patch)
        try:
            yield rig
        finally:
            router.close(linger=0)
            rig.guard.close()


def is_cut(client: socket.socket) -> bool:
    client.settimeout(0.3)
    try:
        while data := client.recv(1 << 16):
            assert data
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "PATIENCE_S", 0.0)
    monkeypatch.setattr(flood_guard, "QUIET_TICKS", 1)


@pytest.mark.usefixtures("no_patience")
def test_whoever_sends_a_message_without_an_end_is_cut_off_when_memory_grows_and_others_are_not() -> None:
    with rigged() as rig, rig.connect(8 * MIB) as hostile, rig.connect(0) as small, zmq.Context() as context:
        good = context.socket(zmq.DEALER)
        good.connect(f"tcp://127.0.0.1:{rig.port}")
        good.send(bytes(4 * MIB))
        until(lambda: rig.router.poll(0))
        rig.read()
        rig.memory = 200 * MIB
        rig.guard.tick(0)
        assert rig.guard.alert
        good.send(b"a sign of life")
        until(lambda: rig.router.poll(0))
        rig.read()
        rig.guard.tick(0)
        assert is_cut(hostile)
        assert not is_cut(small)
        good.send(b"still here")
        until(lambda: rig.router.poll(0))
        good.close(linger=0)
        rig.memory = 120 * MIB
        rig.guard.tick(0)
        assert not rig.guard.alert
        assert len(rig.guard.connections) <= 2


@pytest.mark.usefixtures("no_patience")
def test_uploads_that_move_come_through_however_many_and_slow_they_are() -> None:
    with rigged() as rig, ExitStack() as stack:
        uploads = [stack.enter_context(rig.connect(4 * MIB)) for _ in range(8)]
        rig.memory = 200 * MIB
        for _ in range(8):
            rig.guard.tick(0)
            for upload in uploads:
                rig.send(upload, MIB)
        assert not any(map(is_cut, uploads))


@pytest.mark.usefixtures("no_patience")
def test_a_message_that_is_longer_than_any_is_cut_off_although_it_moves_and_another_one_came_before() -> None:
    with rigged() as rig, rig.connect(0) as hostile:
        rig.memory = 200 * MIB
        rig.guard.tick(0)
        hostile.sendall(b"\x00\x01?")
        until(lambda: rig.router.poll(0))
        rig.read()
        for _ in range(2):
            rig.send(hostile, 8 * MIB)
            rig.guard.tick(0)
        assert not is_cut(hostile), "two frames of the largest size are a message"
        rig.send(hostile, 2 * MIB)
        rig.guard.tick(0)
        assert not is_cut(hostile), "it may be complete, and not read yet"
        rig.send(hostile, MIB)
        rig.guard.tick(0)
        assert is_cut(hostile)


@pytest.mark.usefixtures("no_patience")
def test_the_shorter_half_of_the_messages_is_cut_off_before_memory_ends_and_the_last_one_comes_through() -> None:
    with rigged() as rig, ExitStack() as stack:
        uploads = [stack.enter_context(rig.connect(0)) for _ in range(4)]
        rig.memory = 200 * MIB
        rig.guard.tick(0)
        left = []
        for free in (101 * MIB, 99 * MIB, 99 * MIB, 99 * MIB):
            rig.free = free
            for i, upload in enumerate(uploads):
                rig.send(upload, (i + 1) * MIB)
            rig.guard.tick(0)
            uploads = [upload for upload in uploads if not is_cut(upload)]
            left.append(len(uploads))
            until(lambda: rig.guard.tick(1000 * MIB) or len(rig.guard.connections) == left[-1])
            rig.guard.tick(0)
        assert left == [4, 2, 1, 1]


def test_finished_tasks_explain_the_memory_that_they_take() -> None:
    """A run of many tasks is no flood. Measured in a process that has freed nothing before."""
    done = subprocess.run([sys.executable, "-c", HISTORY], cwd=ROOT, capture_output=True, text=True, check=True)
    estimate, grown = map(int, done.stdout.split())
    assert 0.8 * grown < estimate < 1.3 * grown


@pytest.mark.usefixtures("no_patience")
def test_whoever_does_not_read_what_it_asked_for_is_cut_off_when_memory_grows() -> None:
    with rigged() as rig, rig.connect(0) as client:
        client.sendall(b"\x00\x01?")
        until(lambda: rig.router.poll(0))
        identity = rig.router.recv_multipart()[0]
        for _ in range(64):
            rig.router.send_multipart([identity, bytes(MIB)])
        until(lambda: any(unread_bytes(fd) > MIB // 4 for fd in rig.guard.connections))
        time.sleep(0.3)  # the kernel's buffers are full now, and nothing moves any more
        rig.memory = 200 * MIB
        for _ in range(4):
            rig.guard.tick(0)
        until(lambda: rig.guard.tick(0) or not rig.guard.connections)


@pytest.mark.usefixtures("no_patience")
def test_memory_that_held_groups_explain_cuts_nobody_off() -> None:
    with rigged() as rig, rig.connect(4 * MIB) as client:
        rig.memory = 1000 * MIB
        for _ in range(3):
            rig.guard.tick(900 * MIB)
        assert not rig.guard.alert
        assert not is_cut(client)


def test_an_alert_waits_a_while_for_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(100.0, 1.0)
    monkeypatch.setattr(flood_guard.time, "monotonic", lambda: next(now))
    with rigged() as rig:
        client = rig.connect(0)
        cuts: list[int] = []
        monkeypatch.setattr(rig.guard, "_cut", lambda *_: cuts.append(1))
        rig.memory = 200 * MIB
        for _ in range(3):
            rig.guard.tick(0)
        assert cuts == []
        rig.guard.tick(0)
        assert cuts == [1]
        client.close()


def test_memory_and_received_bytes_are_those_of_this_process_and_of_a_connection() -> None:
    before = own_memory()
    ballast = b"x" * (64 * MIB)
    assert own_memory() - before > 32 * MIB
    del ballast
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        client.sendall(bytes(1000))
        until(lambda: tcp_bytes(accepted.fileno())[0] == 1000)
    with open("/dev/null", "rb") as no_socket:
        assert tcp_bytes(no_socket.fileno()) == (0, 0)
        assert unread_bytes(no_socket.fileno()) == 0


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("free", [50 * MIB, 1 << 40])
def test_bytes_that_came_before_the_alert_protect_no_connection_that_hardly_moves(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come at leisure, and then a byte now and then; meanwhile uploads come and go."""
    monkeypatch.setattr(flood_guard, "QUIET_TICKS", 20)
    attackers, cut = {1000, 1001, 1002, 1003}, list[int]()
    received = dict.fromkeys(attackers, 0)
    monkeypatch.setattr(flood_guard, "tcp_bytes", lambda fd: (received[fd], 0))
    monkeypatch.setattr(flood_guard, "unread_bytes", lambda fd: 0)
    monkeypatch.setattr(flood_guard, "_cut_off", lambda fd, why: cut.append(fd))
    with rigged() as rig:
        rig.guard.connections |= attackers
        received |= dict.fromkeys(attackers, 7 * MIB)
        rig.guard.tick(0)
        rig.free, rig.memory = free, 200 * MIB
        for check in range(25):
            upload = 2000 + check // 4  # ends at its fourth check
            rig.guard.connections = (attackers - {*cut}) | {upload}
            for gone in rig.guard._progress.keys() - rig.guard.connections:
                del rig.guard._progress[gone]
            received |= {fd: received[fd] + 1 for fd in attackers}
            received[upload] = received.get(upload, 0) + MIB
            rig.guard.tick(0)
    assert set(cut) == attackers
