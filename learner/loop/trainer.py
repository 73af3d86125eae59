"""The training loop: one turn per command, the same on every rank and for every source of batches.

    lead:   next command of the source: offer tasks, take B groups, check them (supervised: rows follow from the step)
               |  waits for groups; nodes unblock it by completing leases (RUN/status says how many are on the way)
               v
    all:    broadcast of the command (WAIT | TRAIN groups | DRAIN | FAIL)
               |  the other ranks wait here for the lead, at most lead_rank.TAKE_WAIT_S plus broker round trips
               v
    all:    batch (advantages, staleness, expiry) -> pack -> backend.train_step -> version + 1
               |  ranks wait for each other inside the backend's collectives, at most learner.timeout_s
               v
    all:    source.stepped: export -> lead: publisher.publish(version), every weights.publish_every steps
               |  waits for the copy only; a thread sends it, and a newer version replaces one that waits
               v
    lead:   metrics line
    all:    begin a checkpoint every learner.checkpoint.every steps, at a drain and at the end
               |  waits for the copy only, and for the last checkpoint if that is still being written
    all:    once per turn: is it on every rank's disk? -> lead: rename, commit
               |  commit tells the broker to forget the groups, so it comes after the rename of a durable checkpoint;
               |  at a drain and at the end all wait for it

There is no second loop for synchronous RL: with staleness.max = 0 no task may be leased before the version of its
step is published. Supervised tuning is this loop with rows for groups.
"""

import gc
import logging
import shutil
import time
from pathlib import Path

from broker.contract import StoredGroup
from common.config.schema import Config, SftConfig
from common.errors import HopelessError, SlipstreamError
from common.process.files import replace_folder
from common.process.run_dir import RunDir
from learner.backend_protocol import Backend, StepResult
from learner.batch.batch import TrainingBatch
from learner.batch.packing import microbatches_for
from learner.checkpoint.folder import TrainerState
from learner.checkpoint.writer import Checkpointer
from learner.loop import rank_commands
from learner.loop.batch_source import BatchSource
from learner.loop.rank_commands import Command, Drain, Fail, Train
from learner.loop.resume import Resume
from learner.loop.run_files import RunFiles
from learner.loop.step_metrics import Step, Times, Totals, check_finite

logger = logging.getLogger(__name__)

UNTRAINED_STEPS = 3  # steps in a row in which every sample failed, before the run stops
NOTHING_TRAINED = StepResult(loss=0.0, loss_tokens=0, grad_norm=0.0, lr=0.0, sums={}, maxima={})


