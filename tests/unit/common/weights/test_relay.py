"""The relay: what a server hands out, in which order and to whom, and how a fetch goes around a source that fails."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zmq

from common.process.local_address import host_and_port
from common.weights.transports import relay
from common.weights.transports.relay import (
    APART_BYTES,
    WINDOW,
    WINDOW_BYTES,
    Fetch,
    Get,
    Gone,
    PartFetches,
    Piece,
    RelayServer,
    Stall,
)
from common.weights.wire.failures import GivenUp, Late, WeightsError
from common.weights.wire.messages import Publish
from common.weights.wire.pieces import PartBuffer, new_part
from tests.rigs.waiting import LIMIT_S, until

PIECE = 64
COUNT = 3 * WINDOW
FLAT = torch.randint(0, 256, (COUNT * PIECE - 5,), dtype=torch.uint8)
NOWHERE = "tcp://127.0.0.1:9"


@pytest.fixture
def server() -> Iterator[RelayServer]:
    made = RelayServer("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def source() -> PartBuffer:
    return PartBuffer(new_part(FLAT, 0, len(FLAT), piece=PIECE, origin=NOWHERE, secured=True), FLAT)


def empty(source: PartBuffer) -> tuple[PartBuffer, torch.Tensor]:
    flat = torch.zeros(source.part.size, dtype=torch.uint8)
    return PartBuffer(source.part, flat, arrived=0), flat


class Client:
    """Asks a server without the manners of a Fetch."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket

    def ask(self, *requests: Get | bytes) -> None:
        for request in requests:
            self.socket.send(relay.encode(request) if isinstance(request, Get) else request)

    def hear(self) -> tuple[Piece | Gone, list[bytes]]:
        assert self.socket.poll(int(1000 * LIMIT_S))
        header, *pieces = self.socket.recv_multipart()
        return relay.decode_answer(header), pieces

    def refusal(self) -> str:
        answer, pieces = self.hear()
        assert isinstance(answer, Gone) and not pieces
        return answer.reason

    def silent(self, seconds: float = 0.1) -> bool:
        return not self.socket.poll(int(1000 * seconds))


@pytest.fixture
def client(server: RelayServer) -> Iterator[Callable[..., Client]]:
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context[zmq.Socket[bytes]]())

        def made(unread: int = 1000) -> Client:
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, unread)
            socket.connect(server.address)
            return Client(socket)

        yield made


def test_pieces_come_in_the_order_of_the_requests_each_as_soon_as_it_has_arrived(
    server: RelayServer, source: PartBuffer, client: Callable[..., Client]
) -> None:
    node, _ = empty(source)
    server.offer(node)
    one = client()
    one.ask(*(Get(source.part.name, number) for number in (0, 2, 1)))
    assert one.silent()
    node.take_in(0, source.piece(0))
    assert one.hear() == (Piece(0), [source.piece(0)])
    node.take_in(1, source.piece(1))
    assert one.silent(), "piece 2 was asked for first"
    node.take_in(2, source.piece(2))
    assert [one.hear() for _ in range(2)] == [(Piece(n), [source.piece(n)]) for n in (2, 1)]


