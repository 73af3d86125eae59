"""From the groups that a step took to what it trains on.

    StoredGroup --decode--> Group (checked; what does not fit is a BadGroup, to be generated again)
                --prepare--> Prepared: documents of one step, expired tokens masked
                --assemble--> TrainingBatch: with advantages and statistics

All run on the lead rank, which sends every rank its part (learner/loop/share.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from broker.contract import StoredGroup
from common.config.loss_keys import DistillationConfig
from common.config.schema import Config
from common.evaluation import succeeds
from common.rollouts import Branch, Group, Sample, decode_group
from common.staleness import expired
from common.wire_types import Array
from learner.backend_protocol import UNKNOWN, RoutingShape
from learner.batch.dynamic_sampling import carries_signal
from learner.batch.group_rewards import check_estimates, rewards_of, rewards_of_tokens
from learner.batch.packing import Document
from learner.loss.advantages import ADVANTAGES
from learner.loss.plugins import part

ARRAY_DTYPES = {"tokens": "int32", "loss_mask": "uint8", "behavior_logprobs": "float32"}
TRUNCATED = {"length", "turn_limit"}
ROUTING_ROWS = 1 << 15  # checked at once: they stay in the processor's cache
CUT = "length"  # stop reason of an answer that the token limit or the context cut


class BadGroup(Exception):
    def __init__(self, serial: int, node_id: str, reason: str) -> None:
        self.serial = serial
        self.node_id = node_id
        self.reason = reason
        super().__init__(f"group {serial} from node {node_id}: {reason}")


@dataclass(frozen=True)
class SourceFigures:
    """Counts of one source's groups, filtered ones included; samples are those that did not fail."""

    groups: int = 0
    samples: int = 0
    successes: int = 0  # with tasks.sources.NAME.success or more
    truncated: int = 0
    rewards: float = 0.0  # sum


@dataclass(frozen=True)
class BatchStatistics:
    """Figures of one step's groups, filtered ones included unless said otherwise; lengths are in sampled tokens."""

    groups: int = 0  # trained on
    groups_without_signal: int = 0  # see carries_signal
    samples: int = 0
    samples_failed: int = 0
    failures: tuple[str, ...] = ()  # distinct reasons, at most three
    samples_truncated: int = 0
    tokens_failed: int = 0  # sampled in failed samples of groups that are trained on
    tokens_cut: int = 0  # left out of the loss by tasks.truncated: masked, and not expired
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
    kv_cache_age_mean: float = 0.0  # see cache_ages, over trained tokens
    kv_cache_age_max: int = 0
    teacher_s: float = 0.0  # mean over samples
    sources: dict[str, SourceFigures] = field(default_factory=dict[str, SourceFigures])  # {} in a job of one
    tokens_unused: int = 0  # in no update's loss, because of staleness.max_updates or kl_stop; known after training


@dataclass(frozen=True)
class TrainingBatch:
    step: int
    documents: list[Document]  # paths with at least one loss token, in order of serial, sample and path
    statistics: BatchStatistics  # figures of all groups, failed and expired ones included
    updates: int = 0  # made of it; known after training
    filtered: frozenset[int] = frozenset()  # serials of groups that learner.dynamic_sampling left out


