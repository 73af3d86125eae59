"""Replies on their way out: what goes together, what does not, and what becomes of those for clients that are gone."""

from collections.abc import Iterator

import pytest
import zmq

from broker import wire
from broker.contract import StoredGroup
from broker.server.server import Outbox
from tests.rigs.brokers import META


def small(number: int) -> wire.Reply:
    return wire.Waiting(id=number, reason="because")


class Ends:
    """A router with an outbox and two clients, connected in this process."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.router = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.bind("inproc://outbox")
        self.undelivered: list[tuple[bytes, wire.Reply]] = []
        self.outbox = Outbox(self.router, lambda client, reply: self.undelivered.append((client, reply)))
        self.clients: dict[bytes, zmq.Socket[bytes]] = {}
        for name in (b"a", b"b"):
            client = self.clients[name] = context.socket(zmq.DEALER)
            client.setsockopt(zmq.ROUTING_ID, name)
            client.connect("inproc://outbox")
            client.send(b"here I am")
            self.router.recv_multipart()

    def messages(self, name: bytes) -> list[tuple[wire.AnyReply, list[bytes]]]:
        """All that a client got."""
        found: list[tuple[wire.AnyReply, list[bytes]]] = []
        while self.clients[name].poll(50):
            header, *payloads = self.clients[name].recv_multipart()
            found.append((wire.decode_reply(header), payloads))
        return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    with zmq.Context() as context:
        made = Ends(context)
        yield made
        for socket in (made.router, *made.clients.values()):
            socket.close(0)


def test_small_replies_go_in_one_message_to_each_client_in_order_and_a_single_one_is_not_wrapped(ends: Ends) -> None:
    replies = [small(i) for i in range(5)]
    for reply in replies:
        ends.outbox.put(b"a", reply)
    ends.outbox.put(b"b", small(9))
    assert ends.messages(b"a") == []
    ends.outbox.flush()
    assert ends.messages(b"a") == [(wire.Batch(id=-1, replies=replies), [])]
    assert ends.messages(b"b") == [(small(9), [])]


def test_what_has_payloads_goes_at_once(ends: Ends) -> None:
    groups = [StoredGroup(i, "n0", META) for i in range(2)]
    ends.outbox.put(b"a", small(0))
    ends.outbox.put(b"a", wire.Answer(id=1, value=groups), [b"first", b"second"])
    [(reply, payloads)] = ends.messages(b"a")
    assert isinstance(reply, wire.Answer)
    taken = wire.Take(step=0, count=2, wait_s=0).read(reply.value, payloads)
    assert taken == [StoredGroup(0, "n0", META, b"first"), StoredGroup(1, "n0", META, b"second")]


def test_every_reply_to_a_client_that_is_gone_is_told_once(ends: Ends) -> None:
    for i in range(3):
        ends.outbox.put(b"gone", small(i))
    ends.outbox.put(b"a", small(9))
    ends.outbox.flush()
    assert ends.undelivered == [(b"gone", small(i)) for i in range(3)]
    assert ends.messages(b"a") == [(small(9), [])]
    ends.outbox.flush()
    assert len(ends.undelivered) == 3
