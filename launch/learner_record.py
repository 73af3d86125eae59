"""RUN/learner.json as launch reads it: how the newest learner of a run ended."""

import msgspec

from common.config import Config
from common.run_dir import RunDir


class LearnerRecord(msgspec.Struct, frozen=True):
    """What launch needs of the record that the learner writes.

    Attributes:
        state: running | done | drained | failed.
    """

    state: str
    policy_version: int


def learner_record(run: RunDir) -> LearnerRecord | None:
    """None when no learner has run here."""
    try:
        return msgspec.json.decode(run.learner_json.read_bytes(), type=LearnerRecord)
    except (OSError, msgspec.DecodeError):
        return None


def finished(run: RunDir, config: Config) -> bool:
    """Whether the run has done all its steps and has its model."""
    record = learner_record(run)
    done = record is not None and record.state == "done" and record.policy_version >= config.run.steps
    return done and (run.model / "config.json").is_file()
