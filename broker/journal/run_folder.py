"""The leading broker's files in the run folder: broker.json, events.jsonl, and with Snapshots the two reports."""

import os
import time
from pathlib import Path

import msgspec

from broker.contract import BrokerEvent
from broker.journal.open_state import Memory
from broker.journal.redis_store.leading import Leading
from broker.journal.status_files import Snapshots
from broker.journal.store import StoreFenced
from common.process.event_file import EventFile
from common.process.files import move_aside
from common.process.run_dir import BrokerFile, RunDir, write_atomic

REMEMBER_S = 1.0


class RunFolder:
    """RUN/broker.json exists while the broker listens. RUN/events.jsonl grows by one line per event.

    Nothing is written while another broker may lead. A leader that was stopped and wakes up must not overwrite its
    successor's files.
    """

    def __init__(self, path: Path, leading: Leading | None) -> None:
        self.path, self._leading = path, leading
        self._events = EventFile(RunDir(path).events, "broker")
        self._unwritten: list[BrokerEvent] = []
        self._snapshots: Snapshots | None = None
        self._memory: Memory | None = None
        self._address = ""
        self._remember_at = 0.0

    def write_event(self, event: BrokerEvent) -> None:
        """Append to RUN/events.jsonl, at once or when this broker surely leads."""
        self._unwritten.append(event)
        while self._unwritten and self._may_write():
            self._events.write(self._unwritten.pop(0))

    def begin(self, memory: Memory, address: str) -> None:
        """The broker listens at `address`.

        Raises:
            StoreFenced: another broker may lead by now, so nothing was written.
        """
        if not self._may_write():
            raise StoreFenced(f"the term of the broker of {address} has ended before it served")
        self._memory, self._address = memory, address
        self._snapshots = Snapshots(self.path, memory.state)
        if not memory.recovered:
            keep_former_ledger(self.path)
        write_atomic(RunDir(self.path).broker_json, msgspec.json.encode(BrokerFile(os.getpid(), address, time.time())))
        if memory.journal is not None:
            memory.journal.store.listens_at(address)

    def tick(self) -> None:
        """Called in every turn of the broker's loop."""
        if self._snapshots is not None and self._may_write():
            self._snapshots.tick()
            self._remember()

    def finish(self) -> None:
        """The broker no longer listens."""
        if self._snapshots is not None and self._may_write():
            RunDir(self.path).broker_json.unlink(missing_ok=True)
            self._snapshots.write()
            self._remember_at = 0.0
            self._remember()

    def close(self) -> None:
        """Nothing is written any more."""
        self._events.close()

    def _may_write(self) -> bool:
        return self._leading is None or not self._leading.lapsed

    def _remember(self) -> None:
        now = time.monotonic()
        if self._leading is None or self._memory is None or self._memory.journal is None or now < self._remember_at:
            return
        self._remember_at = now + REMEMBER_S
        self._leading.remember(self._address, self._memory.journal.acknowledged)


def keep_former_ledger(run_dir: Path) -> None:
    """Move the ledger of an earlier broker of this run aside, to ledger-1.json and so on: it is a record."""
    former = run_dir / "ledger.json"
    if former.exists() and former.stat().st_size > len("[]"):
        move_aside(former)
