"""The lead rank's files in RUN: checkpoints, metrics, events, and learner.json, which says how the learner ended."""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from common.config.optimizer import OptimizerConfig
from common.config.schema import BaseConfig
from common.errors import UsageError
from common.evaluation import dataset_names
from common.json_lines import EventFile
from common.metrics import EvaluationMetrics, Metrics
from common.process.files import FULL
from common.process.lifecycle import alive, birth_of, out_of_sight, pid_space
from common.process.run_dir import MetricsWriter, RunDir, unwritable, write_json
from common.run_reader import read_tail
from learner.checkpoint.best import Best
from learner.checkpoint.folder import CheckpointFolder, StreamState, TrainerState, schedule_ends
from learner.loop.model_identity import check_same_models, identities, warn_of_files

logger = logging.getLogger(__name__)

KEPT_GROUPS = 8  # in RUN/quarantine, each of up to broker.max_message_bytes


class LearnerRecord(msgspec.Struct, frozen=True):
    """RUN/learner.json: the learner's newest start, and how it ended."""

    pid: int
    incarnation: int
    state: str  # running | done | drained | failed
    policy_version: int
    time_s: float
    birth: str = ""  # as lifecycle.birth_of
    host: str = ""  # its machine; '' in the record of an earlier version
    space: str = ""  # as lifecycle.pid_space; '' in the record of an earlier version
    checkpoints: str = ""  # their folder, relative to RUN where it is inside; '' in the record of an earlier version

    @property
    def runs_here(self) -> bool:
        return alive(self.pid, self.birth, self.space)

    @property
    def ended(self) -> bool:
        """Whether its process is known to have ended; another machine's or container's processes are not seen."""
        return not self.runs_here and not out_of_sight(self.host, self.space)


def read_record(run_dir: RunDir) -> LearnerRecord | None:
    """The record of the run's newest learner; None when there was none or it is torn."""
    try:
        return msgspec.json.decode(run_dir.learner_json.read_bytes(), type=LearnerRecord)
    except (OSError, ValueError):  # msgspec's errors, and text that is not UTF-8
        return None


def went_on(run_dir: RunDir) -> bool:
    """Whether RUN/model and RUN/critic may be of an earlier step: the newest learner is not done."""
    record = read_record(run_dir)
    return record is not None and record.state != "done"


def write_record(run_dir: RunDir, incarnation: int, state: str, policy_version: int) -> None:
    """Replace the record atomically, unless a later learner has taken over: a replaced one ends behind it."""
    newest = read_record(run_dir)
    if newest is not None and newest.incarnation > incarnation:
        return
    now, pid, host = time.time(), os.getpid(), socket.gethostname()
    folder = run_dir.checkpoints
    inside = folder.is_relative_to(run_dir.path)  # a run that was moved still finds them
    known = {"checkpoints": f"{folder.relative_to(run_dir.path) if inside else folder}"}
    record = LearnerRecord(pid, incarnation, state, policy_version, now, birth_of(pid), host, pid_space(), **known)
    write_json(run_dir.learner_json, record)