class Trainer:
    """The loop and its state on one rank. Every public method is collective.

    Attributes:
        version: optimizer steps done.
    """

    def __init__(
        self,
        config: Config | SftConfig,
        run_dir: RunDir,
        backend: Backend,
        source: BatchSource,
        resume: Resume,
        files: RunFiles | None,
    ) -> None:
        """`files` are given on rank 0 and None elsewhere; the backend is as it is after `resume.version` steps."""
        self.config, self.run_dir, self.backend, self.source = config, run_dir, backend, source
        self.resume, self.files = resume, files
        self.version = resume.version
        self.totals = Totals(resume.tokens_trained, resume.tokens_wasted, resume.tokens_masked)
        self._checkpoints = Checkpointer(backend, config.learner.checkpoint.asynchronous, files, resume.version)
        self._untrained = 0
        self._times = Times()
        self._began_s = self._line_s = time.monotonic()

    def run(self) -> str:
        """Train to run.steps or to a drain; returns the final state, 'done' or 'drained'.

        Raises:
            UsageError: a row that does not fit or cannot be tokenised.
            SlipstreamError: the run cannot go on; the message says why. The newest checkpoint stays as it is.
        """
        self.source.begin(self.version)
        gc.collect()
        gc.freeze()  # the objects made so far stay until the process ends; collections need not visit them again
        self._began_s = self._line_s = time.monotonic()
        while self.version < self.config.run.steps:
            self._poll_checkpoint()
            waited_from = time.monotonic()
            command = self._next_command()
            self._times.learner_idle_s += timed(waited_from)
            if isinstance(command, Drain):
                self._report("draining", "the checkpoint")
                self._checkpoint(wait=True)
                return "drained"
            if isinstance(command, Fail):
                raise (HopelessError if command.hopeless else SlipstreamError)(command.reason)
            if isinstance(command, Train):
                self._turn(command.groups)
        self._checkpoint(wait=True)
        self._report("checkpointing", "the disk: exporting the final model")
        save_model(self.backend, self.run_dir.model, is_lead=self.files is not None)
        return "done"

    def _next_command(self) -> Command:
        """The lead's next command, on every rank."""
        if self.files is None:
            return rank_commands.decode(self.backend.broadcast_bytes(None))
        command = self.source.next_command(self.version)
        if self.backend.world_size > 1:
            self.backend.broadcast_bytes(rank_commands.encode(command))
        return command

    def _turn(self, groups: list[StoredGroup]) -> None:
        """One optimizer step and what follows from it."""
        step, checkpoint, steps = self.version, self.config.learner.checkpoint, self.config.run.steps
        self._report("training", f"the optimizer step {step}")
        began = time.monotonic()
        batch = self.source.batch(step, groups)
        packed = microbatches_for(
            batch.documents,
            self.backend.data_parallel_rank,
            self.backend.data_parallel_size,
            self.config.learner.micro_batch_tokens,
            multiple=self.backend.document_multiple,
            hidden_size=self.backend.hidden_size,
        )
        self._times.batch_s = timed(began)
        began = time.monotonic()
        result = NOTHING_TRAINED
        if batch.documents:
            source, packed = self.source, self.source.complete(packed)
            result = self.backend.train_step(packed, source.loss, source.temperature, source.entropy)
            check_finite(step, result)
        self._times.train_s = timed(began)
        self.version = step + 1
        self.totals.add(batch.statistics)
        began = time.monotonic()
        self.source.stepped(self.version, batch)
        self._times.snapshot_s = timed(began)
        self._record(batch, result, len(packed))
        self._check_failures(batch)
        if self.version % checkpoint.every == 0 and self.version < steps:
            self._checkpoint()

    def _check_failures(self, batch: TrainingBatch) -> None:
        """Stop when the environment does nothing but fail."""
        figures = batch.statistics
        self._untrained = self._untrained + 1 if figures.samples_failed == figures.samples else 0
        if self._untrained >= UNTRAINED_STEPS:
            raise HopelessError(
                f"every sample of the last {UNTRAINED_STEPS} steps failed; reasons: {'; '.join(figures.failures)}"
            )

    def _record(self, batch: TrainingBatch, result: StepResult, microbatches: int) -> None:
        """The step's metrics line, written before a checkpoint could make the step permanent."""
        now = time.monotonic()
        self._times.step_s, self._line_s = now - self._line_s, now
        if self.files is not None:
            step = Step(batch, result, microbatches, self._times, self.totals, now - self._began_s)
            self.files.record(self.source.line(step))
        self._times = Times()

    def _checkpoint(self, wait: bool = False) -> None:
        """Begin a checkpoint of this version unless there is one; with `wait` it is complete on return. Collective."""
        began = time.monotonic()
        self._report("checkpointing", "the disk" if wait else "the copy of the weights")
        self._checkpoints.start(self.version, self._state() if self.files else None)
        if wait:
            self._checkpoints.poll(wait=True)
        self._times.checkpoint_s += timed(began)

    def _poll_checkpoint(self) -> None:
        """Complete the checkpoint that is being written, if it is on the disk by now. Collective."""
        began = time.monotonic()
        self._checkpoints.poll()
        self._times.checkpoint_s += timed(began)

    def _state(self) -> TrainerState:
        return TrainerState(
            policy_version=self.version,
            incarnation=self.resume.incarnation,
            tasks=self.source.tasks(),
            dataset_digest=self.resume.dataset_digest,
            config_digest=self.resume.config_digest,
            tokens_trained_total=self.totals.tokens_trained,
            tokens_wasted_total=self.totals.tokens_wasted,
            tokens_masked_total=self.totals.tokens_masked,
        )

    def _report(self, state: str, waiting_on: str) -> None:
        self.source.report(state, waiting_on, self.version)


def timed(start_s: float) -> float:
    """Seconds since a time.monotonic() reading."""
    return time.monotonic() - start_s


def save_model(backend: Backend, folder: Path, is_lead: bool) -> None:
    """Write RUN/model, the final Hugging Face folder, beside `folder`; then put it in its place. Collective."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    if is_lead:
        shutil.rmtree(scratch, ignore_errors=True)
    backend.broadcast_bytes(b"clean" if is_lead else None)
    backend.save_hf(scratch)
    if is_lead:
        replace_folder(scratch, folder)
