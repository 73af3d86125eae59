"""The leading broker's files in the run folder: broker.json, events, ledger, status and failed transcripts."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from broker.contract import BrokerEvent
from broker.delivery.state import DeliveryState
from broker.journal.leader_election import LeaderElection
from broker.journal.recovery import OpenedState
from broker.journal.store import StoreFenced
from common.config.schema import TelemetryConfig
from common.json_lines import LineFile
from common.process.files import move_aside
from common.process.run_dir import AtomicFile, BrokerFile, RunDir, discard_unfinished, unwritable, write_atomic
from common.segments import LineThread, SegmentWriter
from common.transcripts import FAILED_BYTES, SentTranscript, Transcript

logger = logging.getLogger(__name__)

REMEMBER_S = 1.0
STATUS_S = 5.0  # between two writings, but for commits
STATUS_SHARE = 200  # writing takes at most one part of so many of the time
PART_S = 0.02  # time for it in one turn of the broker's loop
LINES = 500  # between two looks at the clock
SPARE_BYTES = 4096  # the transcript that is written may be a little longer than the one that came


class RunFolder:
    """RUN/broker.json exists while the broker listens. RUN/events.jsonl grows by one line per event.

    Nothing is written while another broker may lead. A leader that was stopped and wakes up must not overwrite its
    successor's files.
    """

    def __init__(self, path: Path, election: LeaderElection | None) -> None:
        """Raises UsageError when another user's events may not be appended to, DiskFull when the disk is full."""
        self.path = path
        self._election = election
        try:
            self._events = LineFile(RunDir(path).events)
        except OSError as error:
            raise unwritable("run.dir", path, error) from error
        self._unwritten: list[BrokerEvent] = []
        self._status_files: StatusFiles | None = None
        self._opened: OpenedState | None = None
        self._address = ""
        self._remember_at = 0.0

    def write_event(self, event: BrokerEvent) -> None:
        """Append to RUN/events.jsonl, at once or when this broker surely leads."""
        self._unwritten.append(event)
        while self._unwritten and self._may_write():
            self._events.write(self._unwritten.pop(0))

    def begin(self, opened: OpenedState, address: str) -> None:
        """The broker listens at `address`. Raises StoreFenced, writing nothing, when another one may lead by now."""
        if not self._may_write():
            raise StoreFenced(f"the term of the broker of {address} has ended before it served")
        self._opened = opened
        self._address = address
        self._status_files = StatusFiles(self.path, opened.state)
        for path in (RunDir(self.path).ledger_json, RunDir(self.path).status_json):
            discard_unfinished(path)
        former = RunDir(self.path).ledger_json
        if not opened.recovered and former.exists() and former.stat().st_size > len("[]"):
            move_aside(former)  # to ledger-1.json and so on: it is a record of the run's earlier broker
        file = BrokerFile.of_this_process(address)
        write_atomic(RunDir(self.path).broker_json, msgspec.json.encode(file))
        if opened.journal is not None:
            opened.journal.store.listens_at(address)

    def tick(self) -> None:
        """Called in every turn of the broker's loop."""
        if self._status_files is not None and self._may_write():
            self._status_files.tick()
            if time.monotonic() >= self._remember_at:
                self._remember()

    def finish(self) -> None:
        """The broker no longer listens."""
        if self._status_files is not None and self._may_write():
            RunDir(self.path).broker_json.unlink(missing_ok=True)
            self._status_files.write_status()
            self._remember()
            self._status_files.write()  # last, because this process may be killed before a long ledger is written

    def close(self) -> None:
        self._events.close()

    def _may_write(self) -> bool:
        return self._election is None or not self._election.term.lapsed

    def _remember(self) -> None:
        if self._election is None or self._opened is None or self._opened.journal is None:
            return
        self._remember_at = time.monotonic() + REMEMBER_S
        try:
            self._election.remember(self._address, self._opened.journal.acknowledged)
        except OSError as error:
            logger.error("redis.json not written: %s", error)
            self._remember_at += STATUS_S