def decode(
    stored: StoredGroup,
    vocab_size: int,
    group_size: int,
    routing: RoutingShape | None = None,
    distillation: DistillationConfig | None = None,
) -> Group:
    """Decode one group; raises BadGroup on everything that would crash or poison training.

    It is refused when it does not decode, belongs to another task or has another number of samples than `group_size`.
    A sample must not have token ids outside the vocabulary, numbers that are not finite, or, unless `routing` is None,
    the routing of another model. With `distillation` it has what the loss reads of the teacher.
    """
    try:
        group = decode_group(stored.payload)
        if group.serial != stored.serial:
            raise ValueError(f"payload belongs to task {group.serial}")
        if group.source != stored.source:
            raise ValueError(f"played as of the source {group.source!r}, the task is of {stored.source!r}")
        if len(group.samples) != group_size:
            raise ValueError(f"{len(group.samples)} samples, expected {group_size}")
        for i, sample in enumerate(group.samples):
            if sample.error is None and not np.isfinite([sample.reward, *sample.turn_rewards]).all():
                raise ValueError(f"sample {i}: reward {sample.reward} of turns {sample.turn_rewards}")
            for path in sample.paths if sample.error is None else ():
                _check_path(path, i, vocab_size)
                if routing is not None:
                    _check_routing(path, i, routing)
                if distillation is not None and (wrong := _untaught(path, vocab_size, distillation.wanted)):
                    raise ValueError(f"sample {i}: {wrong}")
    except ValueError as error:
        raise BadGroup(stored.serial, stored.node_id, str(error)) from None
    return group


def _check_path(sample: Sample | Branch, index: int, vocab_size: int) -> None:
    """Raise ValueError on what decode_group does not see."""
    for name, dtype in ARRAY_DTYPES.items():
        if (found := getattr(sample, name).dtype) != dtype:
            raise ValueError(f"sample {index}: {name} is {found}, expected {dtype}")
    tokens = sample.tokens.numpy()
    mask = sample.loss_mask.numpy() > 0
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"sample {index}: token ids outside 0..{vocab_size - 1}")
    finite = np.isfinite(sample.behavior_logprobs.numpy())
    if not finite.all() and not finite[mask].all():
        raise ValueError(f"sample {index}: behavior_logprobs of sampled tokens are not finite")


def _untaught(path: Sample | Branch, vocab_size: int, top_k: int) -> str:
    """The fault of a path's columns from its teacher, whose lengths are right; '' when there is none.

    A teacher is not asked about a path without sampled tokens, such as a frozen sub-agent's.
    """
    if path.teacher_logprobs is None and not path.sampled:
        return ""
    columns = {"teacher_logprobs": "float32"}
    columns |= {"teacher_top_ids": "int32", "teacher_top_logprobs": "float32"} if top_k else {}
    for name, dtype in columns.items():
        column: Array | None = getattr(path, name)
        if column is None or column.dtype != dtype:
            return f"{name} is {column and column.dtype}, expected {dtype}"
        if not np.isfinite(column.numpy()).all():
            return f"{name} is not finite"
    if not top_k or path.teacher_top_ids is None:
        return ""
    ids = path.teacher_top_ids.numpy()
    expected = top_k * path.sampled
    if len(ids) != expected:
        return f"{len(ids)} tokens of the teacher, expected {expected}"
    known = not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < vocab_size
    return "" if known else f"teacher_top_ids outside 0..{vocab_size - 1}"


def _check_routing(sample: Sample | Branch, index: int, shape: RoutingShape) -> None:
    """Raise ValueError when the experts that the engine used cannot be those of this model."""
    if sample.routed_experts is None:
        raise ValueError(f"sample {index}: no routed experts, which learner.moe.replay_routing needs of every node")
    experts = sample.routed_experts.numpy()
    tokens = len(sample.tokens.numpy())
    found = f"{sample.routed_experts.dtype} {len(experts)}"
    expected = tokens * shape.layers * shape.chosen
    if found != f"int16 {expected}":
        raise ValueError(
            f"sample {index}: routed experts are {found}, expected int16 {expected} "
            f"({tokens} tokens x {shape.layers} layers x {shape.chosen})"
        )
    if len(experts) and not -1 <= int(experts.min()) <= int(experts.max()) < shape.experts:
        raise ValueError(f"sample {index}: routed experts outside -1..{shape.experts - 1}")
    rows = experts.astype(shape.dtype).reshape(-1, shape.chosen)
    for start in range(0, len(rows), ROUTING_ROWS):
        columns = np.ascontiguousarray(rows[start : start + ROUTING_ROWS].T)  # [chosen, tokens x layers]
        unknown = columns == UNKNOWN[shape.dtype]
        wrong = np.zeros(columns.shape[1], dtype=bool)
        for i in range(1, shape.chosen):  # comparing pairs takes a third of the time of sorting
            wrong |= (columns[i] == columns[:i]).any(0)
        wrong &= ~unknown[0]
        wrong |= unknown.any(0) != unknown.all(0)
        if wrong.any():
            found = experts.reshape(-1, shape.chosen)[start + wrong.argmax()].tolist()
            raise ValueError(
                f"sample {index}: routed experts {found} of one token and layer are not {shape.chosen} distinct ones"
            )


