"""Leading for a term: every write to the store goes through fence.lua, which refuses brokers of an earlier term."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from broker.journal.redis_store.connection import asking
from broker.journal.redis_store.keys import About, Leader, run_prefix
from broker.journal.store import StoreBehind, StoreFenced, StoreUnavailable
from common.errors import BrokerError, UsageError
from common.process.lifecycle import alive

logger = logging.getLogger(__name__)

TERM_S = 6.0  # a leader that has not renewed its term for so long may be replaced
RENEW_S = 1.5
SCRIPT = Path(__file__).with_name("fence.lua").read_bytes()

Command = tuple[bytes | memoryview | str | int, ...]


class Term:
    """The term of one broker on the run `run` of the folder `run_dir`, on the server `name`."""

    def __init__(self, client: Any, name: str, run: str, run_dir: str) -> None:
        self.client, self.name, self.run_dir, self.prefix = client, name, run_dir, run_prefix(run)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        self._me = Leader(secrets.token_hex(8), "", run_dir, socket.gethostname(), os.getpid(), machine)
        self._keys = [f"{self.prefix}head", f"{self.prefix}leader"]
        self.number = 0  # the term's; 0 while another broker leads
        self.ends = 0.0  # when another broker may take the term; seconds of a clock that runs in stopped processes, too

    def about(self) -> tuple[About | None, int]:
        """Which store the run has, if the server knows it, and the number of its last record. Raises as `take`."""
        found, seq = self.run([("HMGET", self._keys[0], "about", "seq")])[0]
        about = None if found is None else msgspec.json.decode(found, type=About)
        if about is not None:
            self._check_folder(about.run_dir)
        return about, int(seq or 0)

    def take(self, address: str, known: int = 0) -> Leader | None:
        """Begin a term higher than `known`, with clients at `address`, unless another broker leads: returns that one.

        Raises UsageError when the run of that name belongs to another folder; also as `asking`.
        """
        self._me = msgspec.structs.replace(self._me, address=address)
        ended = ""
        while True:
            status, term, leader, _ = self._run([], self._keys, "take", known, ended)
            if status == b"ok":
                self.number = term
                return None
            other = msgspec.json.decode(leader, type=Leader)
            if ended or other.machine != self._me.machine or alive(other.pid):
                self._check_folder(other.run_dir)
                return other
            ended = leader  # it was killed on this machine: its term need not run out

    def leader(self) -> Leader | None:
        """The broker that leads. Raises as `take`."""
        found = self.run([("GET", self._keys[1])])[0]
        return None if found is None else msgspec.json.decode(found, type=Leader)

    def write(self, store_prefix: str, before: Sequence[Command], operation: str, *rest: bytes | str | int) -> None:
        """Run plain commands, then a fenced operation. Raises StoreFenced, StoreBehind; also as `asking`."""
        keys = [f"{store_prefix}log", f"{store_prefix}history"]
        status, term, leader, seq = self._run(before, keys, operation, self.number, *rest)
        if status == b"fenced":
            self.ends = 0.0
            other = msgspec.json.decode(leader, type=Leader)
            leads = f"the broker of {other.address} (process {other.pid} on {other.host}) leads in term {term}"
            raise StoreFenced(f"{leads}; this one led in term {self.number}")
        if status == b"behind":
            raise StoreBehind(f"Redis at {self.name} ends with record {seq.decode()} of term {term}")

    def renew(self) -> None:
        """Lead longer, while nothing is written. Raises as `write`."""
        self.write(self.prefix, [], "renew")

    @contextmanager
    def renewing(self) -> Generator[None]:
        """While active, a thread renews the term; a failure only means that another broker may take it."""
        ending = threading.Event()

        def renew() -> None:
            while not ending.wait(RENEW_S):
                try:
                    self.renew()
                except (StoreUnavailable, BrokerError) as error:
                    logger.warning("the term was not renewed: %s", error)

        thread = threading.Thread(target=renew, name="term", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def resign(self) -> None:
        """Let another broker lead now; a failure only means that the term ends by itself."""
        if not self.number:
            return
        try:
            self.write(self.prefix, [], "resign")
        except (StoreUnavailable, BrokerError) as error:
            logger.warning("the term ends by itself: %s", error)
        self.number, self.ends = 0, 0.0

    @property
    def lapsed(self) -> bool:
        """Whether another broker may lead by now."""
        return time.monotonic() >= self.ends

    def _run(
        self, before: Sequence[Command], keys: Sequence[str], operation: str, term: int, *rest: bytes | str | int
    ) -> tuple[bytes, int, bytes, bytes]:
        begun = time.monotonic()
        arguments = (operation, msgspec.json.encode(self._me), term, round(TERM_S * 1000), *rest)
        replies = self.run([*before, ("EVAL", SCRIPT, 4, *self._keys, *keys, *arguments)])
        if replies[-1][0] == b"ok":
            self.ends = begun + TERM_S
        return tuple(replies[-1])

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Replies to plain commands, in one round trip. Raises as `write`."""
        pipe = self.client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        with asking(self.name):
            replies = pipe.execute(raise_on_error=False)  # otherwise redis-py puts the payloads into its message
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    def _check_folder(self, theirs: str) -> None:
        if theirs != self.run_dir:
            raise UsageError(
                f"run.name: the Redis server at {self.name} has a run of this name in the folder {theirs}, and this "
                f"one is {self.run_dir}. Choose another run.name or another database. Keys are never deleted here: "
                "docs/redis.md says how to do it"
            )
