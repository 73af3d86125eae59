"""Whether a run is finished, from the record that its learner left."""

from common.config.schema import Config
from common.process.run_dir import RunDir
from learner.loop.learner_record import read_record


def finished(run: RunDir, config: Config) -> bool:
    """Whether the run has done all its steps and has its model."""
    record = read_record(run)
    done = record is not None and record.state == "done" and record.policy_version >= config.run.steps
    return done and (run.model / "config.json").is_file()
