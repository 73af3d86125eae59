"""The metrics of a run: one declaration per metric, one JSON line per step in RUN/metrics.jsonl.

A metric is a field of StepMetrics, SftMetrics or EvaluationMetrics with its unit, its reduction over several steps, and
its meaning. A panel says how metrics are drawn. Writer, reader, page, report and trackers use these declarations.
Fields are only ever appended. An appended number is UNSET on the lines of earlier releases.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, cast, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

Reduction = Literal["mean", "sum", "max", "last"]
OptFloat = float | UnsetType
OptInt = int | UnsetType
AGE_CLASSES = (0, 1, 2, 3, 5, 9)  # the lowest staleness of each class
AGE_NAMES = ("0", "1", "2", "3-4", "5-8", "9 and more")


def metric(description: str, unit: str = "", reduction: Reduction = "mean") -> Meta:
    """Declare one metric: `unit` as written on a plot's axis, `reduction` over steps."""
    return Meta(description=description, extra={"unit": unit, "reduction": reduction})


class Declaration(msgspec.Struct, frozen=True):
    name: str
    unit: str
    reduction: Reduction
    description: str


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a reinforcement-learning job. 'Tokens' are sampled tokens unless said otherwise.

    With several updates, means per trained token are over the tokens of every update.
    """

    step: Annotated[int, metric("steps done before this one", "", "last")]
    policy_version: Annotated[int, metric("version that this step produced: step + 1", "", "last")]
    time_s: Annotated[float, metric("Unix time at the end of the step", "s", "last")]
    elapsed_s: Annotated[OptFloat, metric("since this learner process began to train", "s", "last")] = UNSET
    incarnation: Annotated[OptInt, metric("which start of the learner wrote this line, from 0", "", "last")] = UNSET

    reward_mean: Annotated[float, metric("over samples that did not fail")]
    reward_std: Annotated[float, metric("over samples that did not fail")]
    loss: Annotated[float, metric("the minimised loss, averaged as learner.loss.reduction says")]
    grad_norm: Annotated[float, metric("norm of all gradients, before clipping; mean over the updates")]
    lr: Annotated[OptFloat, metric("learning rate of the last update", "", "last")] = UNSET
    entropy: Annotated[float, metric("entropy of the next token, per trained token", "nat")]
    ratio_mean: Annotated[float, metric("exp(logprobs - behavior_logprobs) per trained token")]
    ratio_max: Annotated[float, metric("largest such ratio", "", "max")]
    ratio_p1: Annotated[OptFloat, metric("1 % of trained tokens have no larger ratio; log-ratios to 4 %")] = UNSET
    ratio_p50: Annotated[OptFloat, metric("half of trained tokens have no larger ratio")] = UNSET
    ratio_p99: Annotated[OptFloat, metric("99 % of trained tokens have no larger ratio")] = UNSET
    correction_clip_fraction: Annotated[float, metric("trained tokens whose weight was truncated")]
    correction_masked_fraction: Annotated[OptFloat, metric("trained tokens whose weight was out of bounds: 0")] = UNSET
    veto_fraction: Annotated[OptFloat, metric("trained tokens in samples that correction_veto left out")] = UNSET
    effective_sample_fraction: Annotated[
        OptFloat, metric("Kish's effective sample size, per trained token: of the ratios where nothing corrects them")
    ] = UNSET
    objective_clip_fraction: Annotated[OptFloat, metric("trained tokens in the clipped branch")] = UNSET
    mismatch_abs_mean: Annotated[
        float,
        metric(
            "|learner's - sampler's log-probability| per token of the version that trains: only arithmetic differs. "
            "A step without such tokens takes all trained tokens, and policy drift is included",
            "nat",
        ),
    ]
    drift_abs_mean: Annotated[OptFloat, metric("the same over all trained tokens", "nat")] = UNSET
    mismatch_by_age: Annotated[list[float], metric("the same by staleness: 0, 1, 2, 3-4, 5-8, 9 and more", "nat")] = []
    tokens_by_age: Annotated[list[int], metric("trained tokens of those classes of staleness", "tokens", "sum")] = []
    kl_mean: Annotated[OptFloat, metric("divergence from the reference per trained token; 0 if none", "nat")] = UNSET
    advantage_zero_fraction: Annotated[OptFloat, metric("groups without signal; docs/algorithms.md")] = UNSET

    staleness_mean: Annotated[float, metric("step - version, per trained token", "steps")]
    staleness_max: Annotated[int, metric("largest over trained tokens", "steps", "max")]
    tokens_expired: Annotated[int, metric("left out of the loss because older than staleness.max", "tokens", "sum")]
    tokens_expired_by_length_decile: Annotated[list[int], metric("by length, shortest first", "tokens", "sum")] = []
    groups_regenerated: Annotated[OptInt, metric("given back by it to be generated again", "groups", "sum")] = UNSET
    tokens_regenerated_by_length_decile: Annotated[list[int], metric("too old in them", "tokens", "sum")] = []

    groups: Annotated[int, metric("trained on", "groups", "sum")]
    samples: Annotated[OptInt, metric("in those groups and in filtered ones", "samples", "sum")] = UNSET
    samples_failed: Annotated[OptInt, metric("samples without a usable episode", "samples", "sum")] = UNSET
    tokens_trained: Annotated[int, metric("in the loss", "tokens", "sum")]
    sequence_tokens: Annotated[OptInt, metric("processed, with prompts and environment text", "tokens", "sum")] = UNSET
    length_mean: Annotated[OptFloat, metric("sampled tokens per sample", "tokens")] = UNSET
    length_max: Annotated[OptInt, metric("sampled tokens of the longest sample", "tokens", "max")] = UNSET
    turns_mean: Annotated[OptFloat, metric("generate calls per sample")] = UNSET
    truncated_fraction: Annotated[OptFloat, metric("samples cut at the token or turn limit")] = UNSET
    microbatches: Annotated[OptInt, metric("per data-parallel rank, in all updates", "", "sum")] = UNSET
    environment: Annotated[dict[str, float], metric("the environment's own numbers, per sample")] = {}

    step_s: Annotated[float, metric("from the end of the step before to the end of this one", "s")]
    learner_idle_s: Annotated[float, metric("part of step_s: waiting for groups; near 0 if they are ready", "s")]
    train_s: Annotated[OptFloat, metric("part of step_s: forward, backward and optimizer", "s")] = UNSET
    batch_s: Annotated[OptFloat, metric("part of step_s: decoding, advantages and packing", "s")] = UNSET
    snapshot_s: Annotated[OptFloat, metric("part of step_s: exporting the weights to the publisher", "s")] = UNSET
    checkpoint_s: Annotated[OptFloat, metric("part of step_s: writing a checkpoint", "s")] = UNSET
    publish_s: Annotated[float, metric("newest finished publish, until every node had staged it", "s")]
    publish_bytes: Annotated[int, metric("sent by it, over all nodes", "bytes")]
    seconds_to_active: Annotated[OptFloat, metric("from snapshot until every node generated with it", "s")] = UNSET
    canary_max_difference: Annotated[OptFloat, metric("newest canary: largest |learner - engine|", "nat", "max")] = (
        UNSET
    )
    generation_stall_s: Annotated[float, metric("nodes' generation paused for flips during this step", "s", "sum")]

    tokens_generated_total: Annotated[int, metric("by all nodes since the broker's store was made", "tokens", "last")]
    tokens_trained_total: Annotated[int, metric("in the loss since step 0", "tokens", "last")]
    tokens_wasted_total: Annotated[int, metric("generated and not trained on; docs/waste.md", "tokens", "last")]
    tokens_wasted_lost: Annotated[OptInt, metric("results after their lease was lost", "tokens", "last")] = UNSET
    tokens_wasted_failed: Annotated[OptInt, metric("failed groups and failed samples", "tokens", "last")] = UNSET
    tokens_wasted_filtered: Annotated[OptInt, metric("groups without signal", "tokens", "last")] = UNSET
    tokens_wasted_regenerated: Annotated[OptInt, metric("groups that a step gave back", "tokens", "last")] = UNSET
    tokens_wasted_masked: Annotated[OptInt, metric("too old in training, or of cut answers", "tokens", "last")] = UNSET
    tokens_wasted_cancelled: Annotated[OptInt, metric("cancelled groups and requests", "tokens", "last")] = UNSET
    seconds_wasted_lost: Annotated[OptFloat, metric("group-seconds of leases that were lost", "s", "last")] = UNSET
    seconds_wasted_failed: Annotated[OptFloat, metric("group-seconds of failed groups", "s", "last")] = UNSET
    seconds_wasted_filtered: Annotated[OptFloat, metric("group-seconds of filtered groups", "s", "last")] = UNSET
    seconds_wasted_regenerated: Annotated[OptFloat, metric("group-seconds of groups given back", "s", "last")] = UNSET
    seconds_wasted_cancelled: Annotated[OptFloat, metric("group-seconds of groups ended half-way", "s", "last")] = UNSET
    seconds_wasted_stalled: Annotated[OptFloat, metric("node-seconds of pauses for flips", "s", "last")] = UNSET
    seconds_wasted_waiting: Annotated[OptFloat, metric("node-seconds without tasks or weights", "s", "last")] = UNSET
    groups_ready: Annotated[int, metric("waiting in the broker after this step's were taken", "groups", "last")]
    groups_leased: Annotated[int, metric("being generated", "groups", "last")]
    nodes_live: Annotated[int, metric("nodes with a recent heartbeat", "nodes", "last")]
    groups_filtered: Annotated[OptInt, metric("without signal, others taken instead", "groups", "sum")] = UNSET
    routing_mismatch_fraction: Annotated[OptFloat, metric("routings that the learner would not choose")] = UNSET
    mixed_version_fraction: Annotated[OptFloat, metric("samples with tokens of more than one version")] = UNSET
    samples_failed_by_reason: Annotated[
        dict[str, int], metric("by stop reason; docs/environments.md", "samples", "sum")
    ] = {}
    kv_cache_age_mean: Annotated[OptFloat, metric("trained token's version - mean of its KV cache", "versions")] = UNSET
    kv_cache_age_max: Annotated[OptInt, metric("the same of the oldest entry of any token", "versions", "max")] = UNSET
    concurrency: Annotated[OptInt, metric("that the living nodes run at once at most", "episodes", "last")] = UNSET
    episodes_running: Annotated[OptInt, metric("that they ran", "episodes", "last")] = UNSET
    kv_cache_usage: Annotated[OptFloat, metric("fullest engine; 0 unless concurrency is auto", "", "max")] = UNSET
    preemptions_total: Annotated[OptInt, metric("put back, KV cache full; 0 likewise", "requests", "last")] = UNSET
    transcripts_dropped_total: Annotated[
        OptInt, metric("not written: disk or queue full, or no text; since learner and broker started", "", "last")
    ] = UNSET
    sources: Annotated[dict[str, float], metric("figures of tasks.sources by SOURCE/NAME; docs/mixtures.md")] = {}
    teacher_kl_mean: Annotated[OptFloat, metric("learner's - teacher's log-probability; 0 if none", "nat")] = UNSET
    teacher_tail_mean: Annotated[OptFloat, metric("teacher's probability beyond its top_k; 0 if none")] = UNSET
    teacher_s: Annotated[OptFloat, metric("from a sample's end to its teacher's answer; 0 if none", "s")] = UNSET
    updates: Annotated[OptInt, metric("optimizer updates of this step", "updates", "sum")] = UNSET
    grad_norm_max: Annotated[OptFloat, metric("grad_norm of the update with the largest", "", "max")] = UNSET
    batch_kl: Annotated[OptFloat, metric("policy of the last update from that at the batch's start", "nat")] = UNSET
    update_age_mean: Annotated[OptFloat, metric("trained token's age in updates, at most", "updates")] = UNSET
    update_age_max: Annotated[OptInt, metric("the same of the oldest trained token", "updates", "max")] = UNSET
    tokens_unused: Annotated[
        OptInt, metric("in no update's loss because of staleness.max_updates or kl_stop", "tokens", "sum")
    ] = UNSET
    # unset without learner.critic
    value_loss: Annotated[OptFloat, metric("critic's loss: half the squared error per trained token")] = UNSET
    value_grad_norm: Annotated[OptFloat, metric("norm of its gradients, before clipping; mean over updates")] = UNSET
    value_lr: Annotated[OptFloat, metric("its learning rate in the last update", "", "last")] = UNSET
    value_clip_fraction: Annotated[OptFloat, metric("trained tokens whose value learner.critic.value_clip bounds")] = (
        UNSET
    )
    value_explained: Annotated[OptFloat, metric("share of the returns' variance that values explained before")] = UNSET
    return_mean: Annotated[OptFloat, metric("the critic's target per trained token, or turn")] = UNSET


class EvaluationMetrics(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="evaluation"):
    """One version on one held-out dataset. The bounds are those of 95 % intervals; docs/evaluation.md."""

    step: Annotated[int, metric("optimizer steps done before it: policy_version", "", "last")]
    policy_version: Annotated[int, metric("the version that sampled every token", "", "last")]
    time_s: Annotated[float, metric("Unix time at which the last result was stored", "s", "last")]
    incarnation: Annotated[OptInt, metric("which start of the learner wrote this line, from 0", "", "last")] = UNSET
    dataset: Annotated[str, metric("the dataset's folder and name", "", "last")]
    problems: Annotated[int, metric("held-out problems", "problems", "last")]
    samples: Annotated[int, metric("episodes per problem", "samples", "last")]
    temperature: Annotated[float, metric("that they were sampled at; 0 is greedy", "", "last")]
    failed: Annotated[int, metric("failed episodes: 0 in the means, or left out without a score", "samples", "last")]
    mean_reward: Annotated[float, metric("over all episodes", "", "last")]
    mean_reward_low: Annotated[float | None, metric("its lower bound; unset for a single problem", "", "last")]
    mean_reward_high: Annotated[float | None, metric("its upper bound", "", "last")]
    pass_at: Annotated[
        dict[str, float], metric("by k: one of k samples has tasks.success as reward or more", "", "last")
    ]
    pass_at_low: Annotated[dict[str, float], metric("lower bounds", "", "last")]
    pass_at_high: Annotated[dict[str, float], metric("upper bounds", "", "last")]
    truncated_fraction: Annotated[float, metric("episodes cut at the token limit", "", "last")]
    length_mean: Annotated[float, metric("sampled tokens per episode", "tokens", "last")]
    tokens: Annotated[int, metric("sampled; in no figure of the training", "tokens", "last")]
    seconds: Annotated[float, metric("in which at least one episode ran", "s", "last")]
    held_s: Annotated[OptFloat, metric("publishes waited for the round; 0 if a pool played it", "s", "last")] = UNSET
    digest: Annotated[str, metric("the same on lines of the same problems and sampling", "", "last")] = ""


class SftMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step of a supervised warm start."""

    step: Annotated[int, metric("optimizer steps done before this one", "", "last")]
    time_s: Annotated[float, metric("Unix time at the end of the step", "s", "last")]
    loss: Annotated[float, metric("cross-entropy per trained token", "nat")]
    grad_norm: Annotated[float, metric("norm of all gradients, before clipping")]
    lr: Annotated[float, metric("learning rate of this step", "", "last")]
    tokens_trained: Annotated[int, metric("in the loss", "tokens", "sum")]
    sequence_tokens: Annotated[int, metric("processed", "tokens", "sum")]
    step_s: Annotated[float, metric("whole step", "s")]
    # unset on the lines of other steps
    validation_loss: Annotated[OptFloat, metric("cross-entropy of held-out rows after it", "nat", "last")] = UNSET
    incarnation: Annotated[OptInt, metric("which start of the learner wrote this line, from 0", "", "last")] = UNSET


