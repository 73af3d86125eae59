"""The training loop: one turn per command, the same on every rank and for every source of batches.

    lead:   next command of the source: offer tasks, take B groups, check them (supervised: rows follow from the step)
               |  waits for groups; nodes unblock it by completing leases (RUN/status says how many are on the way)
               v
    all:    broadcast of the command (WAIT | TRAIN groups | DRAIN | FAIL)
               |  the other ranks wait here for the lead, at most gathering.TAKE_WAIT_S plus broker round trips
               v
    all:    batch (advantages, staleness, expiry) -> pack -> backend.train_step -> version + 1
               |  ranks wait for each other inside the backend's collectives, at most learner.timeout_s
               v
    all:    source.after_step: export -> lead: publisher.publish(version), every weights.publish_every steps
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
import time

import msgspec

from common.config.schema import BaseConfig
from common.errors import HopelessError, SlipstreamError
from common.process.health import LifeSigns
from common.process.run_dir import RunDir
from common.span_buffer import SPANS
from common.waits import WaitFor, WaitKind
from learner.backend_protocol import NOTHING_TRAINED, Backend, StepResult
from learner.batch.batch import TrainingBatch
from learner.batch.packing import pack_for
from learner.checkpoint.folder import TrainerState
from learner.loop.batch_source import BatchSource, Command, Drain, Fail, Save, Train, Wait, decode_command
from learner.loop.checkpointer import Checkpointer
from learner.loop.profiling import StepProfiler
from learner.loop.run_files import RunFiles
from learner.loop.step_metrics import Step, Times, Totals, check_finite

UNTRAINED_STEPS = 3  # steps in a row in which every sample failed, before the run stops


class Trainer:
    """The loop and its state on one rank; `version` counts the optimizer steps done."""

    def __init__(
        self,
        config: BaseConfig,
        run_dir: RunDir,
        backend: Backend,
        source: BatchSource,
        state: TrainerState,
        files: RunFiles | None,
    ) -> None:
        """`backend` is as `state` says; `files` are given on rank 0 and None elsewhere."""
        self.config = config
        self.run_dir = run_dir
        self.backend = backend
        self.source = source
        self.state = state
        self.files = files
        self.version = state.policy_version
        self.totals = Totals(state.tokens_trained_total, state.tokens_wasted_total, state.tokens_masked_total)
        self._checkpoints = Checkpointer(backend, files, self.version)
        self._profiler = StepProfiler(config.telemetry, backend.rank, run_dir.profiles)
        self._untrained = 0
        self._times = Times()
        self.signs = LifeSigns(config.learner.timeout_s)  # a step is one turn of the loop
        source.attach(backend, self.version)

    def run(self) -> str:
        """Train to run.steps or to a drain; returns the final state, 'done' or 'drained'. Collective.

        Raises SlipstreamError when the run cannot continue; the newest checkpoint stays as it is.
        """
        if self.files is not None:
            self.files.open_metrics(self.version)
        self.source.begin(self.version)
        gc.collect()
        gc.freeze()  # the objects made so far stay until the process ends; collections need not visit them again
        self._began_s = self._line_s = time.monotonic()
        while self.version < self.config.run.steps:
            self.signs.show("training", True)
            with self._times.measure("checkpoint_s"):
                self._checkpoints.poll()
            with self._times.measure("learner_idle_s"):
                command = self._next_command()
            if isinstance(command, Drain):
                self._report("draining", WaitFor(WaitKind.CHECKPOINT))
                self._checkpoint(wait=True)
                if command.reason:
                    raise HopelessError(command.reason)
                return "drained"
            if isinstance(command, Fail):
                raise (HopelessError if command.hopeless else SlipstreamError)(command.reason)
            if isinstance(command, Save):
                self._checkpoint(wait=True)
            if isinstance(command, Train):
                with self._profiler.around(self.version):
                    self._turn([group.serial for group in command.groups])
        self._checkpoint(wait=True)
        while self.source.has_final_evaluation and isinstance(self._next_command(), Wait):
            self.signs.show("evaluating", True)
        self._report("checkpointing", WaitFor(WaitKind.EXPORT))
        self.backend.save_hf(self.run_dir.model)
        return "done"

    def _next_command(self) -> Command:
        """The lead's next command, on every rank."""
        if self.files is None:
            command = decode_command(self.backend.broadcast_bytes(None))
            self.source.receive(command)
            return command
        command = self.source.next_command(self.version)
        if self.backend.world_size > 1:
            self.backend.broadcast_bytes(msgspec.msgpack.encode(command))
        return command

    def _turn(self, serials: list[int]) -> None:
        """One optimizer step and what follows from it."""
        step = self.version
        backend = self.backend
        source = self.source
        result = NOTHING_TRAINED
        began = time.monotonic()
        self._report("training", WaitFor(WaitKind.OPTIMIZER, version=step))
        with self._times.measure("batch_s"):
            batch = source.batch(step)
            packed = pack_for(backend, batch.documents, self.config.learner.micro_batch_tokens)
        with self._times.measure("train_s"):
            if batch.documents:
                packed = source.complete(packed)
                result = backend.train_step(packed, source.loss, source.temperature, source.entropy)
                check_finite(step, result)
        self.version = step + 1
        figures = batch.statistics
        self.totals.add(figures)
        with self._times.measure("snapshot_s"):
            source.after_step(self.version, batch)
        self._record(batch, result, len(packed))
        told = {"step": step, "version": self.version, "serials": " ".join(map(str, serials))}
        SPANS.add(f"step {step}", "step", began, track="loop", **told)
        self._untrained = self._untrained + 1 if figures.samples_failed == figures.samples else 0
        if self._untrained >= UNTRAINED_STEPS:
            raise HopelessError(
                f"every sample of the last {UNTRAINED_STEPS} steps failed; reasons: {'; '.join(figures.failures)}"
            )
        if self.version % self.config.learner.checkpoint.every == 0 and self.version < self.config.run.steps:
            self._checkpoint()

    def _record(self, batch: TrainingBatch, result: StepResult, microbatches: int) -> None:
        """The step's metrics line, written before a checkpoint could make the step permanent."""
        now = time.monotonic()
        self._times.step_s = now - self._line_s
        self._line_s = now
        if self.files is not None:
            step = Step(batch, result, microbatches, self._times, self.totals, now - self._began_s)
            self.files.record(self.source.line(step))
        self._times = Times()

    def _checkpoint(self, wait: bool = False) -> None:
        """Begin a checkpoint of this version unless there is one; with `wait` it is complete on return. Collective."""
        self._report("checkpointing", WaitFor(WaitKind.DISK if wait else WaitKind.WEIGHTS_COPY))
        with self._times.measure("checkpoint_s"):
            state = None
            if self.files is not None:
                changed = {"policy_version": self.version, "tasks": self.source.stream_state(), **vars(self.totals)}
                state = msgspec.structs.replace(self.state, **changed)
            self._checkpoints.start(self.version, state, wait or not self.config.learner.checkpoint.asynchronous)

    def _report(self, state: str, wait: WaitFor) -> None:
        self.source.report(state, wait, self.version)
