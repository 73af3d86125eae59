"""From the groups that a step took to what it trains on.

    StoredGroup --decode--> Group (checked; what does not fit is a BadGroup, to be generated again)
                --assemble--> TrainingBatch: documents with advantages, expired tokens masked, statistics

Both run on every rank from the same bytes, so every rank has the same batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from broker.contract import StoredGroup
from common.config.schema import Config
from common.rollouts import Group, Sample, decode_group
from common.staleness import expired, staleness
from learner.backend_protocol import RoutingShape
from learner.batch.dynamic_sampling import carries_signal
from learner.batch.kv_age import cache_ages
from learner.batch.packing import Document
from learner.loss.advantages import ADVANTAGES, GroupRewards

ARRAY_DTYPES = {"tokens": "int32", "loss_mask": "uint8", "behavior_logprobs": "float32"}
TRUNCATED = {"length", "turn_limit"}


class BadGroup(Exception):
    """A group that cannot be trained on, with the reason."""

    def __init__(self, serial: int, node_id: str, reason: str) -> None:
        self.serial, self.node_id, self.reason = serial, node_id, reason
        super().__init__(f"group {serial} from node {node_id}: {reason}")


@dataclass(frozen=True)
class BatchStatistics:
    """Figures of one step's groups, filtered ones included unless said otherwise; lengths are in sampled tokens."""

    groups: int = 0  # trained on
    groups_without_signal: int = 0  # all rewards equal
    samples: int = 0
    samples_failed: int = 0
    failures: tuple[str, ...] = ()  # distinct reasons, at most three
    samples_truncated: int = 0
    tokens_failed: int = 0  # sampled in failed samples of groups that are trained on
    tokens_expired: int = 0
    tokens_expired_by_length_decile: tuple[int, ...] = ()
    tokens_trained: int = 0
    sequence_tokens: int = 0
    reward_mean: float = 0.0
    reward_std: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    length_mean: float = 0.0
    length_max: int = 0
    turns_mean: float = 0.0
    environment: dict[str, float] = field(default_factory=dict)
    groups_filtered: int = 0  # by learner.dynamic_sampling
    samples_mixed: int = 0  # sampled by more than one policy version
    failed_by_reason: dict[str, int] = field(default_factory=dict)  # stop reason of failed samples to their number
    kv_cache_age_mean: float = 0.0  # learner/batch/kv_age.py, over trained tokens
    kv_cache_age_max: int = 0


@dataclass(frozen=True)
class TrainingBatch:
    """The documents of one optimizer step.

    Attributes:
        documents: samples with at least one loss token, in order of serial and sample.
        statistics: figures of all groups, failed and expired ones included.
    """

    step: int
    documents: list[Document]
    statistics: BatchStatistics


def decode(stored: StoredGroup, vocab_size: int, group_size: int, routing: RoutingShape | None = None) -> Group:
    """Decode and check one group: everything that would crash or poison training is refused here.

    Args:
        stored: as taken from the broker.
        vocab_size: token ids are below it.
        group_size: samples that a group has.
        routing: the shape of every sample's routing; None: it is not checked.

    Raises:
        BadGroup: it does not decode, belongs to another task or has the wrong number of samples. Or a sample has
            token ids outside the vocabulary, numbers that are not finite, or the routing of another model.
    """
    try:
        group = decode_group(stored.payload)
        if group.serial != stored.serial:
            raise ValueError(f"payload belongs to task {group.serial}")
        if len(group.samples) != group_size:
            raise ValueError(f"{len(group.samples)} samples, expected {group_size}")
        for i, sample in enumerate(group.samples):
            if sample.error is None:
                _check_sample(sample, i, vocab_size)
                if routing is not None:
                    _check_routing(sample, i, routing)
    except ValueError as error:
        raise BadGroup(stored.serial, stored.node_id, str(error)) from None
    return group


def _check_sample(sample: Sample, index: int, vocab_size: int) -> None:
    """Raise ValueError on what decode_group does not see."""
    for name, dtype in ARRAY_DTYPES.items():
        if (found := getattr(sample, name).dtype) != dtype:
            raise ValueError(f"sample {index}: {name} is {found}, expected {dtype}")
    tokens, mask = sample.tokens.numpy(), sample.loss_mask.numpy() > 0
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"sample {index}: token ids outside 0..{vocab_size - 1}")
    if not np.isfinite(sample.behavior_logprobs.numpy()[mask]).all():
        raise ValueError(f"sample {index}: behavior_logprobs of sampled tokens are not finite")
    if not np.isfinite(sample.reward):
        raise ValueError(f"sample {index}: reward {sample.reward}")


