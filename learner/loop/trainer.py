"""The training loop: one turn per command, the same on every rank and for every source of batches.

    lead:   next command of the source: offer tasks, take B groups, check them (supervised: rows follow from the step)
               |  waits for groups; nodes unblock it by completing leases (RUN/status says how many are on the way)
               v
    all:    broadcast of the command (WAIT | TRAIN | DRAIN | FAIL)
               |  the other ranks wait here for the lead, at most gathering.TAKE_WAIT_S plus broker round trips
               v
    lead:   batch (advantages, staleness, expiry) -> plan -> every rank gets its documents
    all:    pack -> the batch's updates, each a backend.train_step (updates.py) -> version + 1
               |  ranks wait for each other inside the backend's collectives, at most learner.timeout_s an update
               |  (meanwhile a thread of the lead decodes and prepares the next step's groups: look_ahead.py)
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
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import profile, record_function

from common.config.observing import TelemetryConfig
from common.config.schema import BaseConfig
from common.errors import HopelessError, SlipstreamError
from common.process.health import LifeSigns
from common.process.run_dir import RunDir
from common.span_buffer import SPANS
from common.waits import WaitFor, WaitKind
from learner.backend_protocol import NOTHING_TRAINED, Backend, StepResult
from learner.batch.batch import TrainingBatch
from learner.checkpoint.folder import TrainerState
from learner.loop.batch_source import BatchSource, Command, Drain, Fail, Save, Train, Wait, decode_command
from learner.loop.run_files import RunFiles
from learner.loop.step_metrics import Step, Times, Totals, UpdateFigures
from learner.loop.updates import train_updates

# ---------------------------------------------------------------- checkpoints behind the steps
# Begin, write, finish, and only then commit. One at a time: a checkpoint that is due while the last one is still being
# written waits for it.


class Checkpointer:
    """One rank's view of the checkpoint that is being written. Every method is collective."""

    def __init__(self, backend: Backend, files: RunFiles | None, version: int) -> None:
        """`files` are given on the lead rank; the loop starts at `version`."""
        self._backend = backend
        self._files = files
        self._started = version
        self._writing = False
        self._state: TrainerState | None = None  # belongs to the one being written; on the lead rank only

    def start(self, version: int, state: TrainerState | None, wait: bool, needed: bool) -> None:
        """Begin the checkpoint of `version`, unless there is one; with `wait` it is complete on return.

        `state` is the loop's, on the lead rank. One that is not `needed` is skipped while the disk is full. Raises
        SlipstreamError when this checkpoint or the last one cannot be written.
        """
        if version != self._started:
            self.poll(wait=True)
            self._started = version
            self._state = state
            try:
                self._backend.start_checkpoint(self._begin(version))
                self._writing = True
            except SlipstreamError as error:
                self._skip(error, needed)
        if wait:
            self.poll(wait=True, needed=needed)

    def poll(self, wait: bool = False, needed: bool = False) -> None:
        """Finish the checkpoint that is being written, if every rank has written its share; with `wait` they have.

        Raises SlipstreamError when it could not be written, and it is `needed` or the disk is not full; the one before
        it stays the newest.
        """
        if not self._writing:
            return
        try:
            if not self._backend.checkpoint_done(wait):
                return
        except SlipstreamError as error:
            self._skip(error, needed)
            return
        self._writing = False
        told = b""
        if self._files is not None and self._state is not None:
            try:
                self._files.finish_checkpoint(self._state)
            except OSError as error:
                told = str(error).encode()
        if told := self._backend.broadcast_bytes(told if self._files is not None else None):
            what = f"checkpoint of version {self._started} could not be completed: {told.decode()}"
            self._skip(SlipstreamError(what), needed)

    def _skip(self, error: SlipstreamError, needed: bool) -> None:
        """Give up a checkpoint that failed on every rank; raises `error` unless a later one may do and find room."""
        if needed:
            raise error
        version = self._started
        self._started = -1  # a drain of this version writes it again
        self._writing = False
        if self._backend.critic is not None:
            with suppress(SlipstreamError):
                self._backend.checkpoint_done(True)  # the critic may still write its part
        told = None
        if self._files is not None:
            told = bytes([self._files.skip_checkpoint(version, str(error))])
        if not any(self._backend.broadcast_bytes(told)):
            raise error

    def _begin(self, version: int) -> Path:
        """The backend's new folder, the same on every rank."""
        told = b""
        if self._files is not None:
            try:
                told = b"+" + str(self._files.checkpoints.begin(version)).encode()
            except OSError as error:
                told = b"-" + str(error).encode()
        told = self._backend.broadcast_bytes(told if self._files is not None else None)
        if told[:1] == b"-":
            raise SlipstreamError(f"checkpoint of version {version} could not be begun: {told[1:].decode()}")
        return Path(told[1:].decode())


# ---------------------------------------------------------------- profiles of steps