def test_a_part_that_is_not_known_yet_is_waited_for_and_then_gone(
    server: RelayServer, source: PartBuffer, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = client()
    early.ask(Get(source.part.name, 3))
    assert early.silent()
    server.offer(source)
    assert early.hear() == (Piece(3), [source.piece(3)])
    monkeypatch.setattr(relay, "UNKNOWN_S", 0.2)
    early.ask(Get("absent", 0))
    reason = early.refusal()
    assert "not served" in reason and "any more" not in reason


@pytest.mark.parametrize("all_of_them", [True, False])
def test_what_was_withdrawn_is_gone_at_once_and_its_memory_is_read_no_more(
    server: RelayServer, source: PartBuffer, client: Callable[..., Client], all_of_them: bool
) -> None:
    node, _ = empty(source)
    server.offer(node)
    waiting = client()
    waiting.ask(Get(source.part.name, 0))
    assert waiting.silent()
    server.withdraw(empty(source)[0])  # another attempt at the same part
    assert waiting.silent()
    server.withdraw(*(() if all_of_them else (node,)))
    assert node.piece(0) is None
    assert "any more" in waiting.refusal()
    waiting.ask(Get(source.part.name, 0))
    assert "any more" in waiting.refusal()


def test_requests_that_make_no_sense_are_refused_and_the_next_is_answered(
    server: RelayServer, source: PartBuffer, client: Callable[..., Client]
) -> None:
    server.offer(source)
    one = client()
    beyond = relay.encode(Get(source.part.name, COUNT))
    for wrong in (beyond, relay.encode(Get(source.part.name, -1)), relay.encode(Get("x" * 65, 0)), b"\xc1", b""):
        one.ask(wrong)
        assert one.refusal()
    one.socket.send_multipart([relay.encode(Get(source.part.name, 0)), b"more"])
    assert one.refusal() == "2 frames"
    one.ask(Get(source.part.name, 1))
    assert one.hear() == (Piece(1), [source.piece(1)])


def test_no_more_requests_of_a_connection_and_no_more_connections_wait_than_the_limits(
    server: RelayServer, source: PartBuffer, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MOST_CLIENTS", 2)
    node, _ = empty(source)
    server.offer(node)
    first, second, third = client(), client(), client()
    first.ask(Get(source.part.name, 0))
    assert first.silent()
    second.ask(*(Get(source.part.name, 0) for _ in range(2 * WINDOW + 1)))
    assert second.refusal().startswith(f"{2 * WINDOW} requests")
    second.ask(Get(source.part.name, 0))
    assert second.silent()
    third.ask(Get("unknown", 0))
    fourth = client()
    assert third.silent()
    fourth.ask(Get(source.part.name, 0))
    assert third.refusal().startswith("2 connections"), "a part that is served here is waited for by all"
    node.take_in(0, source.piece(0))
    assert first.hear() == second.hear() == fourth.hear() == (Piece(0), [source.piece(0)])


def test_a_client_that_asks_and_does_not_read_has_few_pieces_under_way_and_keeps_nobody_waiting(
    server: RelayServer, client: Callable[..., Client]
) -> None:
    flat, asked = torch.zeros(1 << 18, dtype=torch.uint8), 1000
    big = PartBuffer(new_part(flat, 0, len(flat), piece=len(flat), origin=NOWHERE, secured=False), flat)
    server.offer(big)
    greedy, other = client(unread=1), client()
    for _ in range(asked):  # the server takes turns, so it has looked at the greedy one by then
        greedy.ask(Get(big.part.name, 0))
        other.ask(Get(big.part.name, 0))
        assert other.hear()[0] == Piece(0)
    came: list[int] = []

    def all_came() -> bool:  # asks for the end each time: a refusal that finds the connection full is dropped
        greedy.ask(Get(big.part.name, 99))
        while not greedy.silent():
            answer, _ = greedy.hear()
            if isinstance(answer, Gone) and "cannot be asked for" in answer.reason:
                return True
            came.append(1)
        return False

    until(all_came)
    assert WINDOW <= len(came) < asked / 2


# ---------------------------------------------------------------- fetches


class Source:
    """A source that answers what the test says."""

    def __init__(self, buffer: PartBuffer) -> None:
        self.buffer = buffer
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def asked(self, count: int) -> list[tuple[bytes, int]]:
        """(connection, number of the piece) of `count` requests, after which no more come for a while."""
        found: list[tuple[bytes, int]] = []
        while self.router.poll(int(1000 * LIMIT_S) if len(found) < count else 150):
            connection, request = self.router.recv_multipart()
            found.append((connection, relay.decode_get(request).number))
        return found

    def answer(self, *requests: tuple[bytes, int]) -> None:
        for connection, number in requests:
            self.say(connection, [relay.encode(Piece(number)), self.buffer.piece(number)])

    def say(self, connection: bytes, frames: list[bytes]) -> None:
        self.router.send_multipart([connection, *frames])


class Running:
    """A fetch in a thread of its own."""

    def __init__(self, buffer: PartBuffer, source: str, timeout_s: float = LIMIT_S) -> None:
        self.fetch, self.noted, self.error = Fetch(buffer, source), 0, None
        self.thread = threading.Thread(target=self.run, args=(timeout_s,))
        self.thread.start()

    def run(self, timeout_s: float) -> None:
        try:
            self.fetch.run(timeout_s, self.note)
        except WeightsError as error:
            self.error = error

    def note(self) -> None:
        self.noted += 1

    def end(self) -> WeightsError | None:
        """Wait for it; the error, None if everything came."""
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture
def sources(source: PartBuffer) -> Iterator[list[Source]]:
    made = [Source(source) for _ in range(2)]
    yield made
    for one in made:
        one.router.close()
        one.context.term()


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    monkeypatch.setattr(relay, "STALL_S", 0.3)
    running: list[Running] = []

    def made(*arguments: object, **options: float) -> Running:
        running.append(Running(*arguments, **options))  # type: ignore[arg-type]
        return running[-1]

    yield made
    for one in running:
        one.fetch.close()
        one.end()


def test_a_node_passes_on_what_it_gets_byte_for_byte_while_the_rest_is_on_its_way(
    server: RelayServer, source: PartBuffer, sources: list[Source], fetch: Callable[..., Running]
) -> None:
    (node, _), (last, flat), origin = empty(source), empty(source), sources[0]
    server.offer(node)
    first, second = fetch(node, origin.address), fetch(last, server.address)
    for arrived in range(WINDOW, COUNT + 1, WINDOW):
        origin.answer(*origin.asked(WINDOW))
        until(lambda arrived=arrived: last.arrived == arrived)
    assert first.end() is second.end() is None and torch.equal(flat, FLAT)
    assert second.noted == COUNT
    assert [last.piece(n) for n in range(COUNT)] == [source.piece(n) for n in range(COUNT)]


@pytest.mark.parametrize(("piece", "window"), [(PIECE, WINDOW), (1 << 20, WINDOW_BYTES >> 20)])
def test_a_fetch_asks_for_no_more_than_its_window_however_slow_the_source(
    fetch: Callable[..., Running], sources: list[Source], piece: int, window: int
) -> None:
    flat, slow = torch.zeros(3 * WINDOW * PIECE if piece == PIECE else 10 * piece, dtype=torch.uint8), sources[0]
    slow.buffer = PartBuffer(new_part(flat, 0, len(flat), piece=piece, origin=NOWHERE, secured=False), flat)
    node, _ = empty(slow.buffer)
    fetch(node, slow.address)
    waiting = slow.asked(window)
    assert [number for _, number in waiting] == list(range(window))
    slow.answer(waiting[0])
    assert [number for _, number in slow.asked(1)] == [window], "a piece is asked for when one was taken in"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([relay.encode(Piece(7)), b"x"], "sent 1 pieces as piece 7, not piece 0"),
        ([relay.encode(Piece(0)), b"x"], "piece 0 of"),
        ([relay.encode(Piece(0))], "sent 0 pieces as piece 0"),
        ([relay.encode(Piece(0)), b"x", b"x"], "sent 2 pieces as piece 0"),
        ([b"\xc1"], "MessagePack|malformed|invalid|Input"),
        ([relay.encode(Gone("no"))], "no"),
        ([relay.encode(Gone(""))], "refused"),
    ],
)
def test_answers_that_were_not_asked_for_make_a_stall_that_says_why_and_another_source_helps(
    server: RelayServer, source: PartBuffer, sources: list[Source], fetch: Callable[..., Running], answer: list[bytes],
    says: str,
) -> None:  # fmt: skip
    (node, flat), liar = empty(source), sources[0]
    running = fetch(node, liar.address)
    liar.say(liar.asked(WINDOW)[0][0], answer)
    stall: Stall = until(lambda: running.fetch.stall)
    assert (stall.source, stall.pieces) == (liar.address, 0)
    assert any(word in stall.reason for word in says.split("|")), stall.reason
    server.offer(source)
    running.fetch.reroute(server.address)
    assert running.fetch.stall is None
    assert running.end() is None and torch.equal(flat, FLAT)


