"""The training loop's source of batches: rollouts (rollout_source.py) or rows (learner/sft).

The lead rank's source gives a command per turn of the loop, which every rank obeys. While the lead waits for groups it
sends WAIT about once a second, so that no collective reaches its limit.
"""

from collections.abc import Callable

import msgspec

from common.metrics import SftMetrics, StepMetrics
from common.waits import WaitFor
from learner.backend_protocol import Backend, LossFunction, Microbatch
from learner.batch.batch import TrainingBatch
from learner.batch.updates import Update
from learner.checkpoint.folder import StreamState
from learner.loop.step_metrics import Step


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """No batch yet; ask again."""


class Train(msgspec.Struct, frozen=True, tag="train"):
    """Train step `step`, on groups that the lead has decoded and checked."""

    step: int
    serials: list[int] = []  # its groups


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Checkpoint this version, unless that was done, and ask again."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The job was asked to stop: checkpoint and leave."""

    reason: str = ""  # from a watch rule: leave with this error, so that nothing starts the learner again


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """The lead cannot continue; every rank leaves with this error instead of waiting for it."""

    reason: str
    hopeless: bool = False  # a learner that is started again would fail again


Command = Wait | Train | Save | Drain | Fail
decode_command = msgspec.msgpack.Decoder(Command).decode


class BatchSource:
    """Batches by step, and what belongs to their kind. Every rank has one."""

    loss: LossFunction
    temperature = 1.0  # divides the logits
    entropy = False  # whether the loss needs it
    updates = 1  # most that a version has
    kl_stop: float | None = None  # learner.loss.kl_stop
    value_loss: LossFunction | None = None  # a critic's
    critic_alone = 0  # first steps of the run, in which only the critic trains
    has_final_evaluation = False  # after the last step commands go on until one is no Wait

    def next_command(self, step: int) -> Command:
        """The command for every rank. Only the lead rank calls it."""
        raise NotImplementedError

    def batch(self, step: int) -> tuple[TrainingBatch, list[Update]]:
        """The batch of the newest Train command, and its updates with this rank's part of each. Collective.

        The statistics are the same on every rank; the documents may be on the lead rank only. There is no update when
        there is nothing to train on.
        """
        raise NotImplementedError

    def line(self, step: Step) -> StepMetrics | SftMetrics:
        """The metrics line of a step. Only the lead rank calls it."""
        raise NotImplementedError

    def start(self) -> None:
        """Called once, before the model is loaded."""

    def attach(self, backend: Backend, version: int) -> None:
        """Called once, when model and checkpoint are loaded."""

    def begin(self, version: int) -> None:
        """Called once, before the first step. Collective."""

    def stream_state(self) -> StreamState:
        """Where the task stream stands, for a checkpoint. Only the lead rank calls it."""
        return StreamState()

    def complete(self, microbatches: list[Microbatch], alive: Callable[[], None]) -> list[Microbatch]:
        """The microbatches with everything that the loss reads; `alive` is called between its passes. Collective."""
        return microbatches

    def after_step(self, version: int, batch: TrainingBatch) -> None:
        """Called after each step with the version that it made. Collective."""

    def report(self, state: str, wait: WaitFor, version: int) -> None:
        """Say what the loop does now."""

    def report_silence(self, ranks: str) -> None:
        """Say which ranks are silent, '' when none is. Called from a thread."""

    def close(self, state: str, version: int, reason: str) -> None:
        """Say how the job ended (done, drained or failed), and release everything."""
