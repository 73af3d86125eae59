"""The supervised loop: the backend, packing, optimizer and checkpoints of the RL loop, with a cross-entropy loss.

    all:   does anybody ask to stop? -> drain: checkpoint, leave
    all:   the step's rows -> documents -> pack -> backend.train_step
    lead:  metrics line
    all:   begin a checkpoint every learner.checkpoint.every steps, at a drain and at the end; complete it when every
           rank's files are on the disk

A step's rows follow from its number alone, so a run that continues from a checkpoint trains what it would have trained.
"""

import gc
import logging
import time
from collections.abc import Callable

from common.config.schema import SftConfig
from common.metrics import MetricsWriter, SftMetrics
from common.process.event_file import EventFile
from learner.backend_protocol import Backend, StepResult
from learner.batch.packing import Document, microbatches_for
from learner.checkpoint.folder import CheckpointFolder, TrainerState
from learner.checkpoint.writer import Checkpointer
from learner.loop.resume import Resume
from learner.loop.step_metrics import check_finite
from learner.loop.task_stream import StreamState
from learner.loss.losses import cross_entropy
from learner.sft.rows import SftDataset

logger = logging.getLogger(__name__)

LOG_EVERY_S = 2.0


class SftLead:
    """What only one rank does: metrics, events, and the checkpoints' names."""

    def __init__(self, metrics: MetricsWriter, events: EventFile, checkpoints: CheckpointFolder) -> None:
        self.metrics = metrics
        self.events = events
        self.checkpoints = checkpoints

    def finish_checkpoint(self, state: TrainerState) -> None:
        """Make a written checkpoint complete and durable."""
        self.metrics.sync()
        path = self.checkpoints.finish(state)
        self.events.add("checkpoint", version=state.policy_version, path=str(path))

    def close(self, state: str, version: int, reason: str = "") -> None:
        """Say how it ended (done, drained or failed)."""
        self.events.add("learner_stopped", state=state, step=version, reason=reason)
        self.metrics.close()
        self.events.close()


class SftTrainer:
    """The loop and its state on one rank. Every public method is collective.

    Attributes:
        version: optimizer steps done.
    """

    def __init__(
        self,
        config: SftConfig,
        backend: Backend,
        dataset: SftDataset,
        start: Resume,
        lead: SftLead | None = None,
        stop_requested: Callable[[], str | None] = lambda: None,
    ) -> None:
        """
        Args:
            config: of the run.
            backend: as it is after `start.version` steps.
            dataset: rows; every rank reads the same.
            start: where the loop begins.
            lead: on rank 0, None elsewhere.
            stop_requested: why to stop, None to go on; asked on rank 0.
        """
        self.version = start.version
        self._config, self._backend, self._dataset, self._start, self._lead = config, backend, dataset, start, lead
        self._stop_requested = stop_requested
        self._checkpoints = Checkpointer(backend, config.learner.checkpoint.asynchronous, lead, start.version)
        self._tokens = start.tokens_trained
        self._began_s = self._logged_s = time.monotonic()

    def run(self) -> str:
        """Train to run.steps or to a drain; a checkpoint is complete on return. Returns 'done' or 'drained'.

        Raises:
            UsageError: a row longer than learner.micro_batch_tokens, or one that cannot be tokenised.
            SlipstreamError: loss or gradients are not finite, or a checkpoint cannot be written.
        """
        gc.collect()
        gc.freeze()
        self._began_s = self._logged_s = time.monotonic()
        while self.version < self._config.run.steps:
            self._checkpoints.poll()
            if reason := self._told_to_stop():
                logger.info("draining: %s", reason)
                self._checkpoint(wait=True)
                return "drained"
            self._step()
            if self.version % self._config.learner.checkpoint.every == 0 and self.version < self._config.run.steps:
                self._checkpoint()
        self._checkpoint(wait=True)
        return "done"

    def _step(self) -> None:
        documents = self._dataset.step(self.version, self._config.learner.sequences_per_step)
        packed = microbatches_for(
            documents,
            self._backend.data_parallel_rank,
            self._backend.data_parallel_size,
            self._config.learner.micro_batch_tokens,
            multiple=self._backend.document_multiple,
            hidden_size=self._backend.hidden_size,
        )
        result = self._backend.train_step(packed, cross_entropy)
        check_finite(self.version, result)
        self._record(documents, result)
        self._tokens += result.loss_tokens
        self.version += 1

    def _record(self, documents: list[Document], result: StepResult) -> None:
        """The step's metrics line, written before a checkpoint could make the step permanent."""
        now = time.monotonic()
        step, step_s = self.version, now - self._began_s
        self._began_s = now
        if self._lead is None:
            return
        line = SftMetrics(
            step=step,
            time_s=time.time(),
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens_trained=result.loss_tokens,
            sequence_tokens=sum(document.places for document in documents),
            step_s=step_s,
        )
        self._lead.metrics.write(line)
        last = self._config.run.steps
        if now - self._logged_s >= LOG_EVERY_S or step + 1 == last:
            logger.info("step %d of %d: loss %.4f, %.3f s", step + 1, last, result.loss, step_s)
            self._logged_s = now

    def _told_to_stop(self) -> str:
        """Why to stop, '' to go on; the same on every rank, so that all leave at the same step. Collective."""
        reason = self._stop_requested() or "" if self._backend.rank == 0 else ""
        if self._backend.world_size > 1:
            reason = self._backend.broadcast_bytes(reason.encode() if self._backend.rank == 0 else None).decode()
        return reason

    def _checkpoint(self, wait: bool = False) -> None:
        """Begin a checkpoint of this version unless there is one; with `wait` it is complete on return."""
        state = TrainerState(
            policy_version=self.version,
            incarnation=self._start.incarnation,
            tasks=StreamState(),
            dataset_digest=self._start.dataset_digest,
            config_digest=self._start.config_digest,
            tokens_trained_total=self._tokens,
        )
        self._checkpoints.start(self.version, state if self._lead else None)
        if wait:
            self._checkpoints.poll(wait=True)