def prepare(group: Group, step: int, jobs: Mapping[str, Config], routing: RoutingShape | None) -> "Prepared":
    """The group's part in a batch of `step`, without advantages. `jobs`: Config.sources; `routing` as in `assemble`."""
    job = jobs[group.source]
    place = {"serial": group.serial, "kl_coefficient": None if "" in jobs else job.learner.loss.kl_coefficient}
    if job.learner.dynamic_sampling and not carries_signal(group, job):
        return []  # the step trains nothing on it
    samples = [(i, _prepare(s, step, job, routing)) for i, s in enumerate(group.samples) if s.error is None]
    return [(played, [replace(d, sample=i, **place) for d in documents]) for i, (played, documents) in samples]


def assemble(
    groups: Sequence[Group], step: int, config: Config, routing: RoutingShape | None = None, ahead: "Ahead" = None
) -> TrainingBatch:
    """Advantages, staleness (counted from `step`) and expiry of one step's groups, whose order does not matter.

    `routing`: the shape of the experts to replay; None: none are. `ahead`: groups that are prepared, by serial.
    Raises HopelessError for an estimator of the advantage that gives no finite number for a sample.
    """
    kept: list[Group] = []
    filtered: list[Group] = []
    jobs = config.sources
    flat = {group.serial for group in groups if not carries_signal(group, jobs[group.source])}
    for group in sorted(groups, key=lambda g: g.serial):
        dropped = config.learner.dynamic_sampling and group.serial in flat
        (filtered if dropped else kept).append(group)
    played: list[_Played] = []
    documents: list[Document] = []
    prepared = {g.serial: (ahead or {}).get(g.serial) or prepare(g, step, jobs, routing) for g in kept}
    estimates = _advantages(kept, jobs, prepared)
    for group in kept:
        for found, made in prepared[group.serial]:
            played.append(found)
            documents += [replace(d, advantage=float(estimates[group.serial][d.sample])) for d in made]
    for group in filtered:  # trains nothing, but tells how the policy does
        whole = (s for s in group.samples if s.error is None)
        played += [_Played(s, sum(int(_sampled(path).sum()) for path in s.paths), 0, 0, 0) for s in whole]
    figures = replace(_statistics(kept, filtered, played, len(flat)), sources=_sources([*kept, *filtered], jobs))
    return TrainingBatch(step, documents, figures, filtered=frozenset(group.serial for group in filtered))


def _advantages(
    groups: Sequence[Group], jobs: Mapping[str, Config], prepared: "Mapping[int, Prepared]"
) -> dict[int, np.ndarray]:
    """[samples] of each group by its serial; every source has its estimator, over its own groups."""
    found = dict[int, np.ndarray]()
    for name, job in jobs.items():
        own = [group for group in groups if group.source == name]
        loss = job.learner.loss
        estimator = part("advantage", loss.advantage, ADVANTAGES, loss.advantage_options)
        sampled = {group.serial: [played.sampled for played, _ in prepared[group.serial]] for group in own}
        rewards = [rewards_of(group, sampled[group.serial], job.tasks.success) for group in own]
        estimates = estimator(rewards) if own else []
        if not loss.trains_on_rewards:
            estimates = [np.zeros(len(group.samples)) for group in own]
        check_estimates(estimates, rewards, f"{loss.advantage} of tasks.sources.{name}" if name else loss.advantage)
        found |= {group.serial: np.asarray(estimate) for group, estimate in zip(own, estimates, strict=True)}
    return found


