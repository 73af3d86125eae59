"""How a move of delivery.lua is asked for and what its reply means; no connection, so both clients share it."""

import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, Literal

from broker.redis.endpoint import redis_module
from broker.redis.keys import Keys
from common.errors import BrokerError

Command = tuple[bytes | str | int | float, ...]
LARGE_BYTES = 6000
SCRIPT = resources.files("broker.redis").joinpath("delivery.lua").read_bytes()
SHA = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest()

# Codes of answers that another attempt may not get: a server that loads its data, a replica during a failover, a full
# or failing disk, no replica that is close enough, a script that takes long, memory that a commit will free.
_PASSING = (
    "LOADING",
    "READONLY",
    "TRYAGAIN",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "BUSY",
    "OOM",
    "UNBLOCKED",
)
_PASSING_IN_SCRIPT = re.compile(rf"-({'|'.join(_PASSING)})\b")


class StoreGone(BrokerError):
    """The store has lost acknowledged moves, or does not exist any more."""


class Moves:
    """Moves against one store."""

    def __init__(self, run: str, store: str) -> None:
        self.run = run
        self.keys = Keys(run, store)
        self.epoch = 0  # the highest that was acknowledged

    def expect(self, epoch: int) -> None:
        """An epoch that an earlier process was told."""
        self.epoch = max(self.epoch, epoch)

    def command(self, move: str, *arguments: bytes | str | int, whole: bool = False) -> Command:
        """The command; `whole` sends the script itself, for a server that does not know it yet."""
        head: Command = ("EVAL", SCRIPT) if whole else ("EVALSHA", SHA)
        return (*head, 1, self.keys.state, move, self.epoch, *arguments)

    def create(
        self, pointer_key: bytes, before: bytes, pointer: bytes, fields: Sequence[bytes | str | int], *, whole: bool
    ) -> Command:
        """The command that makes this the run's store; `before` is the pointer as it was read."""
        head: Command = ("EVAL", SCRIPT) if whole else ("EVALSHA", SHA)
        return (*head, 2, self.keys.state, pointer_key, "create", 0, before, pointer, *fields)

    def answer(self, reply: Any) -> list[Any]:
        """What a move replied after its code.

        Raises:
            BrokerError: refused, with the reason; StoreGone when the store may not be used any more.
        """
        epoch, code, *rest = reply
        if code == b"ok":
            self.expect(epoch)
            return rest
        if code == b"refused":
            raise BrokerError(rest[0].decode())
        run, store = self.run, self.keys.store
        if code == b"lost":
            raise StoreGone(
                f"Redis has lost moves of run {run} that it had acknowledged (store {store}: {rest[0].decode()}), as a "
                "failover to a replica that lagged may; a new store takes its place, and the learner starts again from "
                "its checkpoint, so that nothing is trained twice"
            )
        raise StoreGone(f"Redis no longer has the store {store} of run {run}; its memory is gone")


def packed(commands: Sequence[Command]) -> list[bytes]:
    """Commands as the protocol wants them; large arguments stay pieces of their own, so that they are not copied."""
    pieces: list[bytes] = []
    small: list[bytes] = []
    for command in commands:
        small.append(b"*%d\r\n" % len(command))
        for argument in command:
            data = argument if isinstance(argument, bytes) else str(argument).encode()
            if len(data) > LARGE_BYTES:
                pieces += (b"".join([*small, b"$%d\r\n" % len(data)]), data)
                small = [b"\r\n"]
            else:
                small.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return [*pieces, b"".join(small)]


def verdict(error: Exception) -> Literal["again", "whole", "fatal"]:
    """What to do after redis-py raised or returned `error`: repeat, repeat with the whole script, or give up."""
    errors = redis_module("redis.exceptions")
    if isinstance(error, errors.NoScriptError):
        return "whole"
    if isinstance(error, (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError)):
        return "fatal"
    if isinstance(error, (errors.ConnectionError, errors.TimeoutError, OSError)):
        return "again"
    text = str(error)
    passing = (errors.ReadOnlyError, errors.TryAgainError, errors.ClusterDownError, errors.OutOfMemoryError)
    if isinstance(error, passing) or text.startswith(_PASSING) or _PASSING_IN_SCRIPT.search(text):
        return "again"
    return "fatal"


def refused(error: Exception, name: str, role: str) -> BrokerError:
    """The error for a person, after a fatal verdict."""
    errors = redis_module("redis.exceptions")
    if isinstance(error, errors.NoPermissionError) or "can't run this command" in str(error):  # of a script's command
        return BrokerError(f"Redis at {name} does not permit what the role {role} needs ({error}); see docs/redis.md")
    if isinstance(error, (errors.AuthenticationError, errors.AuthorizationError)):
        return BrokerError(
            f"Redis at {name} does not let the role {role} in ({error}); check {role}.user and {role}.password in "
            "broker.credentials"
        )
    return BrokerError(f"Redis at {name}: {error}")
