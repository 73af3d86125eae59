"""Replies on their way out: those without payload to one client go together in one message.

A node that hands in many groups gets many small answers, and the messages cost more than what is in them.
"""

from collections.abc import Callable
from typing import cast

import zmq

from broker.messaging import wire

FLAGS, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # plain numbers: operators of enums are slow


class Outbox:
    """Sends without ever waiting. `undelivered` is told of every reply whose client is gone (ROUTER_MANDATORY)."""

    def __init__(self, router: "zmq.Socket[bytes]", undelivered: Callable[[bytes, wire.Reply], None]) -> None:
        self._router, self._undelivered = router, undelivered
        self._waiting: dict[bytes, list[wire.Reply]] = {}

    def put(self, client: bytes, reply: wire.Reply, payloads: "list[bytes | zmq.Frame] | None" = None) -> None:
        """With payloads: sent at once. Without: at the next `flush`."""
        if payloads:
            self._send(client, [reply], payloads)
        else:
            self._waiting.setdefault(client, []).append(reply)

    def flush(self) -> None:
        while self._waiting:
            self._send(*self._waiting.popitem(), [])

    def _send(self, client: bytes, replies: list[wire.Reply], payloads: "list[bytes | zmq.Frame]") -> None:
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
