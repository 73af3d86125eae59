"""One blocking connection to Redis that repeats what it is asked until it is answered or the time is over."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from broker.redis.endpoint import Endpoint
from broker.redis.moves import Command, packed, refused, verdict
from common.errors import BrokerUnreachable

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0

Build = Callable[[bool, bool], Sequence[Command]]  # (repeated, whole script) -> commands of one attempt


class Link:
    """Not safe for threads: each has its own.

    Args:
        endpoint: the server.
        role: for errors.
        read_timeout_s: a server that says nothing for this long is asked again over a new connection.
    """

    def __init__(self, endpoint: Endpoint, role: str, read_timeout_s: float) -> None:
        self.endpoint, self._role = endpoint, role
        self._connection = endpoint.connection(read_timeout_s)

    def close(self) -> None:
        """Drop the connection."""
        self._connection.disconnect()

    def run(self, build: Build, end: float) -> list[Any]:
        """Replies to `build`'s commands, repeated until `end` (monotonic seconds); all must be safe to repeat.

        Raises:
            BrokerUnreachable: no answer until `end`; the message has the last reason.
            BrokerError: Redis refuses: no permission, wrong password, an error in a command.
        """
        started, pause_s = time.monotonic(), FIRST_PAUSE_S
        repeated = whole = False
        while True:
            try:
                replies = self._attempt(build(repeated, whole))
                wrong = [r for r in replies if isinstance(r, Exception)]
                if not wrong:
                    return replies
                error = wrong[0]
            except Exception as raised:
                error = raised
            kind = verdict(error)
            if kind == "fatal":
                raise refused(error, self.endpoint.name, self._role) from error
            repeated = True
            if kind == "whole" and not whole:  # also at the deadline: the server answers
                whole = True
                continue
            now = time.monotonic()
            if now >= end:
                raise unreachable(self.endpoint, now - started, error) from error
            time.sleep(min(pause_s, max(0.0, end - now)))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _attempt(self, commands: Sequence[Command]) -> list[Any]:
        from redis.exceptions import ResponseError

        connection = self._connection
        connection.send_packed_command(packed(commands), check_health=False)
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(connection.read_response(disable_decoding=True))
            except ResponseError as error:
                replies.append(error)
        return replies


def unreachable(endpoint: Endpoint, waited_s: float, reason: object) -> BrokerUnreachable:
    """The error after a deadline."""
    return BrokerUnreachable(f"Redis at {endpoint.name} does not answer: {reason} (waited {waited_s:.0f} s)")
