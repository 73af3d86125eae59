"""Which groups are in memory: those that the learner needs next, up to a bound. The store has all of them.

    groups of the step that was asked for last    in memory: they may be on their way to the learner
    ready groups, the oldest first                in memory as far as the bound allows; read ahead
    groups of earlier steps                       the first to leave memory; a learner that resumes takes them again

A group leaves memory once it is written. A thread reads groups back, so the broker's loop never waits for the store.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain, islice

from broker.delivery.state import DeliveryState
from broker.delivery.task_table import Entry, StoredPayload
from broker.journal.journal import Journal

TEND_S = 0.05  # the bound is looked at so often
ROOM = 8  # a full memory is emptied by one part in so many
LAG = 2  # nodes wait when groups that are not written yet are so many times the bound


class GroupMemory:
    """Belongs to the broker's loop; `notify` is called by the reading thread when it has read a group."""

    def __init__(self, state: DeliveryState, journal: Journal, notify: Callable[[], None]) -> None:
        self._state = state
        self._journal = journal
        self._most = state.run.memory_bytes
        self._notify = notify
        self._step = -1  # that was asked for last
        self._next = 0.0
        self._held: Container[str] = ()
        self._asked: dict[StoredPayload, int] = {}  # bytes of each group that is being read
        self._failed: set[StoredPayload] = set()
        self._queue: queue.SimpleQueue[tuple[Entry, StoredPayload] | None] = queue.SimpleQueue()
        self._found: deque[tuple[Entry, StoredPayload, bytes | None]] = deque()
        self._thread = threading.Thread(target=self._read, name="groups", daemon=True)
        self._thread.start()

    def has(self, step: int, entries: Sequence[Entry]) -> bool:
        """Whether the groups of a step are in memory, or cannot be read; else they are being read from now on."""
        self._step = step
        self._collect()
        stored = [entry for entry in entries if isinstance(entry.payload, StoredPayload)]
        missing = [entry for entry in stored if entry.payload not in self._failed]
        self._ask(missing)
        if not missing:
            self._failed.clear()
        return not missing

    def tend(self, now: float) -> None:
        """Keep memory within its bound, and read ahead for the next step; `now` in monotonic seconds."""
        self._collect()
        if now < self._next:
            return
        self._next = now + TEND_S
        tasks = self._state.tasks
        newest = [tasks.living[serial] for serial in tasks.steps.get(self._step, ())]
        own = sum(entry.payload_bytes * entry.in_memory for entry in newest)
        over = tasks.bytes_in_memory - own > self._most
        if over:
            earlier = (serials for step, serials in tasks.steps.items() if step != self._step)
            serials = chain(chain.from_iterable(earlier), reversed(tasks.ready))
            self._shrink(own + self._most - self._most // ROOM, map(tasks.living.__getitem__, serials))
        elif not self._asked:
            self._read_ahead(self._most - (tasks.bytes_in_memory - own))
        lags = tasks.bytes_in_memory - own > LAG * self._most
        self._state.lease_revision += tasks.store_lags and not lags
        tasks.store_lags = lags

    def release(self, held: Container[str]) -> None:
        """The learner has these groups, by token: while memory is half full they make room for others."""
        self._held = held
        ready = map(self._state.tasks.living.__getitem__, self._state.tasks.ready)
        self._shrink(self._most // 2, (entry for entry in ready if entry.token in held))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _shrink(self, most: int, entries: Iterable[Entry]) -> None:
        tasks = self._state.tasks
        for entry in entries if not self._journal.stuck else ():  # a store that lost records gets them from memory
            if tasks.bytes_in_memory <= most:
                break
            if entry.in_memory and entry.stored is not None and entry.stored.location is not None:
                tasks.hold(entry, entry.stored)

    def _read_ahead(self, room: int) -> None:
        tasks = self._state.tasks
        for serial in islice(tasks.ready, self._state.run.groups_per_step):
            entry = tasks.living[serial]
            if not entry.in_memory and entry.token not in self._held:
                room -= entry.payload_bytes
                if room < 0:
                    return
                self._ask([entry])

    def _ask(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            stored = entry.payload
            if isinstance(stored, StoredPayload) and stored not in self._asked and stored not in self._failed:
                self._asked[stored] = entry.payload_bytes
                self._queue.put((entry, stored))

    def _collect(self) -> None:
        while self._found:
            entry, stored, payload = self._found.popleft()
            del self._asked[stored]
            if payload is None:
                self._failed.add(stored)
            elif entry.payload is stored:
                self._state.tasks.hold(entry, payload)

    def _read(self) -> None:
        while (item := self._queue.get()) is not None:
            payload = None
            with contextlib.suppress(Exception):  # the take reads it again, and says what is wrong
                payload = item[1].read()
            self._found.append((*item, payload))
            self._notify()
