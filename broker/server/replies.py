"""Delays every reply that promises something until the promise is durable, and sends replies.

A delayed reply waits for all records up to the end of its turn. So a repeated request waits like the first one, and an
answer that depends on another client's move waits for that move.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, cast

import zmq

from broker import wire
from broker.journal.journal import Journal

MOST_DELAYED = 1 << 16
WAITING_EVERY_S = 1.0
FLAGS = int(zmq.NOBLOCK)  # plain numbers: operators of enums are slow
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

Payload = bytes | zmq.Frame


class Delayed(NamedTuple):
    client: bytes
    reply: wire.Reply
    payloads: list[Payload]


class DelayedReplies:
    """Delayed replies in order; a request that is repeated meanwhile is answered once."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._this_turn: dict[tuple[bytes, int], Delayed] = {}
        self._next_waiting = 0.0
        self._delayed: OrderedDict[tuple[bytes, int], tuple[int, Delayed]] = OrderedDict()

    def add(self, delayed: Delayed) -> None:
        key = (delayed.client, delayed.reply.id)
        if key not in self._delayed:
            self._this_turn[key] = delayed

    def end_turn(self, now: float) -> list[Delayed]:
        """Send the turn's moves off; returns the replies that may go out now. Raises StoreFailed.

        While the store cannot be written, there is about once a second a Waiting with the reason for every delayed one.
        """
        self._journal.wake.drain()
        self._delay()
        out = self._released()
        if (stuck := self._journal.stuck) and now >= self._next_waiting:
            self._next_waiting = now + WAITING_EVERY_S
            why = f"{stuck}; nothing is acknowledged until there is room"
            out += [Delayed(d.client, wire.Waiting(id=d.reply.id, reason=why), []) for _, d in self._delayed.values()]
        return out

    def close(self) -> list[Delayed]:
        """Close the journal; returns the replies whose promise is durable at the end."""
        self._delay()
        self._journal.close()
        return self._released()

    def _delay(self) -> None:
        last = self._journal.end_turn()
        self._delayed.update((key, (last, delayed)) for key, delayed in self._this_turn.items())
        self._this_turn.clear()
        while len(self._delayed) > MOST_DELAYED:  # the oldest clients gave up long ago; living ones ask again
            self._delayed.popitem(last=False)

    def _released(self) -> list[Delayed]:
        acknowledged = self._journal.acknowledged
        released: list[Delayed] = []
        while self._delayed and next(iter(self._delayed.values()))[0] <= acknowledged:
            released.append(self._delayed.popitem(last=False)[1][1])
        return released


class Outbox:
    """Sends without ever waiting. `undelivered` is told of every reply whose client is gone (ROUTER_MANDATORY).

    Replies without payload to one client go together in one message, which costs more than what is in it.
    """

    def __init__(self, router: "zmq.Socket[bytes]", undelivered: Callable[[bytes, wire.Reply], None]) -> None:
        self._router = router
        self._undelivered = undelivered
        self._waiting: dict[bytes, list[wire.Reply]] = {}

    def put(self, client: bytes, reply: wire.Reply, payloads: list[Payload] | None = None) -> None:
        """With payloads: sent at once. Without: at the next `flush`."""
        if payloads:
            self._send(client, [reply], payloads)
        else:
            self._waiting.setdefault(client, []).append(reply)

    def flush(self) -> None:
        while self._waiting:
            self._send(*self._waiting.popitem(), [])

    def _send(self, client: bytes, replies: list[wire.Reply], payloads: list[Payload]) -> None:
        batch = wire.Batch(id=-1, replies=cast(list[wire.SingleReply], replies))
        header = wire.encode(replies[0] if len(replies) == 1 else batch)
        try:
            self._router.send(client, MORE)
            self._router.send(header, MORE if payloads else FLAGS)
            for i, payload in enumerate(payloads, 1):
                self._router.send(payload, MORE if i < len(payloads) else FLAGS, copy=False)
        except zmq.ZMQError:
            for reply in replies:
                self._undelivered(client, reply)
