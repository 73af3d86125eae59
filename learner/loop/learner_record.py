"""The learner's small files in RUN: learner.json (who runs, which incarnation) and its lines in events.jsonl."""

import os
import time
from pathlib import Path

import msgspec

from common.process.run_dir import RunDir, write_json


class LearnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """RUN/learner.json: the learner's newest start, and how it ended.

    Attributes:
        state: running | done | drained | failed.
    """

    pid: int
    incarnation: int
    state: str
    policy_version: int
    time_s: float


class Event(msgspec.Struct, frozen=True):
    """One line of RUN/events.jsonl, of the shape that the broker's have."""

    time_s: float
    kind: str
    detail: dict[str, str | int | float] = {}
    source: str = "learner"


class EventLog:
    """Appends whole lines, so that learner and broker can share the file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, kind: str, **detail: str | int | float) -> None:
        os.write(self._file, msgspec.json.encode(Event(time.time(), kind, detail)) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_record(run_dir: RunDir) -> LearnerRecord | None:
    """The record of the run's newest learner; None when there was none or it is torn."""
    try:
        return msgspec.json.decode(run_dir.learner_json.read_bytes(), type=LearnerRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(run_dir: RunDir, incarnation: int, state: str, policy_version: int) -> None:
    """Replace the record atomically, unless a later learner has taken over: a replaced one ends behind it."""
    newest = read_record(run_dir)
    if newest is not None and newest.incarnation > incarnation:
        return
    record = LearnerRecord(
        pid=os.getpid(), incarnation=incarnation, state=state, policy_version=policy_version, time_s=time.time()
    )
    write_json(run_dir.learner_json, record)


def next_incarnation(run_dir: RunDir, checkpointed: int | None) -> int:
    """One more than any incarnation that this run has seen; 0 for its first learner.

    Args:
        checkpointed: incarnation of the newest checkpoint, None when there is none.
    """
    record = read_record(run_dir)
    seen = [x for x in (record.incarnation if record else None, checkpointed) if x is not None]
    return max(seen) + 1 if seen else 0
