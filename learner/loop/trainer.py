"""The training loop: one turn per command, the same on every rank.

    lead:   offer tasks -> take B groups -> check them
               |  waits for groups; nodes unblock it by completing leases (RUN/status says how many are on the way)
               v
    all:    broadcast of the command (WAIT | TRAIN groups | DRAIN | FAIL)
               |  the other ranks wait here for the lead, at most lead.TAKE_WAIT_S plus broker round trips
               v
    all:    assemble (advantages, staleness, expiry) -> pack -> backend.train_step -> version + 1
               |  ranks wait for each other inside the backend's collectives
               v
    all:    export -> lead: publisher.publish(version), every weights.publish_every steps
               |  waits for the copy only; sending goes on behind, and a newer version replaces one that waits
               v
    lead:   metrics line
    all:    begin a checkpoint every learner.checkpoint.every steps, at a drain and at the end
               |  waits for the copy only, and for the last checkpoint if that is still being written
    all:    once per turn: is it on every rank's disk? -> lead: rename, commit
               |  commit tells the broker to forget the groups, so it comes after the rename of a durable checkpoint;
               |  at a drain and at the end all wait for it

There is no second loop for synchronous RL: with staleness.max = 0 nothing may be leased for a step before its
version is out, so the same turns follow one another.
"""

import gc
import logging
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from broker.contract import StoredGroup
from common.config.schema import Config
from common.errors import HopelessError, SlipstreamError
from common.process.files import replace_folder
from common.process.run_dir import RunDir
from common.weights.messages import Canary
from learner.backend_protocol import Backend, Microbatch, StepResult
from learner.batch.batch import TrainingBatch, assemble, decode
from learner.batch.packing import Document, build, microbatches_for
from learner.checkpoint.folder import TrainerState
from learner.checkpoint.writer import Checkpointer
from learner.loop import rank_commands
from learner.loop.lead_rank import Lead
from learner.loop.rank_commands import Command, Drain, Fail, Train
from learner.loop.step_metrics import Times, Totals, check_finite, step_metrics
from learner.loss.losses import policy_loss

logger = logging.getLogger(__name__)

UNTRAINED_STEPS = 3  # steps in a row in which every sample failed, before the run stops
NOTHING_TRAINED = StepResult(loss=0.0, loss_tokens=0, grad_norm=0.0, lr=0.0, sums={}, maxima={})


@dataclass(frozen=True)
class Start:
    """Where the loop begins: from the newest checkpoint, or zero. Same on every rank.

    Attributes:
        digests: (dataset, config), written into checkpoints.
    """

    version: int
    incarnation: int
    totals: Totals
    digests: tuple[str, str]


