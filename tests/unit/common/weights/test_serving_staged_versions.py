"""Which version a receiver serves to other nodes: the one that its staging buffer contains, once it is proven."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq

from common.weights.receive.receiver import Receiver
from common.weights.transports import relay
from common.weights.transports.relay import Get, Gone, Piece
from common.weights.wire import flat_buffer, messages
from common.weights.wire.layout import ALIGNMENT, Layout
from common.weights.wire.messages import Epoch, Publish, Serve
from common.weights.wire.pieces import PartBuffer, new_part
from tests.rigs.waiting import LIMIT_S, until

LAYOUT = Layout.of([("a", "float32", (40,))])
FLAT = flat_buffer.pack([("a", torch.arange(40.0))], LAYOUT)
VERSION = 7


class Sent:
    """A group that hands out FLAT."""

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        bucket.copy_(FLAT[: len(bucket)])
        return lambda: None

    def close(self) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver(lambda epoch, meeting: Sent())
    yield made
    made.close()


@pytest.fixture
def ask(receiver: Receiver) -> Iterator[Callable[..., bytes | str]]:
    """Asks for the first piece of a part, after its Serve unless it is offered: the piece, '' when it is not served."""
    heard = receiver.handle(messages.Welcome(0, LAYOUT, "127.0.0.1:7"), "n")
    assert heard is not None
    with zmq.Context[zmq.Socket[bytes]]() as context, contextlib.closing(context.socket(zmq.DEALER)) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(heard.address)

        def asked(serve: Serve, offered: bool = False) -> bytes | str:
            if not offered:
                receiver.handle(serve)
            socket.send(relay.encode(Get(serve.part.name, 0)))
            assert socket.poll(int(1000 * LIMIT_S))
            header, *pieces = socket.recv_multipart()
            answer = relay.decode_answer(header)
            assert isinstance(answer, Gone) != bool(pieces) and (not pieces or answer == Piece(0))
            return pieces[0] if pieces else ""

        yield asked


def serve(incarnation: int = 0, version: int = VERSION) -> Serve:
    return Serve(incarnation, version, new_part(FLAT, 0, len(FLAT), piece=ALIGNMENT, origin="", secured=True))


def stage(receiver: Receiver, version: int = VERSION) -> None:
    receiver.handle(Epoch(1, 1, 2, 5.0))
    sums = flat_buffer.all_checksums(FLAT, len(FLAT))
    receiver.handle(Publish(0, version, 1, LAYOUT.digest, len(FLAT), *sums, 8.0))
    until(lambda: receiver.status.state != "receiving")
    assert receiver.status.state == "staged", receiver.status.failure


def test_only_the_version_in_the_buffer_is_served_and_only_once_it_was_given_back(
    receiver: Receiver, ask: Callable[..., bytes | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "UNKNOWN_S", 0.05)  # a server waits so long for a part that it does not know
    assert ask(serve()) == "", "nothing is here"
    stage(receiver)
    assert ask(serve()) == "", "the version is staged, not in use"
    flat = receiver.take(0, VERSION)
    assert ask(serve()) == "", "the engine has the buffer"
    receiver.give_back(flat)
    part = serve()
    assert ask(part) == PartBuffer(part.part, FLAT).piece(0)
    assert ask(serve(version=VERSION + 1)) == ""
    assert ask(serve(version=VERSION - 1)) == ""
    assert ask(serve(incarnation=1)) == ""


def test_a_version_is_served_no_more_once_the_next_one_comes_or_the_learner_is_another(
    receiver: Receiver, ask: Callable[..., bytes | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "UNKNOWN_S", 0.05)
    stage(receiver)
    receiver.give_back(receiver.take(0, VERSION))
    assert ask(former := serve())
    stage(receiver, VERSION + 1)
    assert ask(serve()) == ask(former, offered=True) == ""
    receiver.give_back(receiver.take(0, VERSION + 1))
    assert ask(newer := serve(version=VERSION + 1)) and ask(serve()) == ""
    receiver.handle(messages.Welcome(1, LAYOUT, "127.0.0.1:7"))
    assert ask(serve(version=VERSION + 1)) == ask(newer, offered=True) == ""


def test_a_buffer_of_another_size_is_not_taken_back(receiver: Receiver, ask: Callable[..., bytes | str]) -> None:
    stage(receiver)
    flat = receiver.take(0, VERSION)
    receiver.give_back(torch.cat([flat, flat]))
    stage(receiver, VERSION + 1)
    assert torch.equal(receiver.take(0, VERSION + 1), FLAT)


def test_a_staged_version_is_taken_once_and_by_its_own_name(receiver: Receiver) -> None:
    receiver.handle(messages.Welcome(0, LAYOUT))
    stage(receiver)
    for name in ((1, VERSION), (0, VERSION + 1)):
        with pytest.raises(ValueError):
            receiver.take(*name)
    assert torch.equal(receiver.take(0, VERSION), FLAT)
    with pytest.raises(ValueError):
        receiver.take(0, VERSION)
