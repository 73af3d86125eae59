"""The protocol between the training loop and its batches: rollouts (rollout_source.py) or rows (learner/sft)."""

from collections.abc import Sequence
from typing import Protocol

from broker.contract import StoredGroup
from common.metrics import SftMetrics, StepMetrics
from learner.backend_protocol import LossFunction, Microbatch
from learner.batch.batch import TrainingBatch
from learner.checkpoint.folder import StreamState
from learner.loop.rank_commands import Command
from learner.loop.step_metrics import Step


class BatchSource(Protocol):
    """Batches by step, and what belongs to their kind. Every rank has one; sources inherit the defaults.

    Attributes:
        loss: is computed on every microbatch.
        temperature: divides the logits.
        entropy: whether the loss needs the entropy.
    """

    loss: LossFunction
    temperature = 1.0
    entropy = False

    def next_command(self, step: int) -> Command:
        """The command for every rank. Only the lead rank calls it."""
        ...

    def batch(self, step: int, groups: Sequence[StoredGroup]) -> TrainingBatch:
        """The batch of a Train command, the same on every rank."""
        ...

    def line(self, step: Step) -> StepMetrics | SftMetrics:
        """The metrics line of a step. Only the lead rank calls it."""
        ...

    def tasks(self) -> StreamState:
        """Where the task stream stands, for a checkpoint. Only the lead rank calls it."""
        return StreamState()

    def begin(self, version: int) -> None:
        """Called once, before the first step. Collective."""

    def complete(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """The microbatches with everything that the loss reads. Collective."""
        return microbatches

    def stepped(self, version: int, batch: TrainingBatch) -> None:
        """Called after each optimizer step with the version that it made. Collective."""

    def report(self, state: str, waiting_on: str, version: int) -> None:
        """Say what the loop does now."""
