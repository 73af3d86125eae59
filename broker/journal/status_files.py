"""RUN/ledger.json and RUN/status.json, so that they can be read when the broker is gone."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from broker.delivery.state import DeliveryState
from common.process.run_dir import AtomicFile, write_atomic

logger = logging.getLogger(__name__)

SNAPSHOT_S = 5.0  # at the most often, but for commits
SNAPSHOT_SHARE = 200  # snapshots use at most one part of so many of the time
PART_S = 0.02  # time for a snapshot in one turn of the broker's loop
LINES = 500  # between two looks at the clock


class Snapshots:
    """Writes them every few seconds and at commits, in parts, so that requests do not wait for a long ledger.

    They are written at every commit. So the files of a killed broker lack only steps that the next learner trains
    again. A ledger grows with the run, so each of the two kinds uses at most half a percent of the time. When commits
    come faster, only the newest is written, as soon as the time allows it. A line shows its task when the line was
    written; only a ledger of one part shows a single moment.
    """

    def __init__(self, run_dir: Path, state: DeliveryState, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._state, self._clock = run_dir, state, clock
        self._next_at = 0.0  # monotonic seconds
        self._next_commit_at = 0.0
        self._committed_step = state.committed_step
        self._file: AtomicFile | None = None  # the ledger that is being written
        self._serial = 0  # the serial number of its next line
        self._used_s = 0.0  # by this snapshot so far
        self._for_commit = False

    def tick(self) -> None:
        """Write, or go on writing, when it is time again or something was committed."""
        started = self._clock()
        committed = self._committed_step != self._state.committed_step
        if self._file is None:
            if started < (self._next_commit_at if committed else self._next_at):
                return
            self._for_commit, self._used_s = committed, 0.0
            self._committed_step = self._state.committed_step
        ended = self.go_on(started + PART_S)
        now = self._clock()
        self._used_s += now - started
        if ended:
            pause_s = SNAPSHOT_SHARE * self._used_s
            self._next_at = now + max(SNAPSHOT_S, pause_s)
            if self._for_commit:
                self._next_commit_at = now + pause_s

    def write(self) -> None:
        """Write both now, whatever it takes; a failure is logged, since serving matters more."""
        if self._file is not None:
            self._file.discard()
            self._file = None
        self.go_on(float("inf"), sync=True)

    def go_on(self, until: float, sync: bool = False) -> bool:
        """Write lines until `until`, monotonic seconds; returns whether the snapshot is complete, or given up."""
        try:
            if self._file is None:
                self._file, self._serial = AtomicFile(self._run_dir / "ledger.json"), 0
            tasks, end = self._state.tasks, self._state.tasks.next_serial
            while self._serial < end:
                last = min(end, self._serial + LINES)
                lines = msgspec.json.encode([tasks.line(serial) for serial in range(self._serial, last)])
                self._file.write((b"," if self._serial else b"[") + lines[1:-1])
                self._serial = last
                if self._clock() >= until and last < end:
                    return False
            self._file.write(b"]" if self._serial else b"[]")
            self._file.finish(sync)
            write_atomic(self._run_dir / "status.json", msgspec.json.encode(self._state.status()), sync=sync)
        except OSError as error:
            logger.error("snapshot not written: %s", error)
            if self._file is not None:
                self._file.discard()
        self._file = None
        return True
