"""The lead rank's files in RUN: checkpoints, metrics, events, and the record of how the learner ended."""

from collections.abc import Callable

from common.metrics import MetricsWriter, SftMetrics, StepMetrics
from common.process.event_file import EventFile
from common.process.run_dir import RunDir
from learner.checkpoint.folder import CheckpointFolder, TrainerState
from learner.loop.learner_record import write_record
from learner.loop.resume import Resume


class RunFiles:
    """The run folder of one learner. Only the lead rank has one.

    Attributes:
        commit: called with the last step of a checkpoint that is durable.
    """

    def __init__(self, run_dir: RunDir, keep: int) -> None:
        """`keep` checkpoints stay on the disk."""
        self.checkpoints = CheckpointFolder(run_dir.checkpoints, keep)
        self.events = EventFile(run_dir.events, "learner")
        self._run_dir = run_dir
        self._incarnation = 0
        self._metrics: MetricsWriter | None = None
        self._closed = False
        self.commit: Callable[[int], None] = lambda step: None

    def begin(self, resume: Resume) -> None:
        """Note that a learner starts."""
        self._incarnation = resume.incarnation
        write_record(self._run_dir, resume.incarnation, "running", resume.version)
        detail = {"incarnation": resume.incarnation, "step": resume.version, "checkpoint": resume.checkpoint}
        self.events.add("learner_started", **detail)

    def open_metrics(self, version: int) -> None:
        """Open the metrics file; lines of steps from `version` on are removed, because these steps come again."""
        self._metrics = MetricsWriter(self._run_dir.metrics, keep_before_step=version)

    def record(self, line: StepMetrics | SftMetrics) -> None:
        """Append the metrics line of one step."""
        assert self._metrics is not None
        self._metrics.write(line)

    def finish_checkpoint(self, state: TrainerState) -> None:
        """Make a written checkpoint durable, after the metrics of its steps; only then commit them."""
        assert self._metrics is not None
        self._metrics.sync()
        path = self.checkpoints.finish(state)
        self.events.add("checkpoint", version=state.policy_version, path=str(path))
        self.commit(state.policy_version - 1)

    def close(self, state: str, version: int, reason: str = "") -> None:
        """Note how the learner ended: done, drained or failed. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        write_record(self._run_dir, self._incarnation, state, version)
        self.events.add("learner_stopped", state=state, step=version, reason=reason)
        self.events.close()
        if self._metrics is not None:
            self._metrics.close()
