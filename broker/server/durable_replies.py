"""Delays every reply that promises something until the promise is durable.

A reply waits for all records up to the end of its turn. So a repeated request waits like the first one, and an answer
that depends on another client's move waits for that move.
"""

from collections import OrderedDict
from typing import NamedTuple

import zmq

from broker.contract import LEARNER_ENDED
from broker.journal.journal import Journal
from broker.messaging import wire

PROMISES = (
    wire.Attach, wire.Offer, wire.Take, wire.Regenerate, wire.Filter, wire.Commit, wire.Complete,
)  # fmt: skip
MOST_HELD = 1 << 16
WORD_S = 1.0


def promises(request: wire.AnyRequest) -> bool:
    """Whether the answer waits for the disk. A learner's last report counts, because nodes leave because of it."""
    if isinstance(request, wire.Report):
        return request.report.state in LEARNER_ENDED
    return isinstance(request, PROMISES)


class Held(NamedTuple):
    client: bytes
    reply: wire.Reply
    payloads: list[bytes | zmq.Frame]


class HeldReplies:
    """Delayed replies in order; a request that is repeated meanwhile is answered once."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._this_turn: dict[tuple[bytes, int], Held] = {}
        self._word_at = 0.0
        self._waiting: OrderedDict[tuple[bytes, int], tuple[int, Held]] = OrderedDict()

    def hold(self, held: Held) -> None:
        """Keep a reply until `released` gives it back."""
        key = (held.client, held.reply.id)
        if key not in self._waiting:
            self._this_turn[key] = held

    def end_turn(self) -> list[Held]:
        """Send the turn's moves off; returns the replies that may go out now. Raises StoreFailed."""
        last = self._journal.end_turn()
        for key, held in self._this_turn.items():
            self._waiting[key] = (last, held)
        self._this_turn.clear()
        while len(self._waiting) > MOST_HELD:  # the oldest clients gave up long ago; living ones ask again
            self._waiting.popitem(last=False)
        return self.released()

    def waiting(self, now: float) -> list[Held]:
        """A Waiting with the reason for every delayed reply, about once a second while the store cannot be written."""
        reason = self._journal.stuck
        if not reason or now < self._word_at:
            return []
        self._word_at = now + WORD_S
        word = f"{reason}; nothing is acknowledged until there is room"
        return [Held(h.client, wire.Waiting(id=h.reply.id, reason=word), []) for _, h in self._waiting.values()]

    def released(self) -> list[Held]:
        """Replies whose promise is durable."""
        acknowledged = self._journal.acknowledged
        free: list[Held] = []
        while self._waiting:
            key, (seq, held) = next(iter(self._waiting.items()))
            if seq > acknowledged:
                break
            del self._waiting[key]
            free.append(held)
        return free
