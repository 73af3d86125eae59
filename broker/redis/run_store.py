"""Making a run's store on a server, or going on with the one that it has. Nothing of another run is ever touched."""

import secrets
import time
from typing import Any

import msgspec

from broker.contract import RunInfo
from broker.redis.keys import RUNS, Keys, Pointer, pointer_key
from broker.redis.link import Link
from broker.redis.moves import Command, Moves
from common.errors import UsageError


def facts(run: RunInfo, retain_steps: int, pid: int) -> dict[str, bytes | str | int]:
    """The fields of `state` that the job's config decides."""
    return {
        "run": msgspec.json.encode(run),
        "pid": pid,
        "b": run.groups_per_step,
        "k": run.max_staleness,
        "max_attempts": run.max_attempts,
        "lease_ms": round(run.lease_s * 1000),
        "max_lease_ms": round(run.max_lease_s * 1000),
        "max_bytes": run.max_bytes,
        "retain": retain_steps,
    }


class RunStore:
    """A run's place on one server.

    Args:
        link: connection of the keeper.
        run: of the job.
        retain_steps: broker.retain_steps.
        pid: of the keeper, for the status.
        deadline_s: of every call.
    """

    def __init__(self, link: Link, run: RunInfo, retain_steps: int, pid: int, deadline_s: float) -> None:
        self._link, self._run, self._deadline_s = link, run, deadline_s
        self._facts = facts(run, retain_steps, pid)

    @property
    def pointer_key(self) -> bytes:
        """The key that says which store the run has."""
        return pointer_key(self._run.name)

    def pointer(self) -> Pointer | None:
        """Which store the run has now; None on a server that does not know the run.

        Raises:
            UsageError: the run of that name belongs to another folder.
        """
        stored = self._pointer()
        if stored is None:
            return None
        pointer = msgspec.json.decode(stored, type=Pointer)
        if pointer.run_dir != self._run.run_dir:
            raise UsageError(
                f"run.name: the Redis server at {self._link.endpoint.name} has a run {self._run.name} of the folder "
                f"{pointer.run_dir}, and this one is {self._run.run_dir}; choose another run.name or another database "
                f"(its keys are never deleted here: docs/redis.md says how to)"
            )
        return pointer

    def lost(self, store: str) -> bool:
        """Whether `store` is gone, or was found to have lost acknowledged moves."""
        exists, lost = self._ask([("EXISTS", self._state(store)), ("HGET", self._state(store), "lost")])
        return not exists or lost is not None

    def enter(self, store: str) -> Moves:
        """Make `store` the run's store; one that exists goes on, with the facts of this job.

        Raises:
            BrokerError: another keeper was faster.
        """
        moves = Moves(self._run.name, store)
        pointer = msgspec.json.encode(Pointer(store, self._run.run_dir))
        fields = [x for pair in {"store": store, **self._facts}.items() for x in pair]
        before = self._pointer() or b""
        known: Command = ("SISMEMBER", RUNS, self._run.name)  # a server that is full takes no SADD, needed or not
        listed: list[Command] = [] if self._ask([known])[0] else [("SADD", RUNS, self._run.name)]

        def build(repeated: bool, whole: bool) -> list[Command]:
            create = moves.create(pointer_key(self._run.name), before, pointer, fields, whole=whole)
            return [*listed, create]

        replies = self._link.run(build, time.monotonic() + self._deadline_s)
        moves.answer(replies[-1])
        return moves

    def _pointer(self) -> bytes | None:
        return self._ask([("GET", pointer_key(self._run.name))])[0]

    def _ask(self, commands: list[Command]) -> list[Any]:
        return self._link.run(lambda repeated, whole: commands, time.monotonic() + self._deadline_s)

    def _state(self, store: str) -> bytes:
        return Keys(self._run.name, store).state


def new_store() -> str:
    """A name that no store ever had."""
    return secrets.token_hex(8)
