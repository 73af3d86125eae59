"""A connection that knows which store is the run's: finds it, makes moves in it, notices that it is gone."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from broker.redis import reading
from broker.redis.endpoint import Endpoint
from broker.redis.keys import RUNS, Keys, Pointer, pointer_key
from broker.redis.link import Link
from broker.redis.moves import Command, Moves, StoreGone
from common.errors import BrokerError, BrokerUnreachable, UsageError

FIND_PAUSE_S = 0.1
WAIT_PIECE_S = 1.0  # a longer wait is asked for in pieces, each a sign of life; bounds a wake-up that got lost

Arguments = Callable[[bool], tuple[bytes | str | int, ...]]  # (repeated) -> what follows a move's name


class StoreLink:
    """One thread's connection to one run.

    Args:
        endpoint, role: of the connection.
        run: its name; '' when the address does not say, then the only run on the server is meant.
        deadline_s: without an answer for this long, a call raises BrokerUnreachable.
    """

    def __init__(self, endpoint: Endpoint, role: str, run: str, deadline_s: float) -> None:
        self._link = Link(endpoint, role, max(deadline_s, 1.0) + WAIT_PIECE_S)
        self._run, self._deadline_s = run, deadline_s
        self._moves: Moves | None = None

    def close(self) -> None:
        """Drop the connection."""
        self._link.close()

    @property
    def keys(self) -> Keys:
        """Of the store in use; only after a call that found one."""
        assert self._moves is not None
        return self._moves.keys

    @property
    def store(self) -> str:
        """The store in use; '' before the first call."""
        return self._moves.keys.store if self._moves else ""

    def forget_store(self) -> None:
        """The next call looks up which store is the run's."""
        self._moves = None

    def move(self, name: str, arguments: Arguments, bound: str = "") -> list[Any]:
        """Make a move of delivery.lua and return its answer.

        Args:
            bound: the store that it must be in ('': whichever is the run's now).

        Raises:
            BrokerError: refused; StoreGone when `bound` is no longer the run's store.
            BrokerUnreachable: at the deadline.
        """
        end = time.monotonic() + self._deadline_s
        while True:
            moves = self._found(end)
            if bound and moves.keys.store != bound:
                raise StoreGone(
                    f"run {moves.run} has another store now ({moves.keys.store}, was {bound}); attach again"
                )

            def build(repeated: bool, whole: bool, moves: Moves = moves) -> list[Command]:
                return [moves.command(name, *arguments(repeated), whole=whole)]

            try:
                return moves.answer(self._link.run(build, end)[0])
            except StoreGone:
                self._moves = None
                if bound or time.monotonic() >= end:
                    raise
                time.sleep(FIND_PAUSE_S)

    def ask(self, commands: list[Command]) -> list[Any]:
        """Replies to plain commands."""
        return self._link.run(lambda repeated, whole: commands, time.monotonic() + self._deadline_s)

    def read(self, commands: Callable[[Moves], list[Command]]) -> list[Any]:
        """Replies to read-only commands about the run's store, from one moment.

        When they have to be repeated, the moments may differ: a server whose memory is full refuses transactions.
        """
        end = time.monotonic() + self._deadline_s
        pointer: Command = ("GET", pointer_key(self._found(end).run))
        while True:
            wanted = commands(self._found(end))
            together = True

            def build(repeated: bool, whole: bool, wanted: list[Command] = wanted) -> list[Command]:
                nonlocal together
                together = not repeated
                return [*(reading.transaction(wanted) if together else wanted), pointer]

            store = self.store
            *replies, stored = self._link.run(build, end)
            if stored is not None and msgspec.json.decode(stored, type=Pointer).store == store:
                return replies[-1] if together else replies
            self._moves = None

    def wait(self, nonce: str, wait_s: float) -> None:
        """Until somebody wakes `nonce`, at most `wait_s` seconds (and WAIT_PIECE_S)."""
        end = time.monotonic() + self._deadline_s
        key = self._found(end).keys.of(f"wake:{nonce}")
        block_s = max(0.01, min(wait_s, WAIT_PIECE_S))
        self._link.run(lambda repeated, whole: [("BLPOP", key, f"{block_s:.3f}")], end)

    def _found(self, end: float) -> Moves:
        while self._moves is None:
            run, missing = self._run, "no run is registered on the Redis server"
            if not run:
                run = choose_run(self._ask(("SMEMBERS", RUNS), end))
            if run:
                store = store_of(run, self._ask(("GET", pointer_key(run)), end))
                if store:
                    self._moves = Moves(run, store)
                    break
                missing = f"no run {run} is on the Redis server"
            if time.monotonic() >= end:
                at = self._link.endpoint.name
                raise BrokerUnreachable(f"{missing} (at {at}); is `slipstream broker CONFIG` running?")
            time.sleep(FIND_PAUSE_S)
        return self._moves

    def _ask(self, command: Command, end: float) -> Any:
        return self._link.run(lambda repeated, whole: [command], end)[0]


def choose_run(names: Iterable[bytes]) -> str:
    """The only run of a server, '' when there is none. Raises UsageError when there are several."""
    runs = sorted(name.decode() for name in names)
    if len(runs) > 1:
        raise UsageError(f"the Redis server has the runs {', '.join(runs)}; add ?run=NAME to its address")
    return runs[0] if runs else ""


def store_of(run: str, pointer: bytes | None) -> str:
    """The store that a run's pointer names, '' when there is none. Raises BrokerError when it is unreadable."""
    if pointer is None:
        return ""
    try:
        return msgspec.json.decode(pointer, type=Pointer).store
    except msgspec.DecodeError as error:
        raise BrokerError(f"{pointer_key(run).decode()} on the Redis server cannot be read: {error}") from error