class StatusFiles:
    """Writes RUN/ledger.json and RUN/status.json every few seconds and at commits, so that they outlive the broker.

    They are written in parts, so that requests do not wait for a long ledger. A line shows its task when the line was
    written; only a ledger of one part shows a single moment. After a commit the files of a killed broker lack only
    steps that the next learner trains again. A ledger grows with the run, so each of the two kinds of writing uses at
    most half a percent of the time. When commits come faster, only the newest is written.
    """

    def __init__(self, run_dir: Path, state: DeliveryState, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._state = state
        self._clock = clock
        self._next_at = 0.0  # monotonic seconds
        self._next_commit_at = 0.0
        self._committed_step = state.committed_step
        self._file: AtomicFile | None = None  # the ledger that is being written
        self._serial = 0  # the serial number of its next line
        self._used_s = 0.0  # by this writing so far
        self._for_commit = False

    def tick(self) -> None:
        """Write, or continue to write, when it is time again or something was committed."""
        started = self._clock()
        committed = self._committed_step != self._state.committed_step
        if self._file is None:
            if started < (self._next_commit_at if committed else self._next_at):
                return
            self._for_commit = committed
            self._used_s = 0.0
            self._committed_step = self._state.committed_step
        ended = self.go_on(started + PART_S)
        now = self._clock()
        self._used_s += now - started
        if ended:
            pause_s = STATUS_SHARE * self._used_s
            self._next_at = now + max(STATUS_S, pause_s)
            if self._for_commit:
                self._next_commit_at = now + pause_s

    def write_status(self) -> None:
        """Write RUN/status.json now; a failure is logged."""
        try:
            self._write_status(sync=True)
        except OSError as error:
            logger.error("status not written: %s", error)

    def write(self) -> None:
        """Write both now, whatever it takes; a failure is logged, since serving matters more."""
        if self._file is not None:
            self._file.discard()
            self._file = None
        self.go_on(float("inf"), sync=True)

    def go_on(self, until: float, sync: bool = False) -> bool:
        """Write lines until `until`, monotonic seconds; returns whether both files are complete, or given up."""
        try:
            if self._file is None:
                self._file = AtomicFile(self._run_dir / "ledger.json")
                self._serial = 0
            tasks = self._state.tasks
            end = self._state.tasks.next_serial
            while self._serial < end:
                last = min(end, self._serial + LINES)
                lines = msgspec.json.encode([tasks.line(serial) for serial in range(self._serial, last)])
                self._file.write((b"," if self._serial else b"[") + lines[1:-1])
                self._serial = last
                if self._clock() >= until and last < end:
                    return False
            self._file.write(b"]" if self._serial else b"[]")
            self._file.finish(sync)
            self._write_status(sync)
        except OSError as error:
            logger.error("status not written: %s", error)
            if self._file is not None:
                self._file.discard()
        self._file = None
        return True

    def _write_status(self, sync: bool) -> None:
        write_atomic(self._run_dir / "status.json", msgspec.json.encode(self._state.status()), sync=sync)


def failed_transcripts(run_dir: Path, telemetry: TelemetryConfig) -> LineThread[SentTranscript] | None:
    """Checks and writes RUN/transcripts/failed-*, which nodes send with groups whose samples all failed.

    It takes a quarter of the limit. None: telemetry.transcripts is off.
    """
    writer = SegmentWriter(RunDir(run_dir).transcripts, "failed", (telemetry.transcripts_mib << 20) // 4)
    return LineThread("transcripts", writer, lambda: line_of) if telemetry.transcripts != "none" else None


def line_of(sent: SentTranscript) -> bytes:
    """The line, with what the broker knows better than the node; raises ValueError for what is no Transcript."""
    serial, node_id, data = sent
    own = {"serial": serial, "node_id": node_id, "time_s": time.time(), "why": ["failed"], "step": None}
    line = msgspec.json.encode(msgspec.structs.replace(msgspec.json.decode(data, type=Transcript), **own)) + b"\n"
    if len(line) > FAILED_BYTES + SPARE_BYTES:
        raise ValueError(f"a transcript of {len(line)} bytes, the limit is {FAILED_BYTES}")
    return line