def test_a_source_that_cannot_be_one_makes_a_stall(source: PartBuffer, fetch: Callable[..., Running]) -> None:
    running = fetch(empty(source)[0], "nonsense")
    assert until(lambda: running.fetch.stall).reason


def test_a_fetch_that_is_rerouted_goes_on_with_the_piece_that_it_lacks_and_asks_for_none_twice(
    source: PartBuffer, sources: list[Source], fetch: Callable[..., Running]
) -> None:
    (node, flat), (silent, other) = empty(source), sources
    running = fetch(node, silent.address)
    silent.answer(*silent.asked(WINDOW)[:5])
    assert until(lambda: running.fetch.stall) == Stall(silent.address, 5, "")
    running.fetch.reroute(other.address)
    asked = list[int]()
    while len(asked) < COUNT - 5:
        requests = other.asked(min(WINDOW, COUNT - 5 - len(asked)))
        asked += [number for _, number in requests]
        other.answer(*requests)
    assert asked == list(range(5, COUNT))
    assert running.end() is None and torch.equal(flat, FLAT)


def test_a_reroute_to_the_same_source_is_a_new_connection(
    source: PartBuffer, sources: list[Source], fetch: Callable[..., Running]
) -> None:
    node, slow = empty(source)[0], sources[0]
    running = fetch(node, slow.address)
    before = slow.asked(WINDOW)
    slow.answer(*before[:3])
    until(lambda: node.arrived == 3)
    slow.asked(3)
    running.fetch.reroute(slow.address)
    after = slow.asked(WINDOW)
    assert after[0][0] != before[0][0] and [number for _, number in after] == list(range(3, 3 + WINDOW))
    slow.answer(after[0])
    until(lambda: node.arrived == 4)


