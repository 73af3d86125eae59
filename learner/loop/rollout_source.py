"""Batches of rollouts for the training loop, on every rank; lead_rank.py adds what only the lead rank does."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import msgspec
import numpy as np
from torch import Tensor

from common.config.critic import CriticConfig
from common.config.schema import Config
from common.errors import SlipstreamError, UsageError
from common.security.credentials import curve_credentials
from common.waits import WaitFor, WaitKind
from common.weights.source.publisher import WeightPublisher
from common.weights.source.snapshot import TensorSpecs
from common.weights.source.sources import LeadEndpoint, RemoteSource
from common.weights.wire.messages import Canary
from learner.backend_protocol import Backend, Microbatch
from learner.batch.batch import TrainingBatch, decode
from learner.batch.packing import Document, build
from learner.batch.updates import Update, build_updates
from learner.loop import share
from learner.loop.batch_source import BatchSource
from learner.loop.transcripts import Logprobs, RecordingLoss
from learner.loss import estimates, whole_batch
from learner.loss.gae import Moments
from learner.loss.losses import policy_loss
from learner.loss.value_loss import value_loss

logger = logging.getLogger(__name__)


class RolloutSource(BatchSource):
    entropy = True

    def __init__(
        self, config: Config, address: str | None = None, lead_publisher: WeightPublisher | None = None
    ) -> None:
        """`address`: where this rank serves its part of the weights; None: weights.address.

        `lead_publisher`: the publisher of the lead rank, None on the others.
        """
        self.loss = self._recorder = RecordingLoss(policy_loss(config.learner.loss, config.rollout.max_tokens))
        self.temperature = config.rollout.temperature
        self.updates = config.learner.updates
        self.kl_stop = config.learner.loss.kl_stop
        critic = config.learner.critic
        self.value_loss = None if critic is None else value_loss(critic.value_clip, critic.level)
        self.critic_alone = 0 if critic is None else critic.warmup_steps
        self.config = config
        every = config.evaluation.every
        self.has_final_evaluation = every > 0 and config.run.steps % every == 0
        self._step = 0  # the one whose batch came last
        self._published = 0
        self._address = address or config.weights.address
        self._sends_adapters = config.weights.encoding == "adapter"
        self._in_parts: bool | None = None  # every source sends its own part of the weights; None: not found out yet
        self._remote: RemoteSource | None = None
        self._lead_publisher = lead_publisher

    def attach(self, backend: Backend, version: int) -> None:
        self.backend = backend
        shape = {"vocab_size": backend.vocab_size, "routing": backend.routing_shape}
        told = self.config.learner.loss.distillation
        self.decode = partial(decode, group_size=self.config.rollout.group_size, distillation=told, **shape)
        self._cells = share.cells(backend) if backend.world_size > 1 else []
        # Until the first real sample: drawn from run.seed, the same on every rank.
        draw = np.random.Generator(np.random.PCG64(self.config.run.seed))
        count = max(2, self.config.weights.canary_tokens)
        self._canary_tokens: list[int] = draw.integers(0, backend.vocab_size, count).tolist()

    def begin(self, version: int) -> None:
        self._publish(version)

    def batch(self, step: int) -> tuple[TrainingBatch, list[Update]]:
        """Raises UsageError, on every rank, when a document is too long for a microbatch."""
        self._step = step
        told, documents, parts = share.decode(self.backend.deliver(None, [cell.ranks for cell in self._cells]))
        if told.refused:
            raise UsageError(told.refused)
        self._recorder.expect(told.recorded)
        self._canary_tokens = told.canary
        return TrainingBatch(step, [], told.statistics), build_updates(documents, parts, self.config)

    def complete(self, microbatches: list[Microbatch], alive: Callable[[], None]) -> list[Microbatch]:
        """With the reference model's log-probabilities, a critic's estimates and the batch's marks, where asked for.

        Collective.
        """
        if self.config.measures_kl:
            found = self.backend.reference_logprobs(microbatches, self.temperature)
            alive()
            microbatches = [replace(batch, reference_logprobs=x) for batch, x in zip(microbatches, found, strict=True)]
        critic = self.config.learner.critic
        marks = whole_batch.marks(self.config.learner.loss)
        begin: list[Tensor] = []
        if marks or (critic is not None and critic.kl_coefficient):
            frozen = [batch.proximal_logprobs for batch in microbatches if batch.proximal_logprobs is not None]
            begin = frozen or self.backend.logprobs(microbatches, self.temperature)  # every batch has it, or none
            alive()
        if critic is not None:
            microbatches = self._estimated(microbatches, begin, critic)
        return self._marked(microbatches, begin) if marks else microbatches

    def _estimated(
        self, microbatches: list[Microbatch], logprobs: list[Tensor], config: CriticConfig
    ) -> list[Microbatch]:
        """With what the critic makes of the rewards; advantages are normalized over the whole batch."""
        assert self.backend.critic is not None
        found = estimates.estimated(microbatches, self.backend.critic.values(microbatches), logprobs, config)
        told = self._from_replicas(msgspec.msgpack.encode(estimates.moments_of(found)))
        parts = [*chain.from_iterable(msgspec.msgpack.decode(data, type=list[Moments]) for data in told)]
        if not all(math.isfinite(total) for _, total, _ in parts):  # every rank sees it
            hint = "begin a new run from the last checkpoint with a lower learner.critic.optimizer.lr"
            raise SlipstreamError(f"step {self._step}: a value of the critic is no number; {hint}")
        return estimates.normalized(found, parts) if config.normalize else found

    def _marked(self, microbatches: list[Microbatch], logprobs: list[Tensor]) -> list[Microbatch]:
        """With the marks of an objective over the whole batch."""
        loss = self.config.learner.loss
        own = whole_batch.tokens_of(loss, microbatches, logprobs)
        parts = [whole_batch.decode(data) for data in self._from_replicas(whole_batch.encode(own))]
        chosen = whole_batch.choose(loss, parts, (self.config.run.seed, self._step))
        return [whole_batch.with_marks(batch, chosen) for batch in microbatches]

    def _from_replicas(self, own: bytes) -> list[bytes]:
        """The bytes of every replica, whose first rank sends them. Collective."""
        if not self._cells:
            return [own]
        first = {cell.replica: cell.ranks[0] for cell in reversed(self._cells)}
        sends = first[self.backend.data_parallel_rank] == self.backend.rank
        return [data for data in self.backend.all_gather_bytes(own if sends else b"") if data]

    def after_step(self, version: int, batch: TrainingBatch) -> None:
        """Keep transcripts, and publish the version when it is due. Collective."""
        logprobs = self._recorder.collect(self.backend)
        self._transcribe(batch, logprobs)
        if version % self.config.weights.publish_every == 0 and (
            version < self.config.run.steps or self.has_final_evaluation
        ):
            self._publish(version)

    def _transcribe(self, batch: TrainingBatch, logprobs: Logprobs) -> None:
        """Keep the transcripts of a step; only the lead rank does."""

    def _hand_over(self, version: int, canary: Canary | None) -> None:
        """Every rank takes part in producing the tensors, and sends its own part if there are several."""
        tensors = self._tensors()
        if self._remote is not None:
            self._remote.publish(version, tensors)
        else:
            deque(chain(tensors, self._adapters() or ()), maxlen=0)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that this rank sends or must take part in producing. Collective."""
        if self._in_parts is None:
            self._in_parts = self._share()
        return self.backend.export_part() if self._in_parts else self.backend.export()

    def _adapters(self) -> Iterator[tuple[str, Tensor]] | None:
        """The adapters, where they travel in the place of weights. Collective."""
        return self.backend.export_adapters() if self._sends_adapters else None

    def _freeze(self, named: Iterator[tuple[str, Tensor]]) -> None:
        """Every rank takes part in producing the frozen weights; the lead rank keeps them."""
        deque(named, maxlen=0)

    def _share(self) -> bool:
        """Find out who sends what: over the relay every rank its own part, else the lead everything. Collective."""
        if self.config.weights.transport != "relay" or self.backend.world_size == 1 or self._sends_adapters:
            return False
        own = msgspec.msgpack.encode(self.backend.part_layout())
        parts = {
            rank: part
            for rank, data in enumerate(self.backend.all_gather_bytes(own))
            if (part := msgspec.msgpack.decode(data, type=TensorSpecs))
        }
        publisher = self._lead_publisher
        lead = self.backend.broadcast_bytes(publisher and msgspec.msgpack.encode(publisher.lead))
        if len(parts) > 1 and self.backend.rank in parts:
            self._become_source(list(parts).index(self.backend.rank), list(parts.values()), lead)
        return len(parts) > 1

    def _become_source(self, number: int, parts: list[TensorSpecs], lead: bytes) -> None:
        if self._lead_publisher is not None:
            assert number == 0, f"the lead rank has part {number} of the model"
            self._lead_publisher.share(parts)
            logger.info("every version comes in %d parts, each from the rank that has it", len(parts))
            return
        weights = msgspec.structs.replace(self.config.weights, address=self._address)
        keys = curve_credentials(self.config.broker.credentials)
        told = msgspec.msgpack.decode(lead, type=LeadEndpoint)
        dtype = self.config.model.dtype
        self._remote = RemoteSource(number, parts, told, dtype=dtype, weights=weights, credentials=keys)

    def _publish(self, version: int) -> None:
        """Hand this version to the weight plane; with a canary when one is due or a node has missed the newest."""
        self.report("publishing", WaitFor(WaitKind.WEIGHTS_COPY), version)
        every = self.config.weights.canary_every
        due = self._published == 0 or (every > 0 and self._published % every == 0)
        publisher = self._lead_publisher  # only the lead rank knows whether a node has missed the newest canary
        owed = b"+" if publisher is not None and publisher.stats().canary_owed else b"-"
        due = due or self.backend.broadcast_bytes(owed) == b"+"
        if self._published == 0 and self._sends_adapters:
            self._freeze(self.backend.export_frozen())
        self._published += 1
        self._hand_over(version, self._canary() if due else None)

    def _canary(self) -> Canary:
        """Log-probabilities of the canary sequence under the current weights. Collective."""
        tokens = self._canary_tokens
        mask = np.ones(len(tokens), dtype=np.uint8)
        document = Document(np.asarray(tokens, dtype=np.int32), mask, name="the canary")
        logprobs = self.backend.logprobs(build([document], [[0]]))[0]
        return Canary(tokens, logprobs[: len(tokens) - 1].tolist(), self.config.weights.canary_tolerance)