def _check_routing(sample: Sample, index: int, shape: RoutingShape) -> None:
    """Raise ValueError when the experts that the engine used cannot be those of this model."""
    if sample.routed_experts is None:
        raise ValueError(f"sample {index}: no routed experts, which learner.moe.replay_routing needs of every node")
    experts, tokens = sample.routed_experts.numpy(), len(sample.tokens.numpy())
    found, expected = f"{sample.routed_experts.dtype} {len(experts)}", tokens * shape.layers * shape.chosen
    if found != f"int16 {expected}":
        raise ValueError(
            f"sample {index}: routed experts are {found}, expected int16 {expected} "
            f"({tokens} tokens x {shape.layers} layers x {shape.chosen})"
        )
    if len(experts) and not -1 <= int(experts.min()) <= int(experts.max()) < shape.experts:
        raise ValueError(f"sample {index}: routed experts outside -1..{shape.experts - 1}")
    columns = np.ascontiguousarray(experts.reshape(-1, shape.chosen).T)  # [chosen, tokens x layers]
    if (wrong := _impossible(columns)).any():
        raise ValueError(
            f"sample {index}: routed experts {columns[:, wrong.argmax()].tolist()} of one token and layer are not "
            f"{shape.chosen} distinct ones"
        )


def _impossible(columns: np.ndarray) -> np.ndarray:
    """[n] bool, where [chosen, n] experts are neither all unknown nor all different: fewer would get the token."""
    known = columns >= 0
    wrong = known.any(0) & ~known.all(0)
    for i, column in enumerate(columns):  # comparing pairs takes a third of the time of sorting
        for other in columns[:i]:
            wrong |= (column == other) & known[0]
    return wrong


def expired_groups(groups: Sequence[Group], step: int, max_staleness: int) -> list[int]:
    """Serials of the groups with any sampled token older than `max_staleness` at `step`."""
    return [
        group.serial
        for group in groups
        if any(
            (expired(step, s.token_versions(), max_staleness) & (s.loss_mask.numpy() > 0)).any()
            for s in group.samples
            if s.error is None
        )
    ]


def assemble(groups: Sequence[Group], step: int, config: Config, routing: RoutingShape | None = None) -> TrainingBatch:
    """Advantages, staleness and expiry of one step's groups.

    Args:
        groups: in any order; the batch does not depend on it.
        step: the step that trains; staleness is counted from it.
        config: `learner.loss.advantage`, `learner.dynamic_sampling`, `staleness.max` and `weights.kv_cache` are read.
        routing: the shape of the experts to replay, as in `decode`.
    """
    everything = sorted(groups, key=lambda g: g.serial)
    ordered = [g for g in everything if not config.learner.dynamic_sampling or carries_signal(g)]
    rewards = [_rewards(group) for group in ordered]
    tally = _Tally()
    documents: list[Document] = []
    for group, found, advantages in zip(
        ordered, rewards, ADVANTAGES[config.learner.loss.advantage](rewards), strict=True
    ):
        tally.group(found.rewards[found.valid])
        for i, sample in enumerate(group.samples):
            if sample.error is not None:
                tally.failed(sample)
                continue
            document = _document(sample, step, config.staleness.max, float(advantages[i]), tally)
            if document is not None and config.weights.kv_cache == "keep":
                tally.cache(sample, document.loss_mask)
            if document is not None:
                documents.append(document if routing is None else _routed(document, sample, routing))
    for group in everything:
        if config.learner.dynamic_sampling and not carries_signal(group):
            tally.filtered(group)
    return TrainingBatch(step, documents, tally.statistics())


def _rewards(group: Group) -> GroupRewards:
    valid = np.array([s.error is None for s in group.samples], dtype=bool)
    return GroupRewards(
        np.array([s.reward if s.error is None else 0.0 for s in group.samples], dtype=np.float64), valid
    )


def _document(sample: Sample, step: int, max_staleness: int, advantage: float, tally: "_Tally") -> Document | None:
    """The sample without its expired tokens in the loss; None when no loss token is left."""
    versions = sample.token_versions()
    sampled = sample.loss_mask.numpy() > 0
    if len(sampled):
        sampled[0] = False  # no token predicts it
    too_old = expired(step, versions, max_staleness) & sampled
    age = staleness(step, versions).astype(np.int32)
    mask = sampled & ~too_old
    tally.sample(sample, int(sampled.sum()), int(too_old.sum()), age[mask])
    if not mask.any():
        return None
    return Document(
        tokens=sample.tokens.numpy(),
        loss_mask=mask.astype(np.uint8),
        behavior_logprobs=sample.behavior_logprobs.numpy(),
        staleness=age,
        advantage=advantage,
        name=f"a sample of {len(versions)} tokens",
    )


def _routed(document: Document, sample: Sample, shape: RoutingShape) -> Document:
    """`document` with the experts that the engine used."""
    if sample.routed_experts is None:
        return document
    experts = sample.routed_experts.numpy().reshape(len(document.tokens), shape.layers, shape.chosen)
    return replace(document, routed_experts=experts)


