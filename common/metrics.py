"""The metrics of a run: one declaration per metric, one JSON line per step in RUN/metrics.jsonl.

A metric is a field of StepMetrics (or SftMetrics) with its unit, how several steps are reduced to one figure, and
what it means. Writer, report and status read the same declarations. Fields are only ever appended.
"""

from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast, get_args, get_type_hints

import msgspec
from msgspec import Meta

from common.errors import UsageError

Reduction = Literal["mean", "sum", "max", "last"]


def metric(description: str, unit: str = "", reduction: Reduction = "mean") -> Meta:
    """Declare one metric: `unit` as written on a plot's axis, `reduction` over steps."""
    return Meta(description=description, extra={"unit": unit, "reduction": reduction})


class Declaration(msgspec.Struct, frozen=True):
    name: str
    unit: str
    reduction: Reduction
    description: str


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step of a reinforcement-learning job. 'Tokens' are sampled tokens unless said otherwise."""

    step: Annotated[int, metric("optimizer steps done before this one", "", "last")]
    policy_version: Annotated[int, metric("version that this step produced: step + 1", "", "last")]
    time_s: Annotated[float, metric("Unix time at the end of the step", "s", "last")]
    elapsed_s: Annotated[float, metric("since this learner process began to train", "s", "last")] = 0.0
    incarnation: Annotated[int, metric("which start of the learner wrote this line, from 0", "", "last")] = 0

    reward_mean: Annotated[float, metric("over samples that did not fail")]
    reward_std: Annotated[float, metric("over samples that did not fail")]
    loss: Annotated[float, metric("the minimised loss, averaged as learner.loss.reduction says")]
    grad_norm: Annotated[float, metric("norm of all gradients, before clipping")]
    lr: Annotated[float, metric("learning rate of this step", "", "last")] = 0.0
    entropy: Annotated[float, metric("entropy of the next token, per trained token", "nat")]
    ratio_mean: Annotated[float, metric("exp(logprobs - behavior_logprobs) per trained token")]
    ratio_max: Annotated[float, metric("largest such ratio", "", "max")]
    ratio_p1: Annotated[float, metric("1 % of trained tokens have no larger ratio; log-ratios to 4 %")] = 0.0
    ratio_p50: Annotated[float, metric("half of trained tokens have no larger ratio")] = 0.0
    ratio_p99: Annotated[float, metric("99 % of trained tokens have no larger ratio")] = 0.0
    correction_clip_fraction: Annotated[float, metric("trained tokens whose weight was truncated")]
    correction_masked_fraction: Annotated[float, metric("trained tokens whose weight was out of bounds: 0")] = 0.0
    veto_fraction: Annotated[float, metric("trained tokens in samples that correction_veto left out")] = 0.0
    effective_sample_fraction: Annotated[float, metric("Kish's effective sample size, per trained token")] = 0.0
    objective_clip_fraction: Annotated[float, metric("trained tokens in the clipped branch")] = 0.0
    mismatch_abs_mean: Annotated[
        float,
        metric(
            "|learner's - sampler's log-probability| per token of the version that trains: only arithmetic differs. "
            "A step without such tokens takes all trained tokens, and policy drift is included",
            "nat",
        ),
    ]
    drift_abs_mean: Annotated[float, metric("the same over all trained tokens", "nat")] = 0.0
    mismatch_by_age: Annotated[list[float], metric("the same by staleness: 0, 1, 2, 3-4, 5-8, 9 and more", "nat")] = []
    tokens_by_age: Annotated[list[int], metric("trained tokens of those classes of staleness", "tokens", "sum")] = []
    kl_mean: Annotated[float, metric("divergence from the reference model per trained token; 0 if none", "nat")] = 0.0
    advantage_zero_fraction: Annotated[float, metric("groups whose rewards were all equal")] = 0.0

    staleness_mean: Annotated[float, metric("step - version, per trained token", "steps")]
    staleness_max: Annotated[int, metric("largest over trained tokens", "steps", "max")]
    tokens_expired: Annotated[int, metric("left out of the loss because older than staleness.max", "tokens", "sum")]
    tokens_expired_by_length_decile: Annotated[list[int], metric("by length, shortest first", "tokens", "sum")] = []
    groups_regenerated: Annotated[int, metric("given back by this step to be generated again", "groups", "sum")] = 0

    groups: Annotated[int, metric("trained on", "groups", "sum")]
    samples: Annotated[int, metric("in those groups and in filtered ones", "samples", "sum")] = 0
    samples_failed: Annotated[int, metric("samples without a usable episode", "samples", "sum")] = 0
    tokens_trained: Annotated[int, metric("in the loss", "tokens", "sum")]
    sequence_tokens: Annotated[int, metric("processed: prompts and environment text included", "tokens", "sum")] = 0
    length_mean: Annotated[float, metric("sampled tokens per sample", "tokens")] = 0.0
    length_max: Annotated[int, metric("sampled tokens of the longest sample", "tokens", "max")] = 0
    turns_mean: Annotated[float, metric("generate calls per sample")] = 0.0
    truncated_fraction: Annotated[float, metric("samples cut at the token or turn limit")] = 0.0
    microbatches: Annotated[int, metric("per data-parallel rank", "", "sum")] = 0
    environment: Annotated[dict[str, float], metric("the environment's own numbers, per sample")] = {}

    step_s: Annotated[float, metric("from the end of the step before to the end of this one", "s")]
    learner_idle_s: Annotated[float, metric("part of step_s: waiting for groups; near 0 if they are ready", "s")]
    train_s: Annotated[float, metric("part of step_s: forward, backward and optimizer", "s")] = 0.0
    batch_s: Annotated[float, metric("part of step_s: decoding, advantages and packing", "s")] = 0.0
    snapshot_s: Annotated[float, metric("part of step_s: exporting the weights to the publisher", "s")] = 0.0
    checkpoint_s: Annotated[float, metric("part of step_s: writing a checkpoint", "s")] = 0.0
    publish_s: Annotated[float, metric("newest finished publish, until every node had staged it", "s")]
    publish_bytes: Annotated[int, metric("sent by it, over all nodes", "bytes")]
    seconds_to_active: Annotated[float, metric("from snapshot until every node generated with it", "s")] = 0.0
    canary_max_difference: Annotated[float, metric("newest canary: largest |learner - engine|", "nat", "max")] = 0.0
    generation_stall_s: Annotated[float, metric("nodes' generation paused for flips during this step", "s", "sum")]

    tokens_generated_total: Annotated[int, metric("by all nodes since the broker started", "tokens", "last")]
    tokens_trained_total: Annotated[int, metric("in the loss since step 0", "tokens", "last")]
    tokens_wasted_total: Annotated[int, metric("generated and not trained on; docs/waste.md", "tokens", "last")]
    tokens_wasted_lost: Annotated[int, metric("results that came after their lease was lost", "tokens", "last")] = 0
    tokens_wasted_failed: Annotated[int, metric("failed groups and failed samples", "tokens", "last")] = 0
    tokens_wasted_filtered: Annotated[int, metric("groups whose rewards are all equal", "tokens", "last")] = 0
    tokens_wasted_regenerated: Annotated[int, metric("groups that a step gave back", "tokens", "last")] = 0
    tokens_wasted_masked: Annotated[int, metric("too old when their group was trained on", "tokens", "last")] = 0
    tokens_wasted_cancelled: Annotated[int, metric("groups and requests that were cancelled", "tokens", "last")] = 0
    seconds_wasted_lost: Annotated[float, metric("group-seconds of leases that were lost", "s", "last")] = 0.0
    seconds_wasted_failed: Annotated[float, metric("group-seconds of failed groups", "s", "last")] = 0.0
    seconds_wasted_filtered: Annotated[float, metric("group-seconds of filtered groups", "s", "last")] = 0.0
    seconds_wasted_regenerated: Annotated[float, metric("group-seconds of groups given back", "s", "last")] = 0.0
    seconds_wasted_cancelled: Annotated[float, metric("group-seconds of groups ended half-way", "s", "last")] = 0.0
    seconds_wasted_stalled: Annotated[float, metric("node-seconds of generation paused for flips", "s", "last")] = 0.0
    seconds_wasted_waiting: Annotated[float, metric("node-seconds without tasks or weights", "s", "last")] = 0.0
    groups_ready: Annotated[int, metric("waiting in the broker after this step's were taken", "groups", "last")]
    groups_leased: Annotated[int, metric("being generated", "groups", "last")]
    nodes_live: Annotated[int, metric("nodes with a recent heartbeat", "nodes", "last")]
    groups_filtered: Annotated[int, metric("looked at, all rewards equal, others taken instead", "groups", "sum")] = 0
    routing_mismatch_fraction: Annotated[float, metric("routings that the learner's own router would not choose")] = 0.0
    mixed_version_fraction: Annotated[float, metric("samples whose tokens were sampled by more than one version")] = 0.0
    samples_failed_by_reason: Annotated[
        dict[str, int], metric("by stop reason; docs/environments.md", "samples", "sum")
    ] = {}
    kv_cache_age_mean: Annotated[float, metric("version of a trained token - mean over its KV cache", "versions")] = 0.0
    kv_cache_age_max: Annotated[int, metric("the same of the oldest entry of any trained token", "versions", "max")] = 0
    concurrency: Annotated[int, metric("that the living nodes run at once at most", "episodes", "last")] = 0
    episodes_running: Annotated[int, metric("that they ran", "episodes", "last")] = 0
    kv_cache_usage: Annotated[float, metric("in the fullest engine; 0 unless concurrency is auto", "", "max")] = 0.0
    preemptions_total: Annotated[int, metric("put back for want of KV cache; 0 likewise", "requests", "last")] = 0
    transcripts_dropped_total: Annotated[
        int, metric("not written: disk or queue full, or no text; since learner and broker started", "", "last")
    ] = 0


class EvaluationMetrics(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="evaluation"):
    """One version on one held-out dataset. The bounds are those of 95 % intervals; docs/evaluation.md."""

    step: Annotated[int, metric("optimizer steps done before it: policy_version", "", "last")]
    policy_version: Annotated[int, metric("the version that sampled every token", "", "last")]
    time_s: Annotated[float, metric("Unix time at which the last result was stored", "s", "last")]
    incarnation: Annotated[int, metric("which start of the learner wrote this line, from 0", "", "last")] = 0
    dataset: Annotated[str, metric("the dataset's folder and name", "", "last")]
    problems: Annotated[int, metric("held-out problems", "problems", "last")]
    samples: Annotated[int, metric("episodes per problem", "samples", "last")]
    temperature: Annotated[float, metric("that they were sampled at; 0 is greedy", "", "last")]
    failed: Annotated[int, metric("episodes without a result; their reward counts as 0", "samples", "last")]
    mean_reward: Annotated[float, metric("over all episodes", "", "last")]
    mean_reward_low: Annotated[float | None, metric("its lower bound; unset for a single problem", "", "last")]
    mean_reward_high: Annotated[float | None, metric("its upper bound", "", "last")]
    pass_at: Annotated[dict[str, float], metric("by k: one of k samples has a reward of 1 or more", "", "last")]
    pass_at_low: Annotated[dict[str, float], metric("lower bounds", "", "last")]
    pass_at_high: Annotated[dict[str, float], metric("upper bounds", "", "last")]
    truncated_fraction: Annotated[float, metric("episodes cut at the token limit", "", "last")]
    length_mean: Annotated[float, metric("sampled tokens per episode", "tokens", "last")]
    tokens: Annotated[int, metric("sampled; in no figure of the training", "tokens", "last")]
    seconds: Annotated[float, metric("from the first episode's start to the last one's end", "s", "last")]
    held_s: Annotated[float, metric("publishes waited so long for the round; 0 if a pool played it", "s", "last")] = 0.0


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
    validation_loss: Annotated[
        float | msgspec.UnsetType, metric("cross-entropy of held-out rows after it, on validated steps", "nat", "last")
    ] = msgspec.UNSET


Line = TypeVar("Line", StepMetrics, SftMetrics, EvaluationMetrics)


def declarations(kind: type[msgspec.Struct]) -> list[Declaration]:
    """Declarations of a metrics struct, in order of its fields."""
    out: list[Declaration] = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        meta = next(a for a in get_args(hint) if isinstance(a, Meta))
        extra = cast("dict[str, str]", meta.extra)
        out.append(Declaration(name, extra["unit"], cast("Reduction", extra["reduction"]), meta.description or ""))
    return out


class _Kind(msgspec.Struct):
    kind: str | None = None  # None: a step


def numbers(kind: type[msgspec.Struct]) -> list[str]:
    """Names of the metrics that are one number on a line."""
    return [name for name, hint in get_type_hints(kind).items() if hint in (int, float, float | msgspec.UnsetType)]


def read_metrics(path: Path, kind: type[Line]) -> list[Line]:
    """All whole lines of this kind in a metrics file, also while a run writes it; [] when there is none.

    Raises ValueError, naming the line, where one is no `kind`; UsageError when `path` is no file, or may not be read.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    except OSError as error:
        raise no_file(path, error) from None
    decoder, kinds = msgspec.json.Decoder(kind), msgspec.json.Decoder(_Kind)
    out: list[Line] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            if kinds.decode(line).kind == kind.__struct_config__.tag:
                out.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
    return out


def no_file(path: Path, error: OSError) -> UsageError:
    """The error about a metrics file that cannot be opened."""
    return UsageError(f"{path}: expected a file with one JSON line per step, found {error.strerror or error}")
