"""Which tasks are offered to the broker, and which of them no step has consumed yet.

The broker numbers tasks 0, 1, 2, ... (serials); the dataset numbers its tasks likewise (positions, task_source.py).
They are the same as long as the broker remembers the run. A broker that starts with an empty store counts from 0
again, and its store has another id than the checkpoint names. A learner that resumes then offers first the positions
that were offered and never consumed, so each position is still consumed once.
"""

import msgspec

from broker.contract import Attached
from common.rollouts import Task
from learner.checkpoint.folder import StreamState
from learner.loop.task_source import TaskSource


class TaskStream:
    """Offers tasks in order and keeps count; the lead rank's, not thread-safe."""

    def __init__(self, source: TaskSource, state: StreamState | None = None) -> None:
        state = state or StreamState()
        self._source = source
        self._next_serial = state.next_serial
        self._cursor = state.cursor
        self._backlog = list(state.backlog)
        self._outstanding = dict(state.outstanding)
        self.renumbered = state.renumbered
        self._store_id = state.store_id

    @property
    def outstanding(self) -> int:
        """Tasks offered that no step has consumed, dead ones included."""
        return len(self._outstanding)

    def attach(self, attached: Attached) -> bool:
        """Agree with the broker on the next serial. Returns False when it lost its memory, or the newest part of it.

        Tasks that were offered after the checkpoint came in the order in which they come now, so the stream
        advances to the broker's serial. This also covers an earlier learner that met the new store.
        A store with fewer serials than the checkpoint lost its newest records, as in a power cut with
        broker.durability: everysec. Only the lost tasks are offered again.
        """
        known = not self._store_id or attached.store_id == self._store_id
        behind = attached.next_serial < self._next_serial
        if known and behind and self._store_id:
            self._forget(attached.next_serial)
        elif not known or behind:
            self._forget(0)
        self._store_id = attached.store_id
        while self._next_serial < attached.next_serial:
            self._advance()
        return known and not behind

    def _forget(self, first: int) -> None:
        """The broker no longer knows the serials from `first` on."""
        lost = [serial for serial in self._outstanding if serial >= first]
        self._backlog = sorted([*(self._outstanding.pop(serial) for serial in lost), *self._backlog])
        self._next_serial = first
        self.renumbered = True

    def next(self, count: int) -> list[Task]:
        """The next `count` tasks to offer, under the broker's serials."""
        tasks: list[Task] = []
        for _ in range(count):
            serial, position = self._advance()
            tasks.append(msgspec.structs.replace(self._source.task(position), serial=serial))
        return tasks

    def consume(self, serials: list[int]) -> None:
        """A step trains on these."""
        for serial in serials:
            self._outstanding.pop(serial, None)

    def consumed(self, serial: int) -> bool:
        """Whether a step has trained on it, or filtered it."""
        return serial < self._next_serial and serial not in self._outstanding

    def state(self) -> StreamState:
        return StreamState(
            next_serial=self._next_serial,
            cursor=self._cursor,
            backlog=list(self._backlog),
            outstanding=dict(self._outstanding),
            renumbered=self.renumbered,
            store_id=self._store_id,
        )

    def _advance(self) -> tuple[int, int]:
        """(serial, position) of the next task, counted as offered."""
        if self._backlog:
            position = self._backlog.pop(0)
        else:
            position = self._cursor
            self._cursor += 1
        serial = self._next_serial
        self._next_serial += 1
        self._outstanding[serial] = position
        return serial, position
