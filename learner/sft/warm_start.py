"""A supervised warm start: rows for the training loop, without a broker and a fleet; RUN/model is its result.

A step's rows follow from its number alone, so a run that continues from a checkpoint trains what it would have trained.
Every evaluation.every steps, and at the end, the loss of the held-out rows joins the line of the step.
"""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from common.config.schema import SftConfig
from common.hub import load_tokenizer
from common.metrics import SftMetrics
from common.process.progress import Show, bar
from learner.backend_protocol import Backend
from learner.batch.batch import BatchStatistics, TrainingBatch
from learner.batch.packing import Document, pack_for
from learner.batch.updates import Update
from learner.loop.batch_source import BatchSource, Command, Drain, Train
from learner.loop.step_metrics import Step
from learner.loss.losses import cross_entropy
from learner.sft.rows import SftDataset

logger = logging.getLogger(__name__)

LOG_EVERY_S = 2.0
AT_ONCE = 32  # microbatches whose log-probabilities are in memory together


class Validation:
    """Held-out documents, packed once; every rank has its part of them."""

    def __init__(self, backend: Backend, documents: list[Document], micro_batch_tokens: int) -> None:
        """Raises UsageError, naming the row, when one is longer than `micro_batch_tokens`."""
        self._backend = backend
        self._packed = pack_for(backend, documents, micro_batch_tokens)

    def loss(self) -> float:
        """Mean cross-entropy over the trained tokens, in nats; the same on every rank. No gradient. Collective."""
        total = 0.0
        tokens = 0
        for at in range(0, len(self._packed), AT_ONCE):
            part = self._packed[at : at + AT_ONCE]
            for batch, logprobs in zip(part, self._backend.logprobs(part), strict=True):
                trained = batch.loss_mask > 0
                total -= logprobs.double()[trained].sum().item()
                tokens += int(trained.sum())
        mine = msgspec.msgpack.encode((self._backend.data_parallel_rank, total, tokens))
        gathered = [msgspec.msgpack.decode(each) for each in self._backend.all_gather_bytes(mine)]
        shares = {rank: share for rank, *share in gathered}  # the ranks of one replica have the same
        return sum(shares[rank][0] for rank in sorted(shares)) / max(sum(count for _, count in shares.values()), 1)


class SftSource(BatchSource):
    loss = staticmethod(cross_entropy)

    def __init__(self, config: SftConfig, stop_requested: Callable[[], str | None]) -> None:
        """Read and check the rows; raises UsageError. `stop_requested` returns why the run should drain, or None."""
        tokenizer = load_tokenizer(config.model.path)
        tasks = config.tasks
        share = config.evaluation.share if config.evaluation.every else 0.0
        self.dataset = SftDataset(Path(tasks.dataset), tokenizer, config.run.seed, tasks.shuffle, share)
        self._config = config
        self._stop_requested = stop_requested
        self._logged_s = time.monotonic()
        self._shown = ExitStack()
        self._show: Show | None = None
        self._validation: Validation | None = None
        self._validation_loss: float | UnsetType = UNSET  # after the newest step; unset: not validated

    def attach(self, backend: Backend, version: int) -> None:
        """Pack the held-out rows; raises UsageError, naming the row, when one is too long."""
        self._backend = backend
        if held := self.dataset.held_out_rows:
            documents = self.dataset.documents(held)
            self._validation = Validation(backend, documents, self._config.learner.micro_batch_tokens)
            logger.info("%d rows train, %d validate", len(self.dataset.trained_rows), len(held))

    def next_command(self, step: int) -> Command:
        if reason := self._stop_requested():
            logger.info("draining: %s", reason)
            return Drain()
        if self._show is None:  # a log has a line of its own
            shown = bar("warm start", self._config.run.steps, "steps", quiet=not sys.stderr.isatty(), before=step)
            self._show = self._shown.enter_context(shown)
            self._began = (time.monotonic(), step)
        return Train(step)

    def close(self, state: str, version: int, reason: str) -> None:
        self._shown.close()

    def batch(self, step: int) -> tuple[TrainingBatch, list[Update]]:
        """Every rank reads and packs the rows by itself."""
        documents = self.dataset.step(step, self._config.learner.sequences_per_step)
        statistics = BatchStatistics(
            samples=len(documents),
            tokens_trained=sum(int(document.loss_mask.sum()) for document in documents),
            sequence_tokens=sum(document.places for document in documents),
        )
        packed = pack_for(self._backend, documents, self._config.learner.micro_batch_tokens)
        return TrainingBatch(step, documents, statistics), [Update(0, 0, packed)]

    def after_step(self, version: int, batch: TrainingBatch) -> None:
        self._validation_loss = UNSET
        if self._validation and (version % self._config.evaluation.every == 0 or version == self._config.run.steps):
            self._validation_loss = self._validation.loss()
            logger.info("version %d: loss of the held-out rows %.4f", version, self._validation_loss)

    def line(self, step: Step) -> SftMetrics:
        number = step.batch.step
        steps = self._config.run.steps
        result = step.result
        if (now := time.monotonic()) - self._logged_s >= LOG_EVERY_S or number + 1 == steps:
            began_s, first = self._began
            left_s = (now - began_s) * (steps - number - 1) / (number + 1 - first)
            said = (number + 1, steps, result.loss, step.times.step_s, left_s)
            logger.info("step %d of %d: loss %.4f, %.3f s; %.0f s left", *said)
            self._logged_s = now
        if self._show is not None:
            self._show(number + 1)
        return SftMetrics(
            step=number,
            time_s=time.time(),
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens_trained=result.loss_tokens,
            sequence_tokens=step.batch.statistics.sequence_tokens,
            step_s=step.times.step_s,
            validation_loss=self._validation_loss,
            incarnation=step.incarnation,
        )
