"""Ends every rank when one of them is silent for learner.timeout_s, and says which one.

Every rank counts up a number in the world's TCPStore, from a thread. The lead reads the numbers of all ranks, and the
others read the lead's. Collectives have the same limit, but that is not enough. A gloo broadcast may complete although
no rank received it. Neither gloo nor NCCL says which rank is missing.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

from common.errors import EXIT_FAILED, SlipstreamError
from common.process.lifecycle import leave
from common.weights.transports.groups import dist

logger = logging.getLogger(__name__)

LONGEST_INTERVAL_S = 5.0
INTERVALS = 16  # in learner.timeout_s
SILENT_AFTER = 3  # intervals without a sign before a rank is mentioned
GOODBYE_S = 5.0  # for the last words of a rank that ends


class RankMonitor:
    """While the context is active, this rank ends when another one is silent for too long or has failed."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_silence: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        """From threads, `on_silence` gets the silent ranks ('' for none), `on_end` the reason before the process ends.

        A rank that is alone in its world has no monitor.
        """
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._on_end = on_end
        self._interval_s = min(LONGEST_INTERVAL_S, timeout_s / INTERVALS)
        self._peers = [peer for peer in range(world_size if rank == 0 else 1) if peer != rank]
        self._heard: dict[int, float] = {}  # monotonic time of a peer's last sign
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        self._store: Any = None  # torch's; None in a rank that is alone

    def __enter__(self) -> "RankMonitor":
        if self._world_size > 1:
            host = os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
            # a connection of its own to the store of torch.distributed's world
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self._timeout_s))
            self._store = dist.PrefixStore("rank-monitor", store)
            self._heard = dict.fromkeys(self._peers, time.monotonic())
            for work in (self._exchange, self._watch):
                threading.Thread(target=work, name=f"monitor{work.__name__}", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop and tell the other ranks the error; raises SlipstreamError where a silent rank was its cause.

        torch has no exception class for a collective that waited too long: gloo raises a plain RuntimeError, as for
        anything else, and NCCL a DistError. So these get a note about the deadline.
        """
        self._leaving.set()
        if error is None or self._store is None:
            return
        if isinstance(error, SlipstreamError):
            self._tell(error.exit_code, str(error))
            return
        if silence := self._silence():
            self._tell(EXIT_FAILED, silence)
            raise SlipstreamError(f"{silence}: {error}") from error
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            error.add_note(f"A collective waits at most {self._timeout_s:g} s for other ranks (learner.timeout_s).")
        self._tell(EXIT_FAILED, " ".join([f"{type(error).__name__}: {error}.", *getattr(error, "__notes__", [])]))

    def _exchange(self) -> None:
        """The thread that talks to the store, which may take for ever when the network is cut."""
        assert self._store is not None
        seen: dict[int, bytes] = {}
        count = 0
        try:
            while not self._leaving.wait(self._interval_s):
                count += 1
                self._store.set(f"sign/{self._rank}", str(count))
                for peer in self._peers:
                    if not self._store.check([f"sign/{peer}"]):  # `get` would wait for its first one
                        continue
                    if (sign := self._store.get(f"sign/{peer}")) != seen.get(peer):
                        seen[peer] = sign
                        self._heard[peer] = time.monotonic()
                if self._store.check(["end"]):
                    code, _, reason = self._store.get("end").decode().partition(" ")
                    self._end(int(code), reason)
        except RuntimeError as error:
            if not self._leaving.is_set():
                self._end(EXIT_FAILED, f"the ranks' store is gone: {str(error).splitlines()[0]}")

    def _watch(self) -> None:
        """The thread that never waits for anybody."""
        while not self._leaving.wait(self._interval_s):
            silence = self._silence()
            self._on_silence(silence)
            if silence and time.monotonic() - min(self._heard.values()) > self._timeout_s:
                self._end(EXIT_FAILED, silence)

    def _silence(self) -> str:
        """Which ranks are silent and for how long; '' when none is."""
        now = time.monotonic()
        quiet = {peer: now - at for peer, at in self._heard.items() if now - at > SILENT_AFTER * self._interval_s}
        if not quiet:
            return ""
        names = ", ".join(map(str, quiet))
        return (
            f"rank{'s' * (len(quiet) > 1)} {names} silent for {max(quiet.values()):.0f} s; "
            f"every rank ends after {self._timeout_s:g} s (learner.timeout_s)"
        )

    def _end(self, code: int, reason: str) -> None:
        """End this process after telling the others; only the first caller's reason counts."""
        if self._leaving.is_set() or not self._ending.acquire(blocking=False):
            return
        logger.error("this rank ends: %s", reason)
        self._tell(code, reason)
        words = threading.Thread(target=self._on_end, args=(reason,), daemon=True)
        words.start()
        words.join(GOODBYE_S)
        leave(code)

    def _tell(self, code: int, reason: str) -> None:
        """Leave the reason in the store, from a thread: the store may not answer, or be gone."""

        def tell() -> None:
            assert self._store is not None
            with contextlib.suppress(RuntimeError):
                self._store.set("end", f"{code} {reason}")

        told = threading.Thread(target=tell, daemon=True)
        told.start()
        told.join(GOODBYE_S)
