"""Batches of rollouts for the training loop: groups from the broker in, versions of the weights out."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from broker.contract import StoredGroup
from common.config.schema import Config
from common.metrics import StepMetrics
from common.rollouts import Group
from common.weights.messages import Canary
from learner.backend_protocol import Backend, Microbatch
from learner.batch.batch import TrainingBatch, assemble, decode
from learner.batch.packing import Document, build
from learner.checkpoint.folder import StreamState
from learner.loop.batch_source import BatchSource
from learner.loop.lead_rank import Lead
from learner.loop.rank_commands import Command
from learner.loop.step_metrics import Step, step_metrics
from learner.loss.losses import policy_loss


class RolloutSource(BatchSource):
    """See learner.loop.batch_source.BatchSource."""

    entropy = True

    def __init__(self, config: Config, backend: Backend, incarnation: int, lead: Lead | None) -> None:
        """`lead` is given on rank 0 and None elsewhere."""
        self.loss = policy_loss(config.learner.loss, config.rollout.max_tokens)
        self.temperature = config.rollout.temperature
        self._config, self._backend, self._incarnation, self._lead = config, backend, incarnation, lead
        shape = {"vocab_size": backend.vocab_size, "routing": backend.routing_shape}
        self._decode = partial(decode, group_size=config.rollout.group_size, **shape)
        self._groups: list[Group] = []  # on the lead, those of the newest Train command
        self._published = 0
        self._canary_tokens = self._seeded_canary()

    def begin(self, version: int) -> None:
        self._publish(version)

    def next_command(self, step: int) -> Command:
        assert self._lead is not None
        command, self._groups = self._lead.next_command(step, self._decode)
        return command

    def batch(self, step: int, groups: Sequence[StoredGroup]) -> TrainingBatch:
        decoded = self._groups if self._lead else [self._decode(group) for group in groups]
        return assemble(decoded, step, self._config, self._backend.routing_shape)

    def complete(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """With the reference model's log-probabilities, if the loss asks for them. Collective."""
        if not self._config.learner.loss.kl_coefficient:
            return microbatches
        found = self._backend.reference_logprobs(microbatches, self.temperature)
        return [replace(batch, reference_logprobs=x) for batch, x in zip(microbatches, found, strict=True)]

    def stepped(self, version: int, batch: TrainingBatch) -> None:
        """Publish the version when it is due. Collective."""
        if batch.documents:
            self._canary_tokens = canary_from(batch.documents[0], self._config.weights.canary_tokens)
        if version % self._config.weights.publish_every == 0 and version < self._config.run.steps:
            self._publish(version)

    def line(self, step: Step) -> StepMetrics:
        assert self._lead is not None
        line = step_metrics(step, self._incarnation, self._lead.fleet_figures())
        self._lead.stepped(step.batch.step, step.totals)
        return line

    def tasks(self) -> StreamState:
        assert self._lead is not None
        return self._lead.tasks.state()

    def report(self, state: str, waiting_on: str, version: int) -> None:
        if self._lead is not None:
            self._lead.reporter.set(state, waiting_on, policy_version=version)

    def _publish(self, version: int) -> None:
        """Hand this version to the weight plane. Collective: every rank takes part in export and canary."""
        self.report("publishing", "the copy of the weights", version)
        canary = self._canary() if self._canary_due() else None
        self._published += 1
        if self._lead is None:
            for _ in self._backend.export():
                pass
        else:
            receipt = self._lead.publisher.publish(version, self._backend.export(), canary)
            self._lead.files.events.add("publish", version=receipt.version, bytes=receipt.payload_bytes)

    def _canary_due(self) -> bool:
        """Every weights.canary_every publishes, and when a node has missed the newest canary. Collective."""
        every = self._config.weights.canary_every
        if self._published == 0 or (every > 0 and self._published % every == 0):
            return True
        owed = self._lead is not None and self._lead.publisher.stats().canary_owed
        if self._backend.world_size == 1:
            return owed
        return self._backend.broadcast_bytes((b"+" if owed else b"-") if self._lead else None) == b"+"

    def _canary(self) -> Canary:
        """Log-probabilities of the canary sequence under the current weights. Collective."""
        tokens = self._canary_tokens
        mask = np.ones(len(tokens), dtype=np.uint8)
        document = Document(np.asarray(tokens, dtype=np.int32), mask, name="the canary")
        logprobs = self._backend.logprobs(build([document], [[0]]))[0]
        return Canary(tokens, logprobs[: len(tokens) - 1].tolist(), self._config.weights.canary_tolerance)

    def _seeded_canary(self) -> list[int]:
        """Tokens drawn from run.seed, used until the first real sample; the same on every rank."""
        draw = np.random.Generator(np.random.PCG64(self._config.run.seed))
        return draw.integers(0, self._backend.vocab_size, max(2, self._config.weights.canary_tokens)).tolist()


def canary_from(document: Document, tokens: int) -> list[int]:
    """The first `tokens` tokens of a real sample: the canary covers text that the policy sees."""
    return document.tokens[: max(2, tokens)].tolist()
