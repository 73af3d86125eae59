"""The relay: what a server hands out, to whom, and what a client makes of answers that it did not ask for."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import zmq

from common.weights.messages import Epoch, Source
from common.weights.transports import relay
from common.weights.transports.relay import CREDIT, PIECE_BYTES, Get, Gone, Piece, RelayGroup, RelayServer
from tests.waiting import LIMIT_S, until

FLAT = torch.randint(0, 256, (3 * PIECE_BYTES + 11,), dtype=torch.uint8)


def fetch(source: Source, timeout_s: float = 10.0, bucket: int = 1 << 20) -> torch.Tensor:
    group = RelayGroup(Epoch(1, 1, 2, "", 0, timeout_s, "relay", source))
    found = torch.zeros_like(FLAT)
    try:
        for part in found.split(bucket):
            group.post(part, timeout_s)()
    finally:
        group.close()
    return found


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[RelayServer]:
    made = RelayServer("127.0.0.1", secured=getattr(request, "param", False))
    yield made
    made.close()


@pytest.mark.parametrize("server", [False, True], indirect=True, ids=["open", "keys"])
def test_what_is_offered_arrives_in_buckets_of_any_size(server: RelayServer) -> None:
    for number, bucket in enumerate((1000_003, 1 << 20, len(FLAT))):
        assert torch.equal(fetch(server.source(str(number), FLAT, 30.0), bucket=bucket), FLAT)


@pytest.mark.parametrize("server", [True], indirect=True)
def test_with_keys_only_the_key_that_was_made_for_a_fetch_gets_it(server: RelayServer) -> None:
    ours, theirs = server.source("ours", FLAT, 30.0), server.source("theirs", FLAT, 30.0)
    stranger = zmq.curve_keypair()
    without = Source(server.address, "ours")
    unknown = Source(server.address, "ours", server.public, stranger[0].decode(), stranger[1].decode())
    for source in (without, unknown):
        with pytest.raises(RuntimeError, match=r"0 of \d+ bytes came"):
            fetch(source, timeout_s=0.4)
    crossed = Source(server.address, "ours", server.public, theirs.public, theirs.secret)
    with pytest.raises(RuntimeError, match="no longer offered here"):
        fetch(crossed)
    server.withdraw("ours")
    server.withdraw("theirs")
    with pytest.raises(RuntimeError, match="bytes came"):  # no handshake with a key of no offer
        fetch(ours, timeout_s=0.4)


def test_offers_end_when_they_are_withdrawn_and_by_themselves(server: RelayServer) -> None:
    withdrawn, late = server.source("withdrawn", FLAT, 30.0), server.source("late", FLAT, 0.0)
    server.withdraw("withdrawn")
    for source in (withdrawn, late):
        with pytest.raises(RuntimeError, match="no longer offered here"):
            fetch(source)


@contextlib.contextmanager
def asking(server: RelayServer) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(server.address)
        yield socket


def test_requests_that_ask_for_too_much_or_make_no_sense_are_refused(server: RelayServer) -> None:
    server.offer("k", FLAT, 30.0)
    wrong = [Get("k", 0, PIECE_BYTES + 1), Get("k", len(FLAT), len(FLAT) + 1), Get("k", 9, 8)]
    with asking(server) as socket:
        for request in [*(relay.encode(w) for w in wrong), b"\xc1", b""]:
            socket.send(request)
            answer = socket.recv_multipart()
            assert len(answer) == 1 and isinstance(relay.decode_answer(answer[0]), Gone)
        socket.send(relay.encode(Get("k", 5, 8)))
        header, data = socket.recv_multipart()
        assert (relay.decode_answer(header), data) == (Piece(5, 8), bytes(FLAT[5:8].tolist()))


def test_a_client_that_asks_and_does_not_read_has_few_pieces_under_way(server: RelayServer) -> None:
    asked, came = 200, list[int]()
    server.offer("k", FLAT, LIMIT_S)
    with asking(server) as greedy, asking(server) as other:
        for _ in range(asked):
            greedy.send(relay.encode(Get("k", 0, PIECE_BYTES)))
        for _ in range(2 * asked):  # the server takes turns, so it has answered the greedy one by then
            other.send(relay.encode(Get("k", 0, 0)))
            other.recv_multipart()

        def all_came() -> bool:  # asks for the end each time: an answer that finds the connection full is dropped
            greedy.send(relay.encode(Get("absent", 0, 0)))
            while greedy.poll(100):
                if not isinstance(relay.decode_answer(greedy.recv_multipart()[0]), Piece):
                    return True
                came.append(1)
            return False

        until(all_came)
    assert CREDIT <= len(came) < asked / 2


class Slow:
    """A source that answers what the test says, and counts what waits for an answer."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.source = Source(f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}", "k")

    def asked(self, count: int) -> list[list[bytes]]:
        """`count` requests and those that come soon after them."""
        found = []
        while self.router.poll(int(1000 * LIMIT_S) if len(found) < count else 300):
            found.append(self.router.recv_multipart())
        return found

    def close(self) -> None:
        self.router.close()
        self.context.term()


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.close()


def test_no_more_is_under_way_than_the_credit_however_slow_the_source(slow: Slow) -> None:
    group = RelayGroup(Epoch(1, 1, 2, "", 0, 5.0, "relay", slow.source))

    def fails() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            group.post(torch.zeros(40 * PIECE_BYTES, dtype=torch.uint8), LIMIT_S)()

    thread = threading.Thread(target=fails)
    thread.start()
    waiting = slow.asked(CREDIT)
    assert len(waiting) == CREDIT
    for identity, request in waiting[:3]:
        get = relay.decode_get(request)
        slow.router.send_multipart([identity, relay.encode(Piece(get.start, get.end)), bytes(PIECE_BYTES)])
    assert len(slow.asked(3)) == 3, "a piece is asked for when one was taken in"
    began = time.monotonic()
    group.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive() and time.monotonic() - began < LIMIT_S, "closing ends a fetch that waits"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([relay.encode(Piece(7, 8)), b"x"], "for byte 7, not 0"),
        ([relay.encode(Piece(0, 9)), b"x"], "sent 1 bytes"),
        ([relay.encode(Piece(0, 1))], "sent -1 bytes"),
        ([b"\xc1"], "does not decode"),
        ([relay.encode(Gone("no"))], "no"),
    ],
)
def test_answers_that_were_not_asked_for_end_the_fetch(slow: Slow, answer: list[bytes], says: str) -> None:
    group = RelayGroup(Epoch(1, 1, 2, "", 0, 5.0, "relay", slow.source))

    def reply() -> None:
        assert slow.router.poll(10_000)
        identity, _ = slow.router.recv_multipart()
        slow.router.send_multipart([identity, *answer])

    thread = threading.Thread(target=reply)
    thread.start()
    with pytest.raises(RuntimeError, match=says):
        group.post(torch.zeros(PIECE_BYTES, dtype=torch.uint8), 10.0)()
    thread.join()
    group.close()


def test_an_epoch_without_a_source_is_no_relays() -> None:
    with pytest.raises(RuntimeError, match="names no source"):
        RelayGroup(Epoch(4, 1, 2, "", 0, 5.0, "relay"))