def _sources(groups: Sequence[Group], jobs: Mapping[str, Config]) -> dict[str, SourceFigures]:
    found = dict[str, SourceFigures]()
    for name, job in jobs.items() if "" not in jobs else ():
        own = [group for group in groups if group.source == name]
        good = [sample for group in own for sample in group.samples if sample.error is None]
        found[name] = SourceFigures(
            groups=len(own),
            samples=len(good),
            successes=sum(succeeds(sample.reward, job.tasks.success) for sample in good),
            truncated=sum(sample.stop_reason in TRUNCATED for sample in good),
            rewards=sum(sample.reward for sample in good),
        )
    return found


@dataclass(frozen=True)
class _Played:  # a sample with an episode, over its paths or of one of them, for the statistics
    sample: Sample
    sampled: int  # tokens
    expired: int
    trained: int  # tokens in the loss
    age: int  # sum of their staleness
    age_max: int = 0  # 0 at least
    cut: int = 0  # tokens that tasks.truncated: masked leaves out
    cache_age: float = 0.0  # sum over the tokens in the loss
    cache_age_max: int = 0
    places: int = 0  # its documents have so many


Prepared = list[tuple[_Played, list[Document]]]  # a group's samples that did not fail
Ahead = Mapping[int, Prepared] | None


def _prepare(sample: Sample, step: int, config: Config, routing: RoutingShape | None) -> tuple[_Played, list[Document]]:
    """The sample for the statistics, and one document for each path that has tokens in the loss."""
    paths = [_prepare_path(sample, number, step, config, routing) for number in range(len(sample.paths))]
    parts = [part for part, _ in paths]
    documents = [document for part, document in paths if part.trained]
    whole = _Played(
        sample=sample,
        sampled=sum(part.sampled for part in parts),
        expired=sum(part.expired for part in parts),
        trained=sum(part.trained for part in parts),
        age=sum(part.age for part in parts),
        age_max=max(part.age_max for part in parts),
        cut=sum(part.cut for part in parts),
        cache_age=sum(part.cache_age for part in parts),
        cache_age_max=max(part.cache_age_max for part in parts),
        places=sum(document.places for document in documents),
    )
    return whole, documents


def _sampled(path: Sample | Branch) -> np.ndarray:
    """[T] bool, the sampled tokens that can be in the loss: no token predicts the first one."""
    sampled = path.loss_mask.numpy() > 0
    sampled[:1] = False
    return sampled


def _prepare_path(
    sample: Sample, number: int, step: int, config: Config, routing: RoutingShape | None
) -> tuple[_Played, Document]:
    """A path without its expired tokens, or without any if the sample was cut.

    A cut answer that leaves the loss stays in its group's baseline, as with TRL's `mask_truncated_completions`.
    """
    path = sample.paths[number]
    tokens = path.tokens.numpy()
    sampled = _sampled(path)
    mask = sampled.copy()
    runs = path.spans()
    too_old = expired(step, np.array([version for *_, version in runs]), config.staleness.max)
    for (start, end, _), old in zip(runs, too_old, strict=True):
        if old:
            mask[start:end] = False
    count = int(sampled.sum())
    expired_tokens = count - int(mask.sum())
    cut = 0
    if config.tasks.truncated == "masked" and sample.stop_reason == CUT:
        cut = int(mask.sum())
        mask[:] = False
    staleness = _staleness(runs, step, mask)
    cache_age_sum, cache_age_max = cache_age(path, mask, config)
    experts = None
    if routing is not None and path.routed_experts is not None:
        experts = path.routed_experts.numpy().astype(routing.dtype)
        experts = experts.reshape(len(tokens), routing.layers, routing.chosen)
    temperatures = np.zeros(len(tokens) if path.temperature_runs else 0, dtype=np.float32)
    for run in path.temperature_runs:
        temperatures[run.start :] = run.temperature
    document = Document(
        tokens=tokens,
        loss_mask=mask.view(np.uint8),
        behavior_logprobs=path.behavior_logprobs.numpy(),
        staleness=staleness.of_tokens,
        name=f"a sample of {len(tokens)} tokens",
        routed_experts=experts,
        path=number,
        **_taught(path, config.learner.loss.distillation),
        temperatures=temperatures if path.temperature_runs else None,
        rewards=None if config.learner.critic is None else rewards_of_tokens(sample, number),
    )
    played = _Played(
        sample=sample,
        sampled=count,
        expired=expired_tokens,
        trained=staleness.trained,
        age=staleness.total,
        age_max=staleness.largest,
        cut=cut,
        cache_age=cache_age_sum,
        cache_age_max=cache_age_max,
    )
    return played, document