class Trainer:
    """The loop and its state on one rank. Every public method is collective."""

    def __init__(self, config: Config, run_dir: RunDir, backend: Backend, start: Start, lead: Lead | None) -> None:
        """`lead` is given on rank 0 and None elsewhere."""
        self.config = config
        self.run_dir = run_dir
        self.backend = backend
        self.lead = lead
        self.version = start.version
        self.start = start
        self.totals = start.totals
        self._loss = policy_loss(config.learner.loss, config.rollout.max_tokens)
        self._checkpoints = Checkpointer(backend, config.learner.checkpoint.asynchronous, lead, start.version)
        self._published = 0
        self._canary_tokens = self._seeded_canary()
        self._untrained = 0
        self._times = Times()
        self._began_s = self._line_s = time.monotonic()

    def run(self) -> str:
        """Train to run.steps or to a drain; returns the final state, 'done' or 'drained'.

        Raises:
            SlipstreamError: the run cannot go on; the message says why. The newest checkpoint stays as it is.
        """
        self._publish()
        gc.collect()
        gc.freeze()  # what exists now lives as long as the process: collections need not walk it again
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
        self._export_model()
        return "done"

    def _next_command(self) -> Command:
        """The lead's next command, on every rank."""
        if self.lead is None:
            return rank_commands.decode(self.backend.broadcast_bytes(None))
        command = self.lead.next_command(self.version)
        if self.backend.world_size > 1:
            self.backend.broadcast_bytes(rank_commands.encode(command))
        return command

    def _turn(self, stored: list[StoredGroup]) -> None:
        """One optimizer step and what follows from it."""
        step = self.version
        self._report("training", f"the optimizer step {step}")
        began = time.monotonic()
        batch = self._assemble(stored)
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
            packed = self._with_reference(packed)
            result = self.backend.train_step(packed, self._loss, self.config.rollout.temperature, entropy=True)
            check_finite(step, result)
            self._canary_tokens = canary_from(batch.documents[0], self.config.weights.canary_tokens)
        self._times.train_s = timed(began)
        self.version = step + 1
        self.totals.add(batch.statistics)
        if self.version % self.config.weights.publish_every == 0 and self.version < self.config.run.steps:
            self._publish()
        self._record(batch, result, len(packed))
        self._check_failures(batch)
        if self.version % self.config.learner.checkpoint.every == 0 and self.version < self.config.run.steps:
            self._checkpoint()

    def _assemble(self, stored: list[StoredGroup]) -> TrainingBatch:
        """The step's batch; the lead has decoded the groups already."""
        vocab, size = self.backend.vocab_size, self.config.rollout.group_size
        routing = self.backend.routing_shape
        groups = self.lead.groups if self.lead else [decode(group, vocab, size, routing) for group in stored]
        return assemble(groups, self.version, self.config, routing)

    def _with_reference(self, packed: list[Microbatch]) -> list[Microbatch]:
        """The microbatches with the reference model's log-probabilities, if the loss asks for them. Collective."""
        if not self.config.learner.loss.kl_coefficient:
            return packed
        found = self.backend.reference_logprobs(packed, self.config.rollout.temperature)
        return [replace(batch, reference_logprobs=x) for batch, x in zip(packed, found, strict=True)]

    def _check_failures(self, batch: TrainingBatch) -> None:
        """Stop when the environment does nothing but fail."""
        figures = batch.statistics
        self._untrained = self._untrained + 1 if figures.samples_failed == figures.samples else 0
        if self._untrained >= UNTRAINED_STEPS:
            raise HopelessError(
                f"every sample of the last {UNTRAINED_STEPS} steps failed; reasons: {'; '.join(figures.failures)}"
            )

    def _publish(self) -> None:
        """Hand this version to the weight plane. Collective: every rank takes part in export and canary."""
        self._report("publishing", "the copy of the weights")
        began = time.monotonic()
        canary = self._canary() if self._canary_due() else None
        self._published += 1
        if self.lead is None:
            for _ in self.backend.export():
                pass
        else:
            receipt = self.lead.publisher.publish(self.version, self.backend.export(), canary)
            self.lead.events.add("publish", version=receipt.version, bytes=receipt.payload_bytes)
        self._times.snapshot_s = timed(began)

    def _canary_due(self) -> bool:
        """Every weights.canary_every publishes, and when a node has missed the newest canary. Collective."""
        every = self.config.weights.canary_every
        if self._published == 0 or (every > 0 and self._published % every == 0):
            return True
        owed = self.lead is not None and self.lead.publisher.stats().canary_owed
        if self.backend.world_size == 1:
            return owed
        return self.backend.broadcast_bytes((b"+" if owed else b"-") if self.lead else None) == b"+"

    def _canary(self) -> Canary:
        """Log-probabilities of the canary sequence under the current weights. Collective."""
        tokens = self._canary_tokens
        mask = np.ones(len(tokens), dtype=np.uint8)
        document = Document(np.asarray(tokens, dtype=np.int32), mask, name="the canary")
        logprobs = self.backend.logprobs(build([document], [[0]]))[0]
        return Canary(tokens, logprobs[: len(tokens) - 1].tolist(), self.config.weights.canary_tolerance)

    def _seeded_canary(self) -> list[int]:
        """Tokens drawn from run.seed, used until the first real sample; the same on every rank."""
        draw = np.random.Generator(np.random.PCG64(self.config.run.seed))
        return draw.integers(0, self.backend.vocab_size, max(2, self.config.weights.canary_tokens)).tolist()

    def _record(self, batch: TrainingBatch, result: StepResult, microbatches: int) -> None:
        """The step's metrics line, written before a checkpoint could make the step permanent."""
        now = time.monotonic()
        self._times.step_s, self._line_s = now - self._line_s, now
        if self.lead is not None:
            status = self.lead.refresh()
            line = step_metrics(
                step=batch.step,
                incarnation=self.start.incarnation,
                elapsed_s=now - self._began_s,
                result=result,
                statistics=batch.statistics,
                microbatches=microbatches,
                regenerated=self.lead.regenerated,
                times=self._times,
                totals=self.totals,
                broker=status,
                nodes_live=self.lead.nodes_live(),
                generation_stall_s=self.lead.stall_s(),
                publisher=self.lead.publisher.stats(),
            )
            self.lead.record(line)
            self.lead.reporter.set_waste(self.totals.waste())
        self._times = Times()

    def _checkpoint(self, wait: bool = False) -> None:
        """Begin a checkpoint of this version unless there is one; with `wait` it is complete on return. Collective."""
        began = time.monotonic()
        self._report("checkpointing", "the disk" if wait else "the copy of the weights")
        self._checkpoints.start(self.version, self._state(self.lead) if self.lead else None)
        if wait:
            self._checkpoints.poll(wait=True)
        self._times.checkpoint_s += timed(began)

    def _poll_checkpoint(self) -> None:
        """Complete the checkpoint that is being written, if it is on the disk by now. Collective."""
        began = time.monotonic()
        self._checkpoints.poll()
        self._times.checkpoint_s += timed(began)

    def _state(self, lead: Lead) -> TrainerState:
        dataset, config = self.start.digests
        return TrainerState(
            policy_version=self.version,
            incarnation=self.start.incarnation,
            tasks=lead.tasks.state(),
            dataset_digest=dataset,
            config_digest=config,
            tokens_trained_total=self.totals.tokens_trained,
            tokens_wasted_total=self.totals.tokens_wasted,
            tokens_masked_total=self.totals.tokens_masked,
        )

    def _export_model(self) -> None:
        """RUN/model: the final Hugging Face folder, replaced as a whole. Collective."""
        self._report("checkpointing", "the disk: exporting the final model")
        save_model(self.backend, self.run_dir.model, is_lead=self.lead is not None)

    def _report(self, state: str, waiting_on: str) -> None:
        if self.lead is not None:
            self.lead.reporter.set(state, waiting_on, policy_version=self.version)


def timed(start_s: float) -> float:
    """Seconds since a time.monotonic() reading."""
    return time.monotonic() - start_s


def canary_from(document: Document, tokens: int) -> list[int]:
    """The first `tokens` tokens of a real sample: the canary runs over text that the policy sees."""
    return document.tokens[: max(2, tokens)].tolist()


def save_model(backend: Backend, folder: Path, is_lead: bool) -> None:
    """Write the Hugging Face folder beside `folder`, then put it in its place. Collective."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    if is_lead:
        shutil.rmtree(scratch, ignore_errors=True)
    backend.broadcast_bytes(b"clean" if is_lead else None)
    backend.save_hf(scratch)
    if is_lead:
        replace_folder(scratch, folder)