Metrics = StepMetrics | SftMetrics | EvaluationMetrics


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """Curves that share a pair of axes, on the page and in the report."""

    title: str
    unit: str = ""
    note: str = ""  # the page shows it in place of the unit
    lines: Mapping[str, str]  # metric: legend
    band: str = ""  # a metric that is half the width of the first line's band; only the page draws it
    compared: str = ""  # the metric of a report of several runs; '': the first one
    zero: bool = False  # the axis of the page includes 0
    cut: bool = False  # the page leaves out rare peaks
    logarithmic: bool = False  # in the report
    bound: bool = False  # staleness.max is a line
    evaluations: bool = False  # the page adds them as points
    live: bool = True  # whether the page has it

    @property
    def first(self) -> str:
        return self.compared or next(iter(self.lines))


# Metrics of a panel that follow from others; only the report has them.
DERIVED = ("tokens_per_s", "tokens_generated_per_s")
PANELS = (
    Panel(title="Reward", note="mean, and its band of one standard deviation", lines={"reward_mean": "mean"},
          band="reward_std", evaluations=True),
    Panel(title="Staleness of trained tokens", unit="versions", compared="staleness_mean", zero=True, bound=True,
          lines={"staleness_max": "largest", "staleness_mean": "mean"}),
    Panel(title="Seconds of a step", unit="s", zero=True, cut=True, lines={
        "step_s": "whole", "train_s": "training", "learner_idle_s": "waiting for groups", "publish_s": "publish"}),
    Panel(title="Entropy", unit="nat", lines={"entropy": "mean"}),
    Panel(title="Effective sample size", unit="share", lines={"effective_sample_fraction": "share"}),
    Panel(title="Gradient norm", zero=True, cut=True, lines={"grad_norm": "norm"}),
    Panel(title="Loss", lines={"loss": "loss"}),
    Panel(title="Sampled tokens per sample", unit="tokens", zero=True, lines={"length_mean": "mean"}),
    Panel(title="Mismatch of log-probabilities", unit="nat", zero=True, logarithmic=True,
          lines={"mismatch_abs_mean": "mean"}),
    Panel(title="Samples cut at a limit", unit="share", zero=True, lines={"truncated_fraction": "share"}),
    Panel(title="Loss of held-out rows", unit="nat per token", lines={"validation_loss": "held-out rows"}, live=False),
    Panel(title="Importance ratio, policy over sampler", logarithmic=True, live=False, lines={
        "ratio_max": "max", "ratio_p99": "99 %", "ratio_mean": "mean", "ratio_p50": "median", "ratio_p1": "1 %"}),
    Panel(title="Effect of corrections", unit="share of tokens", live=False, lines={
        "correction_clip_fraction": "weight truncated", "correction_masked_fraction": "weight out of bounds",
        "veto_fraction": "vetoed", "objective_clip_fraction": "objective clipped"}),
    Panel(title="Drift of log-probabilities", unit="nat", lines={"drift_abs_mean": "all trained tokens"},
          logarithmic=True, live=False),
    Panel(title="Divergence within a batch", unit="nat", lines={"batch_kl": "last update"}, live=False),
    Panel(title="Age of trained tokens", unit="updates", compared="update_age_mean", zero=True, live=False,
          lines={"update_age_max": "largest", "update_age_mean": "mean"}),
    Panel(title="Divergence from the reference", unit="nat", lines={"kl_mean": "divergence"}, live=False),
    Panel(title="Divergence from the teacher", unit="nat", lines={"teacher_kl_mean": "divergence"}, live=False),
    Panel(title="Variance explained by the critic", unit="share", lines={"value_explained": "share"}, live=False),
    Panel(title="Tokens per second", live=False, lines=dict(zip(DERIVED, ("trained", "generated"), strict=True))),
    Panel(title="Samples of several versions", unit="share", lines={"mixed_version_fraction": "share"}, live=False),
    Panel(title="Learning rate", lines={"lr": "rate"}, live=False),
)  # fmt: skip