class RunFiles:
    """The run folder of one learner. Only the lead rank has one."""

    def __init__(self, config: BaseConfig, run_dir: RunDir, local: BaseConfig | None = None) -> None:
        """`local`: the same config with local copies for the hub's names; without it no model is compared.

        Raises UsageError when another user's events may not be appended to, DiskFull when the disk is full.
        """
        best = Best(config) if config.learner.checkpoint.keep_best else None
        self.checkpoints = CheckpointFolder(run_dir.checkpoints, config.learner.checkpoint.keep, best)
        try:
            self.events = EventFile(run_dir.events, "learner")
        except OSError as error:
            raise unwritable("run.dir", run_dir.path, error) from error
        self._config = config
        self._local = local
        self._models: dict[str, dict[str, str]] = {}  # as model_identity.identities
        self._run_dir = run_dir
        self.evaluation = run_dir.evaluation
        # Names come from the config: the places of downloaded files say less.
        self.datasets = dataset_names(config.rl.evaluation.paths) if config.rl else []
        self.evaluated = set[tuple[int, str]]()  # versions and datasets with a metrics line
        self.incarnation = 0  # which start of the learner this is
        self.former_ends: tuple[int, int] | None = None  # schedule_ends of the start before; None: unknown, or none
        self._metrics: MetricsWriter | None = None
        self._unwritten: list[Metrics] = []  # lines for which the disk has no room yet, oldest first
        self._closed = False
        self.recorded: Callable[[Metrics], None] = lambda line: None  # gets every line of the metrics
        self.commit: Callable[[int], None] = lambda step: None  # gets the last step of a checkpoint that is durable

    def start(
        self,
        dataset_digest: str,
        take_over: Callable[[int, TrainerState], None] | None = None,
        known: int = -1,
        run_id: str = "",
    ) -> TrainerState:
        """Note that a learner starts; returns the state from which it does: the newest checkpoint's, or version 0.

        `take_over` gets the incarnation and the state known so far; no other learner can commit after it has
        returned. `known`: the newest incarnation that others know. `run_id`: as for `RunDir.label_checkpoints`.
        Raises UsageError when the checkpoints are another run's or in another folder, or were trained on another
        dataset or from another model.
        """
        record = read_record(self._run_dir)
        self._check_place(record)
        self._run_dir.label_checkpoints(self._config, run_id)
        if self._local is not None:
            _, former = self.checkpoints.newest() or (None, None)
            self._models = identities(self._config, self._local, former.models if former else None)
        state = self._newest(dataset_digest)
        self.incarnation = max(record.incarnation if record else -1, state.incarnation, known) + 1
        if take_over is not None:
            take_over(self.incarnation, state)
            state = self._newest(dataset_digest)  # until then a living learner may have completed a checkpoint
        warn_of_files(state.models, self._models)
        for name in self.checkpoints.remove_incomplete():
            self.note("incomplete_checkpoint_removed", name=name)
        step = state.policy_version
        path = self.checkpoints.path(step) if step else ""
        digest = hashlib.sha256(msgspec.json.encode(self._config, order="sorted")).hexdigest()[:16]
        if path and state.config_digest != digest:
            logger.warning("the config changed since %s was written", path)
        ends = state.schedule_ends
        self.former_ends = ends[max(ends)] if ends else None
        if self.former_ends != (now := schedule_ends(self._config)):
            ends = ends | {step: now}
        write_record(self._run_dir, self.incarnation, "running", step)
        self.note("learner_started", incarnation=self.incarnation, step=step, checkpoint=str(path))
        changed = {"config_digest": digest, "schedule_ends": ends, "models": self._models or state.models}
        return replace(state, incarnation=self.incarnation, **changed)

    def _check_place(self, record: LearnerRecord | None) -> None:
        """Raise UsageError when the run would begin again in an empty folder, because its checkpoints are elsewhere."""
        folder, run, metrics = self.checkpoints.folder, self._run_dir.path, self._run_dir.metrics
        if record is None or self.checkpoints.steps() or not metrics.exists():
            return
        former = run / (record.checkpoints or "checkpoints")
        known = record.checkpoints or any(former.glob("step-*"))
        if not known or former.resolve() == folder.resolve():
            return
        if lines := read_tail(metrics, self._config.step_metrics).lines:
            found = f"{folder} has no checkpoint, and {metrics} has steps up to {lines[-1].step}"
            value = "null" if former == run / "checkpoints" else f"{former}"
            hint = f"set learner.checkpoint.dir={value}, move its files to {folder}, or begin anew in another run.dir"
            expected = f"expected the folder of this run's checkpoints, which was {former}"
            raise UsageError(f"learner.checkpoint.dir: {found}; {expected}: {hint}")

    def _newest(self, dataset_digest: str) -> TrainerState:
        path, state = self.checkpoints.newest() or (None, None)
        if state is None:
            return TrainerState(policy_version=0, incarnation=-1, tasks=StreamState(), dataset_digest=dataset_digest)
        if state.dataset_digest != dataset_digest:
            told = ", ".join(f"{key}: {dataset}" for key, dataset in self._config.tasks.datasets.items())
            raise UsageError(f"{told} changed since {path} was written; restore it")
        check_same_models(self._config, state.models, self._models, f"{path}")
        return state

    def warn_of_schedule(self, step: int, rate: Callable[[int, OptimizerConfig, int], float]) -> None:
        """Warn when the learning rate of `step` is another one than before, because a schedule ends elsewhere now.

        `rate`: as learner.megatron.optimizer.learning_rate, which takes seconds to import.
        """
        learner, critic = self._config.learner, self._config.learner.value_model
        update = step * learner.updates
        alone = critic.warmup_steps * learner.updates if critic else 0
        last = self._config.run.steps * learner.updates
        each = [("learner.optimizer", learner.optimizer, max(update - alone, 0), last - alone)]
        each += [("learner.critic.optimizer", critic.optimizer, update, last)] if critic else []
        ends = zip(self.former_ends or (), schedule_ends(self._config), strict=False)
        for (key, optimizer, number, updates), (old, new) in zip(each, ends, strict=False):
            before, now = (rate(number, replace(optimizer, decay_steps=end), 0) for end in (old, new))
            if before != now and step < self._config.run.steps:
                hint = f"; to keep the old schedule, stop and set {key}.decay_steps: {old}"
                if not optimizer.min_lr_fraction and old < updates:
                    hint = ""  # a launch would refuse it: the rate would be 0
                told = "%s: the %s schedule ends at update %d instead of %d; the next learning rate is %.4g instead of"
                told += " %.4g%s"
                logger.warning(told, key, optimizer.schedule, new, old, now, before, hint)

    def open_metrics(self, version: int) -> None:
        """Open the metrics file without the lines of steps from `version` on, because these steps come again.

        Later versions come again, too: their evaluations are removed.
        """
        self._metrics = MetricsWriter(self._run_dir.metrics, keep_before_step=version)
        kept = read_tail(self._run_dir.metrics, self._config.step_metrics)
        self.evaluated = {(line.policy_version, line.dataset) for line in kept.evaluations}
        for path in self.evaluation.glob("*.jsonl"):
            found = path.name.split("-")[0]
            if found.isdecimal() and int(found) > version:
                path.unlink()
        if self.checkpoints.best is not None:
            for line in [*kept.lines, *kept.evaluations]:
                self.checkpoints.best.note(line)
            self._prune()  # the last learner may have been killed between a line and the choice

    def note(self, kind: str, **detail: object) -> None:
        """Add an event; training continues when that fails."""
        try:
            self.events.add(kind, **detail)
        except OSError as error:
            logger.error("events.jsonl cannot be written: %s", error)

    def record(self, line: Metrics) -> None:
        """Append a line, or keep it while the disk is full. That of an evaluation may decide which checkpoint is best.

        Raises OSError when the file cannot be written for another reason.
        """
        self._unwritten.append(line)
        try:
            self._write_lines()
        except OSError as error:
            if error.errno not in FULL:
                raise
            told = f"metrics.jsonl waits for room, {len(self._unwritten)} lines so far: {error.strerror}"
            logger.error("%s; free some space", told)
        self.recorded(line)
        if self.checkpoints.best is not None:
            self.checkpoints.best.note(line)
            if isinstance(line, EvaluationMetrics):
                self._prune()

    def _write_lines(self) -> None:
        """Append the lines that are not in the file yet; raises OSError."""
        assert self._metrics is not None
        while self._unwritten:
            self._metrics.write(self._unwritten[0])
            del self._unwritten[0]

    def _prune(self) -> None:
        """Choose the best checkpoint again; training continues when that fails."""
        try:
            self.checkpoints.prune()
        except OSError as error:
            logger.warning("older checkpoints could not be removed: %s", error)

    def finish_checkpoint(self, state: TrainerState) -> None:
        """Make a written checkpoint durable, after the metrics of its steps; only then commit them.

        Raises OSError before the checkpoint is durable; nothing is committed then.
        """
        assert self._metrics is not None
        self._write_lines()
        self._metrics.sync()
        path = self.checkpoints.finish(state)
        self.commit(state.policy_version - 1)
        self.note("checkpoint", version=state.policy_version, path=str(path))
        self._prune()

    def skip_checkpoint(self, version: int, reason: str) -> bool:
        """Remove what is left of a checkpoint that failed; returns whether the disk is full: then training goes on."""
        try:
            full = self.checkpoints.lacks_room()
            self.checkpoints.remove_scratch(version)
        except OSError as error:
            logger.warning("the folder of the checkpoints cannot be read: %s", error)
            return False
        if full:
            logger.error("%s; the disk is full: free some space, and the next checkpoint is written", reason)
            self.note("checkpoint_skipped", version=version, reason=reason)
        return full

    def quarantine(self, serial: int, payload: bytes) -> None:
        """Keep a group that does not decode in RUN/quarantine, where there is room for it."""
        folder = self._run_dir.quarantine
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if len(list(folder.glob("group-*.bin"))) < KEPT_GROUPS:
                (folder / f"group-{serial}.bin").write_bytes(payload)
        except OSError as error:
            logger.error("group %d could not be kept: %s", serial, error)

    def close(self, state: str, version: int, reason: str = "") -> None:
        """Note how the learner ended: done, drained or failed. Later calls do nothing.

        After a failure a full disk is logged only: its error would take the place of the one that ended the learner.
        """
        if self._closed:
            return
        self._closed = True
        try:
            write_record(self._run_dir, self.incarnation, state, version)
        except OSError as error:
            logger.error("learner.json cannot be written: %s", error)
            if state != "failed":  # the job's supervisor reads there whether the run is done
                raise
        self.note("learner_stopped", state=state, step=version, reason=reason)
        self.events.close()
        if self._metrics is not None:
            try:
                self._write_lines()
            except OSError as error:
                logger.error("metrics.jsonl lacks its last %d lines: %s", len(self._unwritten), error)
            self._metrics.close()