logger = logging.getLogger(__name__)

MEMORY_ENTRIES = 100_000  # allocations in a snapshot's history; each takes some KB


class StepProfiler:
    """Writes FOLDER/learner-RANK-step-N.json.gz, a Chrome trace, and with CUDA learner-RANK-step-N-memory.pickle."""

    def __init__(self, telemetry: TelemetryConfig, rank: int, folder: Path) -> None:
        self._steps = set(telemetry.profile_steps if rank in telemetry.profile_ranks else ())
        self._rank = rank
        self._folder = folder

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """The context in which this step belongs. After a failure, which is logged, no step is recorded."""
        profiler = self._tried(self._start) if step in self._steps else None
        with record_function(f"step {step}"):
            yield
        if profiler is not None:
            self._tried(lambda: _write(profiler, f"{self._folder}/learner-{self._rank}-step-{step}"))

    def _tried(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception:
            self._steps.clear()
            logger.warning("the profiler failed; this rank records no more steps", exc_info=True)

    def _start(self) -> profile:
        self._folder.mkdir(parents=True, exist_ok=True)
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)
        profiler = profile(record_shapes=True, profile_memory=True)  # CUDA is included where it exists
        profiler.start()
        return profiler


def _write(profiler: profile, name: str) -> None:
    cuda = torch.cuda.is_available()
    try:
        profiler.stop()
        if cuda:
            torch.cuda.memory._dump_snapshot(f"{name}-memory.pickle")
    finally:
        if cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
    profiler.export_chrome_trace(f"{name}.json.gz")


# ---------------------------------------------------------------- the loop

UNTRAINED_STEPS = 3  # steps in a row in which every sample failed, before the run stops


class Trainer:
    """The loop and its state on one rank; `version` counts the steps done, each of one batch."""

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
        self.signs = LifeSigns(config.learner.timeout_s)  # bounds an update, the longest part of a turn
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
            self._alive()
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
                    self._turn(command.serials)
        self._checkpoint(wait=True)
        while self.source.has_final_evaluation and isinstance(self._next_command(), Wait):
            self.signs.show("evaluating", True)
        self._report("checkpointing", WaitFor(WaitKind.EXPORT))
        self.backend.save_hf(self.run_dir.model)
        if self.backend.critic is not None:
            self.backend.critic.save_hf(self.run_dir.critic)
        return "done"

    def _next_command(self) -> Command:
        if self.files is None:
            return decode_command(self.backend.broadcast_bytes(None))
        command = self.source.next_command(self.version)
        if self.backend.world_size > 1:
            self.backend.broadcast_bytes(msgspec.msgpack.encode(command))
        return command

    def _turn(self, serials: list[int]) -> None:
        step = self.version
        source = self.source
        result, done = NOTHING_TRAINED, UpdateFigures()
        began = time.monotonic()
        self._report("training", WaitFor(WaitKind.OPTIMIZER, version=step))
        with self._times.measure("batch_s"):
            batch, updates = source.batch(step)
        with self._times.measure("train_s"):
            if updates:
                result, done = train_updates(step, updates, self.backend, source, self._alive)
        self.version = step + 1
        unused = batch.statistics.tokens_trained - done.tokens
        figures = replace(batch.statistics, tokens_trained=done.tokens, tokens_unused=unused)
        batch = replace(batch, statistics=figures, updates=done.count)
        self.totals.add(figures)
        with self._times.measure("snapshot_s"):
            source.after_step(self.version, batch)
        self._record(batch, result, done)
        told = {"step": step, "version": self.version, "serials": " ".join(map(str, serials))}
        SPANS.add(f"step {step}", "step", began, track="loop", **told)
        self._untrained = self._untrained + 1 if figures.samples_failed == figures.samples else 0
        if self._untrained >= UNTRAINED_STEPS:
            raise HopelessError(
                f"every sample of the last {UNTRAINED_STEPS} steps failed; reasons: {'; '.join(figures.failures)}"
            )
        if self.version % self.config.learner.checkpoint.every == 0 and self.version < self.config.run.steps:
            self._checkpoint()

    def _alive(self) -> None:
        self.signs.show("training", True)

    def _record(self, batch: TrainingBatch, result: StepResult, done: UpdateFigures) -> None:
        """The step's metrics line, written before a checkpoint could make the step permanent."""
        now = time.monotonic()
        self._times.step_s = now - self._line_s
        self._line_s = now
        if self.files is not None:
            elapsed_s = now - self._began_s
            step = Step(batch, result, done, self._times, self.totals, elapsed_s, self.files.incarnation)
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
            synchronous = not self.config.learner.checkpoint.asynchronous
            self._checkpoints.start(self.version, state, wait or synchronous, needed=wait)

    def _report(self, state: str, wait: WaitFor) -> None:
        self.source.report(state, wait, self.version)