def test_a_fetch_that_stood_still_and_goes_on_is_not_a_stall(
    source: PartBuffer, sources: list[Source], fetch: Callable[..., Running]
) -> None:
    node, slow = empty(source)[0], sources[0]
    running = fetch(node, slow.address)
    requests = slow.asked(WINDOW)
    until(lambda: running.fetch.stall)
    slow.answer(requests[0])
    until(lambda: running.fetch.stall is None)
    assert node.arrived == 1
    assert until(lambda: running.fetch.stall) == Stall(slow.address, 1, "")


def test_closing_and_the_deadline_end_a_fetch_that_waits_and_the_latter_says_what_came(
    source: PartBuffer, sources: list[Source], fetch: Callable[..., Running]
) -> None:
    closed = fetch(empty(source)[0], sources[0].address)
    sources[0].asked(1)
    closed.fetch.close()
    assert isinstance(closed.end(), GivenUp)
    late = fetch(empty(source)[0], sources[1].address, timeout_s=0.2)
    error = late.end()
    assert isinstance(error, Late) and f"0 of {COUNT} pieces" in str(error) and sources[1].address in str(error)


def test_large_pieces_are_opened_beside_the_fetch_and_after_damage_only_those_that_lack_come_again(
    sources: list[Source],
) -> None:
    flat = torch.randint(0, 256, (9 * APART_BYTES + 5,), dtype=torch.uint8)
    made = new_part(flat, 0, len(flat), piece=APART_BYTES, origin=NOWHERE, secured=True)
    source, out = PartBuffer(made, flat), torch.zeros_like(flat)
    publish = Publish(0, 7, 1, "", 0, [], "", LIMIT_S, parts=[made], sources=[sources[0].address])
    fetches = PartFetches(publish, "")
    for one in sources:
        one.buffer = source
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fetches.run, out, None, lambda share: None)
        requests = sources[0].asked(source.count)
        sources[0].answer(*requests[:2])
        spoilt = bytearray(source.piece(2))
        spoilt[7] ^= 1
        sources[0].say(requests[2][0], [relay.encode(Piece(2)), bytes(spoilt)])
        sources[0].answer(*requests[3:])
        stall = until(lambda: fetches.stalls.get(0))
        assert stall.pieces == 2 and stall.reason
        fetches.reroute(0, sources[1].address)
        again = sources[1].asked(source.count - 2)
        assert [number for _, number in again] == list(range(2, source.count))
        sources[1].answer(*again)
        running.result(LIMIT_S)
    assert torch.equal(out, flat)


