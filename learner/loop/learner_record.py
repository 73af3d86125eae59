"""RUN/learner.json: which learner runs, its incarnation, and how it ended."""

import os
import time

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
