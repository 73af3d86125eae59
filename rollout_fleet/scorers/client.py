"""A scorer's client, one for each scorer of a node: bounds, retries, a cache, and a pause when it keeps failing.

    score --> cache --> slot (concurrency) --> pace (requests_per_minute, Retry-After) --> HTTP --> verdict
                          ^                                                                 |
                          +----- backoff after 429, 5xx, a timeout or a lost connection <---+

Whatever the endpoint does fails single samples, with a reason. After `failures` failed scores in a row the node takes
no more tasks (`paused`). Then it asks the newest request that had a score again, until it has one once more. A sample
that no server could judge may be the cause of a pause, but cannot prolong it. Before the first score it asks failed
requests again, in turn.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Generic, TypeVar

import aiohttp

from common.config.scorers import ScorerConfig
from rollout_fleet.scorers.requests import (
    ANSWER_BYTES,
    SHOWN_CHARS,
    Answer,
    Score,
    ScorerFailed,
    address_of,
    body_of,
    score_of,
)

logger = logging.getLogger(__name__)

BACKOFF_S = 0.5  # before the first retry, doubled by each further one
MOST_BACKOFF_S = 30.0
MOST_HOLD_S = 3600.0  # by a Retry-After
PROBE_S = 5.0  # between looks at a scorer that failed, doubled by each further one
MOST_PROBE_S = 60.0
REMEMBERED = 4  # failed requests that are asked again before the first score
RETRIED = (408, 425, 429)  # and every 5xx


class _TryAgain(Exception):
    """A request that may do better a little later."""


A = TypeVar("A", bound=Answer)


@dataclass(frozen=True)
class _Question(Generic[A]):
    body: bytes  # JSON
    read: Callable[[bytes], A]  # raises ScorerFailed for an answer that says nothing
    room: int  # bytes of the longest answer


class Scorer:
    """Belongs to one event loop; its session starts with the first request."""

    def __init__(self, name: str, config: ScorerConfig) -> None:
        self.config = config
        self.paused = ""  # why the node takes no more tasks
        self._name = name
        self._key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.concurrency)
        self._pace = asyncio.Lock()
        self._next_at = 0.0  # earliest time of the next request by requests_per_minute, monotonic seconds
        self._held_until = 0.0  # earliest time of the next request by a Retry-After, monotonic seconds
        self._held_by = ""
        self._known: OrderedDict[bytes, asyncio.Task[Score]] = OrderedDict()
        self._running: set[asyncio.Task[Any]] = set()
        self._failed_in_a_row = 0
        self._failed: deque[_Question[Any]] = deque(maxlen=REMEMBERED)
        self._good: _Question[Any] | None = None  # the newest that had an answer
        self._probing: asyncio.Task[None] | None = None  # while it is paused

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], *, other: str = ""
    ) -> tuple[Score, bool]:
        """(the score, whether it was known or already asked for); `other` as in body_of. Raises ScorerFailed."""
        try:
            body = body_of(self.config, row, prompt=prompt, completion=completion, other=other)
        except ValueError as error:
            raise ScorerFailed(f"{self._name}: {error}") from error
        digest = hashlib.sha256(body).digest()
        asking = self._known.get(digest)
        known = asking is not None
        if asking is None:
            asking = self._start(self._counted(_Question(body, partial(score_of, self.config), ANSWER_BYTES)))
            if self.config.cache:
                self._known[digest] = asking
                asking.add_done_callback(partial(self._forget_failed, digest))
        if digest in self._known:
            self._known.move_to_end(digest)
            while len(self._known) > self.config.cache:
                self._known.popitem(last=False)
        return await asyncio.shield(asking), known  # others may wait for the same score

    async def ask(self, body: bytes, read: Callable[[bytes], A], room: int) -> A:
        """`read` of the answer to `body`, which is at most `room` bytes longer than a score. Raises ScorerFailed."""
        return await self._start(self._counted(_Question(body, read, ANSWER_BYTES + room)))

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, also when no sample waits any more

    def _forget_failed(self, digest: bytes, task: asyncio.Task[Score]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._known.get(digest) is task:
            del self._known[digest]

    # ---------------------------------------------------------------- failures in a row

    async def _counted(self, question: _Question[A]) -> A:
        try:
            answer = await self._asked(question)
        except ScorerFailed as error:
            self._failed_in_a_row += 1
            self._failed.append(question)
            if self._failed_in_a_row >= self.config.failures and not self.paused:
                logger.error("%s; the node takes no more tasks until it answers", self._pause(error))
                self._probing = self._start(self._probe())
            raise
        self._good = question
        self._answered()
        return answer

    def _pause(self, error: ScorerFailed) -> str:
        self.paused = f"{self._failed_in_a_row} scores of {self._name} failed in a row, the last with: {error}"
        return self.paused

    def _answered(self) -> None:
        if self.paused:
            logger.warning("scorer %s answers again", self._name)
        if self._probing is not None and self._probing is not asyncio.current_task():
            self._probing.cancel()
        self._probing = None
        self._failed_in_a_row = 0
        self._failed.clear()
        self.paused = ""

    async def _probe(self) -> None:
        """Ask a request again, as above, until it has a score."""
        for wait_s in _growing(PROBE_S, MOST_PROBE_S):
            await asyncio.sleep(wait_s)
            self._failed.rotate(-1)
            try:
                await self._asked(self._good or self._failed[-1])
            except ScorerFailed as error:
                self._pause(error)
            else:
                self._answered()
                return

    # ---------------------------------------------------------------- one score

    async def _asked(self, question: _Question[A]) -> A:
        """The answer by as many requests as it takes. Raises ScorerFailed."""
        started = time.monotonic()
        last = "none was made"
        try:
            async with asyncio.timeout(self.config.deadline_s):
                for retries, backoff_s in enumerate(_growing(BACKOFF_S, MOST_BACKOFF_S)):
                    try:
                        async with self._slots:
                            await self._paced(started + self.config.deadline_s)
                            answer = await self._post(question)
                        return replace(question.read(answer), retries=retries, seconds=time.monotonic() - started)
                    except _TryAgain as error:
                        last = str(error)
                        if retries == self.config.retries:
                            raise ScorerFailed(f"{last} ({retries} retries)") from error
                    await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
        except TimeoutError as error:
            raise self._named(f"no score within {self.config.deadline_s:g} s; the last request: {last}") from error
        except ScorerFailed as error:
            raise self._named(str(error)) from error
        except Exception as error:  # such as a key that is no header; nothing else would count it
            raise self._named(f"{type(error).__name__}: {error}") from None  # its text may have the key
        raise AssertionError("the waits never end")

    def _named(self, reason: str) -> ScorerFailed:
        """A failure that names the scorer; a key that its server repeated is left out."""
        return ScorerFailed(f"{self._name}: {reason.replace(self._key, '***') if self._key else reason}")

    async def _paced(self, deadline: float) -> None:
        """Wait until a request may be made; waiters come one after another, and who gives up takes no place.

        Raises ScorerFailed when the server asked for a wait beyond `deadline`.
        """
        per_minute = self.config.requests_per_minute
        if per_minute is None and self._held_until <= time.monotonic():
            return
        async with self._pace:
            while (wait_s := max(self._next_at, self._held_until) - time.monotonic()) > 0:
                if self._held_until >= deadline:
                    raise ScorerFailed(f"{self._held_by}; its Retry-After ends after deadline_s")
                await asyncio.sleep(wait_s)
            if per_minute is not None:
                self._next_at = time.monotonic() + 60 / per_minute

    async def _post(self, question: _Question[Any]) -> bytes:
        """The body of a good answer. Raises _TryAgain or ScorerFailed."""
        if self._session is None:
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            connector = aiohttp.TCPConnector(limit=self.config.concurrency)
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        timeout = aiohttp.ClientTimeout(total=self.config.timeout_s)
        url = address_of(self.config)
        try:
            async with self._session.post(url, data=question.body, timeout=timeout, allow_redirects=False) as response:
                answer = bytearray()
                async for chunk in response.content.iter_any():
                    answer += chunk
                    if len(answer) > question.room:
                        raise ScorerFailed(f"an answer of more than {question.room} bytes")
        except TimeoutError as error:
            raise _TryAgain(f"no answer within {self.config.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return bytes(answer)
        said = f"HTTP {response.status}: {answer[:SHOWN_CHARS].decode(errors='replace')}"
        if response.status not in RETRIED and response.status < 500:
            raise ScorerFailed(said)
        until = time.monotonic() + min(_wait_of(response.headers.get("Retry-After", "")), MOST_HOLD_S)
        if until > self._held_until:  # for all requests
            self._held_until = until
            self._held_by = said
        raise _TryAgain(said)


def _growing(first_s: float, most_s: float) -> Iterable[float]:
    return (min(first_s * 2**number, most_s) for number in itertools.count())


def _wait_of(retry_after: str) -> float:
    """Seconds that a Retry-After asks for; 0 without a good one."""
    with contextlib.suppress(ValueError, OverflowError):
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return 0.0