def test_a_part_that_cannot_come_ends_the_fetches_of_the_others(source: PartBuffer, sources: list[Source]) -> None:
    parts = [new_part(FLAT, at, PIECE, piece=PIECE, origin=NOWHERE, secured=True) for at in (0, PIECE)]
    publish = Publish(0, 7, 1, "", PIECE, [], "", LIMIT_S, parts=parts, sources=[one.address for one in sources])
    fetches = PartFetches(publish, "")

    class NoRoom(WeightsError):
        pass

    def broken(share: float) -> None:
        raise NoRoom

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fetches.run, torch.zeros(2 * PIECE, dtype=torch.uint8), None, broken)
        (connection, number), *_ = sources[0].asked(1)
        sources[0].say(connection, [relay.encode(Piece(number)), PartBuffer(parts[0], FLAT[:PIECE]).piece(0)])
        with pytest.raises(NoRoom):
            running.result(LIMIT_S / 2)


def test_the_parts_that_wait_for_another_source_are_told_by_their_number(
    source: PartBuffer, sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "STALL_S", 2 * LIMIT_S)  # silence is no stall here
    parts = [new_part(FLAT, at, PIECE, piece=PIECE, origin=NOWHERE, secured=True) for at in (0, PIECE)]
    publish = Publish(0, 7, 1, "", PIECE, [], "", LIMIT_S, parts=parts, sources=[one.address for one in sources])
    fetches = PartFetches(publish, "")
    assert fetches.stalls == {}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fetches.run, torch.zeros(2 * PIECE, dtype=torch.uint8), None, lambda share: None)
        (connection, _), *_ = sources[1].asked(1)
        sources[1].say(connection, [relay.encode(Gone("withdrawn"))])
        stalls = until(lambda: fetches.stalls)
        fetches.close()
        with pytest.raises(GivenUp):
            running.result(LIMIT_S)
    with pytest.raises(GivenUp):
        fetches.run(torch.zeros(2 * PIECE, dtype=torch.uint8), None, lambda share: None)
    assert stalls == {1: Stall(sources[1].address, 0, stalls[1].reason)} and "withdrawn" in stalls[1].reason


# ---------------------------------------------------------------- passwords


@pytest.mark.parametrize("password", ["", "another"])
def test_a_server_with_a_password_hands_nothing_to_who_does_not_know_it(source: PartBuffer, password: str) -> None:
    server = RelayServer("127.0.0.1", "right")
    server.offer(source)
    node, _ = empty(source)
    with pytest.raises(Late):
        Fetch(node, server.address, password).run(0.5)
    assert node.arrived == 0
    Fetch(node, server.address, "right").run(LIMIT_S)
    assert node.arrived == COUNT
    server.close()


def test_frames_without_an_end_from_a_client_without_the_password_are_not_kept() -> None:
    server = RelayServer("127.0.0.1", "right")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(host_and_port(server.address)) as raw:
        raw.sendall(greeting + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
        raw.settimeout(LIMIT_S)
        with pytest.raises(OSError):
            while True:  # the server closes a connection that has not proven itself
                raw.sendall((b"\x01\xc8" + bytes(200)) * 1000)
    server.close()
