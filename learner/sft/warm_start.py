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
from learner.batch.batch import BatchStatistics, TrainingBatch
from learner.loop.batch_source import BatchSource, Command, Drain, Train
from learner.loop.step_metrics import Step
from learner.loss.losses import cross_entropy
from learner.sft.rows import SftDataset, load_tokenizer

logger = logging.getLogger(__name__)

LOG_EVERY_S = 2.0


class RowSource(BatchSource):
    """See learner.loop.batch_source.BatchSource."""

    loss = staticmethod(cross_entropy)

    def __init__(self, config: SftConfig, stop_requested: Callable[[], str | None]) -> None:
        """Read and check the rows; raises UsageError. `stop_requested` returns why the run should drain, or None."""
        tokenizer = load_tokenizer(Path(config.model.path))
        self.dataset = SftDataset(Path(config.tasks.dataset), tokenizer, config.run.seed, config.tasks.shuffle)
        self._config, self._stop_requested = config, stop_requested
        self._logged_s = time.monotonic()

    def next_command(self, step: int) -> Command:
        if reason := self._stop_requested():
            logger.info("draining: %s", reason)
            return Drain()
        return Train(step, [])

    def batch(self, step: int, groups: Sequence[StoredGroup]) -> TrainingBatch:
        documents = self.dataset.step(step, self._config.learner.sequences_per_step)
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