# 0 on the line of a step that trained no token, where it means nothing
OF_TRAINED = frozenset((
    "loss", "grad_norm", "grad_norm_max", "lr", "entropy", "ratio_mean", "ratio_max", "ratio_p1", "ratio_p50",
    "ratio_p99", "correction_clip_fraction", "correction_masked_fraction", "veto_fraction",
    "effective_sample_fraction", "objective_clip_fraction", "mismatch_abs_mean", "drift_abs_mean", "kl_mean",
    "routing_mismatch_fraction", "teacher_kl_mean", "teacher_tail_mean", "batch_kl", "staleness_mean",
    "staleness_max", "kv_cache_age_mean", "kv_cache_age_max", "update_age_mean", "update_age_max",
))  # fmt: skip
# the same of a step whose samples all failed
OF_EPISODES = frozenset((
    "reward_mean", "reward_std", "length_mean", "length_max", "turns_mean", "truncated_fraction",
    "mixed_version_fraction", "teacher_s",
))  # fmt: skip
# Without its key each of these is unset, or a 0 that means nothing.
NEEDING = {
    "evaluation.every": ("validation_loss",),
    "learner.loss.kl_coefficient": ("kl_mean",),
    "learner.loss.distillation": ("teacher_kl_mean", "teacher_tail_mean", "teacher_s"),
    "learner.critic": (
        "value_loss", "value_grad_norm", "value_lr", "value_clip_fraction", "value_explained", "return_mean",
    ),
    "learner.moe.replay_routing": ("routing_mismatch_fraction",),
    "rollout.concurrency: auto": ("kv_cache_usage", "preemptions_total"),
}  # fmt: skip
# Each source has these numbers on a step's line.
SOURCE_FIGURES = ("weight", "groups", "samples", "reward_mean", "success", "truncated_fraction")


