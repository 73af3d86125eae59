"""A supervised warm start: rows for the training loop, without a broker and a fleet; RUN/model is its result.

A step's rows follow from its number alone, so a run that continues from a checkpoint trains what it would have trained.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from broker.contract import StoredGroup
from common.config.schema import SftConfig
from common.metrics import SftMetrics
from common.process.run_dir import RunDir
from learner.backend_protocol import Backend
from learner.batch.batch import BatchStatistics, TrainingBatch
from learner.loop.batch_source import BatchSource
from learner.loop.rank_commands import Command, Drain, Train
from learner.loop.resume import Resume, find_start
from learner.loop.run_files import RunFiles
from learner.loop.step_metrics import Step
from learner.loss.losses import cross_entropy
from learner.rank_process import RankProcess
from learner.sft.rows import SftDataset, load_tokenizer

logger = logging.getLogger(__name__)

LOG_EVERY_S = 2.0


class RowSource(BatchSource):
    """See learner.loop.batch_source.BatchSource."""

    loss = staticmethod(cross_entropy)

    def __init__(
        self,
        config: SftConfig,
        dataset: SftDataset,
        stop_requested: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`stop_requested` returns why the run should drain, None while it should not."""
        self._config, self._dataset, self._stop_requested = config, dataset, stop_requested
        self._logged_s = time.monotonic()

    def next_command(self, step: int) -> Command:
        if reason := self._stop_requested():
            logger.info("draining: %s", reason)
            return Drain()
        return Train(step, [])

    def batch(self, step: int, groups: Sequence[StoredGroup]) -> TrainingBatch:
        documents = self._dataset.step(step, self._config.learner.sequences_per_step)
        statistics = BatchStatistics(
            samples=len(documents),
            tokens_trained=sum(int(document.loss_mask.sum()) for document in documents),
            sequence_tokens=sum(document.places for document in documents),
        )
        return TrainingBatch(step, documents, statistics)

    def line(self, step: Step) -> SftMetrics:
        number, steps, result = step.batch.step, self._config.run.steps, step.result
        if (now := time.monotonic()) - self._logged_s >= LOG_EVERY_S or number + 1 == steps:
            logger.info("step %d of %d: loss %.4f, %.3f s", number + 1, steps, result.loss, step.times.step_s)
            self._logged_s = now
        return SftMetrics(
            step=number,
            time_s=time.time(),
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens_trained=result.loss_tokens,
            sequence_tokens=step.batch.statistics.sequence_tokens,
            step_s=step.times.step_s,
        )


class WarmStart:
    """As learner.loop.rollout_job.RolloutJob, for a warm start."""

    def __init__(self, config: SftConfig, run_dir: RunDir, process: RankProcess) -> None:
        """Read and check the rows, on every rank; raises UsageError."""
        self._config, self._run_dir, self._process = config, run_dir, process
        tasks = config.tasks
        self._dataset = SftDataset(
            Path(tasks.dataset), load_tokenizer(Path(config.model.path)), config.run.seed, tasks.shuffle
        )
        self.files: RunFiles | None = None

    def prepare(self) -> Resume:
        self._run_dir.prepare(self._config)
        self.files = files = RunFiles(self._run_dir, self._config.learner.checkpoint.keep)
        resume, _ = find_start(self._config, self._run_dir, files.checkpoints, files.events, self._dataset.digest)
        files.begin(resume)
        return resume

    def source(self, backend: Backend, resume: Resume) -> BatchSource:
        if self.files is not None:
            self.files.open_metrics(resume.version)
        return RowSource(self._config, self._dataset, self._process.stop_requested)

    def report_silence(self, ranks: str) -> None:
        """A warm start has no reporter; the log of the rank that ends says it."""

    def close(self, state: str, version: int, reason: str = "") -> None:
        if self.files is not None:
            self.files.close(state, version, reason)