def cache_age(path: Sample | Branch, mask: np.ndarray, config: Config) -> tuple[float, int]:
    """(sum, largest) of cache_ages over the tokens in the loss, `mask` [T] bool."""
    if config.weights.kv_cache == "recompute" or len(path.version_runs) < 2 or not mask.any():
        return 0.0, 0
    mean, largest = cache_ages(path.token_versions(), _sampled(path), kept=config.weights.kv_cache == "keep_episode")
    return float(mean @ mask), int(largest[mask].max())


class _Staleness(NamedTuple):
    of_tokens: np.ndarray  # [T] int8, int32 where that is too small
    trained: int  # tokens in the loss
    total: int  # over them
    largest: int  # 0 at least


def _staleness(runs: Sequence[tuple[int, int, int]], step: int, mask: np.ndarray) -> _Staleness:
    """Counted per run of a version; `mask` [T] bool has the tokens in the loss."""
    small = all(abs(step - version) < 128 for *_, version in runs or [(0, 0, 0)])
    of_tokens = np.full(len(mask), 0 if runs else step, dtype=np.int8 if small else np.int32)  # runs have every token
    trained = 0
    total = 0
    largest = 0
    for start, end, version in runs:
        of_tokens[start:end] = step - version
        if count := int(np.count_nonzero(mask[start:end])):
            trained += count
            total += count * (step - version)
            largest = max(largest, step - version)
    return _Staleness(of_tokens, trained, total, largest)


def _taught(path: Sample | Branch, distillation: DistillationConfig | None) -> dict[str, Any]:
    """The document's fields that the teacher gave, [L] or [L, k]; zeros where it was not asked."""
    if distillation is None or path.teacher_logprobs is None:
        return {}
    found = {"teacher_logprobs": path.teacher_logprobs.numpy()}
    sampled = path.loss_mask.numpy() > 0
    for name in ("teacher_top_ids", "teacher_top_logprobs") if distillation.wanted else ():
        rows = getattr(path, name).numpy().reshape(-1, distillation.wanted)
        found[name] = np.zeros((len(sampled), distillation.wanted), rows.dtype)
        found[name][sampled] = rows
    return found