def declarations(kind: type[msgspec.Struct]) -> list[Declaration]:
    out: list[Declaration] = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        meta = next(a for a in get_args(hint) if isinstance(a, Meta))
        extra = cast("dict[str, str]", meta.extra)
        out.append(Declaration(name, extra["unit"], cast("Reduction", extra["reduction"]), meta.description or ""))
    return out


def numbers(kind: type[msgspec.Struct]) -> list[str]:
    """Names of the metrics that are one number on a line."""
    return [name for name, hint in get_type_hints(kind).items() if hint in (int, float, OptInt, OptFloat)]


def value_of(line: Metrics, name: str) -> float | None:
    """A number of a line, by a name as in docs/metrics.md: reward_mean, environment/KEY, sources/SOURCE/KEY,
    evaluation/DATASET/mean_reward or evaluation/DATASET/pass_at/K.

    NaN is a number that was not finite, or an evaluation's bound that is unknown. None: the line lacks it.
    """
    if isinstance(line, EvaluationMetrics):
        prefix = f"evaluation/{line.dataset}/"
        if not name.startswith(prefix):
            return None
        name = name.removeprefix(prefix)
    field, _, key = name.partition("/")
    found: object = getattr(line, field, UNSET)
    if key:
        found = cast("dict[str, object]", found).get(key, UNSET) if isinstance(found, dict) else UNSET
    return math.nan if found is None else float(found) if isinstance(found, int | float) else None


def judged(line: Metrics, name: str) -> float | None:
    """value_of for those who judge it: NaN for every number that was not finite, None also where a 0 means nothing."""
    if isinstance(line, StepMetrics) and (
        (name in OF_TRAINED and not line.tokens_trained)
        or (name in OF_EPISODES and isinstance(line.samples, int) and line.samples == line.samples_failed)
    ):
        return None
    value = value_of(line, name)
    return math.nan if value is not None and not math.isfinite(value) else value


def comparable(line: Metrics, other: Metrics) -> bool:
    """Whether both lines of a dataset were measured in the same way: evaluations may change in a continued run.

    Where a line of an earlier release has no digest, its numbers of problems and samples and its temperature decide.
    """
    if not isinstance(line, EvaluationMetrics) or not isinstance(other, EvaluationMetrics):
        return True
    told, of_other = ((each.problems, each.samples, each.temperature) for each in (line, other))
    return told == of_other and (line.digest == other.digest or "" in (line.digest, other.digest))