class _Tally:
    """Counts while a batch is assembled."""

    def __init__(self) -> None:
        self._rewards: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._expired: list[int] = []
        self._turns = 0
        self._truncated = 0
        self._sequence = 0
        self._mixed = 0
        self._failures: list[str] = []
        self._reasons: dict[str, int] = {}
        self._failed_tokens = 0
        self._ages: list[np.ndarray] = []
        self._environment: dict[str, list[float]] = {}
        self._filtered_groups = 0
        self._cache_age, self._cache_age_max = 0.0, 0

    def group(self, rewards: np.ndarray) -> None:
        self._rewards.append(rewards)

    def filtered(self, group: Group) -> None:
        """A group that trains nothing, but tells how the policy does."""
        self._filtered_groups += 1
        self.group(np.array([s.reward for s in group.samples if s.error is None], dtype=np.float64))
        for sample in group.samples:
            if sample.error is not None:
                self.failed(sample, trained=False)
                continue
            sampled = int((sample.loss_mask.numpy()[1:] > 0).sum())
            self.sample(sample, sampled, 0, np.zeros(0, dtype=np.int32))

    def failed(self, sample: Sample, trained: bool = True) -> None:
        """A sample without an episode; the tokens of a group that is not trained on are the broker's to count."""
        self._failures.append(sample.error or sample.stop_reason)
        self._reasons[sample.stop_reason] = self._reasons.get(sample.stop_reason, 0) + 1
        self._failed_tokens += int((sample.loss_mask.numpy() > 0).sum()) if trained else 0

    def sample(self, sample: Sample, sampled: int, too_old: int, ages: np.ndarray) -> None:
        self._lengths.append(sampled)
        self._expired.append(too_old)
        self._turns += sample.turns
        self._truncated += sample.stop_reason in TRUNCATED
        self._mixed += len({run.version for run in sample.version_runs}) > 1
        self._ages.append(ages)
        if len(ages):
            self._sequence += len(sample.tokens.numpy()) - 1
        for name, value in sample.metrics.items():
            self._environment.setdefault(name, []).append(value)

    def cache(self, sample: Sample, loss_mask: np.ndarray) -> None:
        """Ages of the KV cache behind the tokens of `loss_mask`."""
        mean, largest = cache_ages(sample)
        self._cache_age += float(mean @ loss_mask)
        self._cache_age_max = max(self._cache_age_max, int((largest * loss_mask).max(initial=0)))

    def statistics(self) -> BatchStatistics:
        rewards = np.concatenate([np.zeros(0), *self._rewards])
        ages = np.concatenate([np.zeros(0, dtype=np.int32), *self._ages])
        kept = max(len(self._lengths), 1)
        return BatchStatistics(
            groups=len(self._rewards) - self._filtered_groups,
            groups_without_signal=sum(len(r) < 2 or bool((r == r[0]).all()) for r in self._rewards),
            samples=len(self._lengths) + len(self._failures),
            samples_failed=len(self._failures),
            failures=tuple(dict.fromkeys(self._failures))[:3],
            samples_truncated=self._truncated,
            tokens_failed=self._failed_tokens,
            tokens_expired=sum(self._expired),
            tokens_expired_by_length_decile=length_deciles(self._lengths, self._expired),
            tokens_trained=len(ages),
            sequence_tokens=self._sequence,
            reward_mean=float(rewards.mean()) if len(rewards) else 0.0,
            reward_std=float(rewards.std()) if len(rewards) else 0.0,
            staleness_mean=float(ages.mean()) if len(ages) else 0.0,
            staleness_max=int(ages.max()) if len(ages) else 0,
            length_mean=sum(self._lengths) / kept,
            length_max=max(self._lengths, default=0),
            turns_mean=self._turns / kept,
            environment={name: float(np.mean(values)) for name, values in sorted(self._environment.items())},
            groups_filtered=self._filtered_groups,
            samples_mixed=self._mixed,
            failed_by_reason=dict(sorted(self._reasons.items())),
            kv_cache_age_mean=self._cache_age / max(len(ages), 1),
            kv_cache_age_max=self._cache_age_max,
        )


def length_deciles(lengths: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Sum `counts` by decile of `lengths`: ten numbers, the shortest tenth of the samples first.

    Samples are ranked by length, ties in order; rank r of n falls into decile floor(10 r / n). A count that is spread
    evenly over samples gives ten like numbers. One that concerns long samples gives a rising row.
    """
    out = np.zeros(10, dtype=np.int64)
    ranks = np.argsort(np.argsort(np.asarray(lengths), kind="stable"), kind="stable")
    np.add.at(out, ranks * 10 // max(len(ranks), 1), np.asarray(counts, dtype=np.int64))
    return tuple(int(n) for n in out)