def _statistics(
    kept: Sequence[Group], filtered: Sequence[Group], played: Sequence[_Played], without_signal: int
) -> BatchStatistics:
    failed = [s for group in (*kept, *filtered) for s in group.samples if s.error is not None]
    rewards = np.array([p.sample.reward for p in played], dtype=np.float64)
    lengths = [p.sampled for p in played]
    too_old = [p.expired for p in played]
    trained = sum(p.trained for p in played)
    count = max(len(played), 1)
    environment: dict[str, list[float]] = {}
    for group in (*kept, *filtered):
        for name, value in (item for s in group.samples if s.error is None for item in s.metrics.items()):
            environment.setdefault(f"{group.source}/{name}" if group.source else name, []).append(value)
    return BatchStatistics(
        groups=len(kept),
        groups_without_signal=without_signal,
        samples=len(played) + len(failed),
        samples_failed=len(failed),
        failures=tuple(dict.fromkeys(s.error or s.stop_reason for s in failed))[:3],
        samples_truncated=sum(p.sample.stop_reason in TRUNCATED for p in played),
        tokens_failed=sum(s.sampled_all for group in kept for s in group.samples if s.error is not None),
        tokens_cut=sum(p.cut for p in played),
        tokens_expired=sum(too_old),
        tokens_expired_by_length_decile=length_deciles(lengths, too_old),
        tokens_trained=trained,
        sequence_tokens=sum(p.places for p in played),
        reward_mean=float(rewards.mean()) if len(rewards) else 0.0,
        reward_std=float(rewards.std()) if len(rewards) else 0.0,
        staleness_mean=sum(p.age for p in played) / max(trained, 1),
        staleness_max=max((p.age_max for p in played), default=0),
        length_mean=sum(lengths) / count,
        length_max=max(lengths, default=0),
        turns_mean=sum(p.sample.turns for p in played) / count,
        environment={name: float(np.mean(values)) for name, values in sorted(environment.items())},
        groups_filtered=len(filtered),
        samples_mixed=sum(len({r.version for path in p.sample.paths for r in path.version_runs}) > 1 for p in played),
        failed_by_reason=dict(sorted(Counter(s.stop_reason for s in failed).items())),
        kv_cache_age_mean=sum(p.cache_age for p in played) / max(trained, 1),
        kv_cache_age_max=max((p.cache_age_max for p in played), default=0),
        teacher_s=sum(p.sample.teacher_s for p in played) / count,
    )


def cache_ages(versions: np.ndarray, sampled: np.ndarray, kept: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """For every token [T], (mean, largest) age of the KV cache that it was sampled over; 0 where nothing was sampled.

    A call of the model begins with keys and values of its own version only. Prefix caches are salted by version and
    checked again when the request enters the engine. With `weights.kv_cache: keep` a call in flight keeps its keys and
    values over a flip, so later tokens depend on older ones. With `recompute` they are computed again; every age is 0.
    `kept`: with `keep_episode` a call also begins with those of the calls before it.

    The age of an entry is the version that sampled the token - the version that computed the entry. Entry p of a
    call is computed when token p + 1 is sampled, those of its prompt when its first token is. A request that the
    engine preempted and computed anew counts as if it had not been: the ages are upper bounds. `versions` has the
    version of every token; `sampled` is false for the first one, since nothing came before it.
    """
    mean = np.zeros(len(versions))
    largest = np.zeros(len(versions), np.int64)
    if kept and sampled.any():
        ends = np.flatnonzero(sampled)  # entry p is computed when the first token after p is sampled
        computed = versions[ends[np.searchsorted(ends, np.arange(ends[-1]), side="right")]]
        mean[ends] = versions[ends] - np.cumsum(computed)[ends - 1] / ends
        largest[ends] = versions[ends] - np.minimum.accumulate(computed)[ends - 1]
        return np.maximum(mean, 0), np.maximum(largest, 0)
    edges = [*(np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist(), len(versions)]
    for start, end in zip(edges[::2], edges[1::2], strict=False):  # a call may end with the sample
        own = versions[start:end]
        total = np.cumsum(own) + (start - 1) * own[0]  # over the `start` to `end` entries that the tokens attended to
        mean[start:end] = own - total / np.arange(start, end)
        largest[start:end] = own - np.minimum.accumulate(own)
    return np.maximum(mean, 0), largest


def length_deciles(lengths: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Sum `counts` by decile of `lengths`: ten numbers, the shortest tenth of the samples first.

    Samples are ranked by length, ties in order; rank r of n falls into decile floor(10 r / n).
    """
    out = np.zeros(10, dtype=np.int64)
    ranks = np.argsort(np.argsort(np.asarray(lengths), kind="stable"), kind="stable")
    np.add.at(out, ranks * 10 // max(len(ranks), 1), np.asarray(counts, dtype=np.int64))
    return tuple(int(n) for n in out)
