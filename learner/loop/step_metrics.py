"""The metrics line of one step, from its parts."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

from broker.contract import BrokerStatus
from common.errors import SlipstreamError
from common.metrics import AGE_CLASSES, StepMetrics
from common.span_buffer import SPANS
from common.waste import WASTE_REASONS, Waste, learner_waste, merged_waste, wasted_tokens
from common.weights.source.nodes import PublishStats
from learner.backend_protocol import StepResult
from learner.batch.batch import BatchStatistics, SourceFigures, TrainingBatch
from learner.loss.token_diagnostics import BIN_WIDTH, HALF_BINS, LINEAR_BELOW, ratio_quantile

SHOWN_S = 1e-4  # shorter parts are not in the trace
# Returns that vary less leave nothing to be explained. The second figure is a share of their mean square: sums of
# microbatches are in float32.
LEAST_VARIANCE, LEAST_SHARE = 1e-9, 1e-5


@dataclass
class Times:
    """Seconds of one step's parts; see common.metrics.StepMetrics for what each covers."""

    step_s: float = 0.0
    learner_idle_s: float = 0.0
    train_s: float = 0.0
    batch_s: float = 0.0
    snapshot_s: float = 0.0
    checkpoint_s: float = 0.0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to `name`."""
        began = time.monotonic()
        yield
        ended = time.monotonic()
        setattr(self, name, getattr(self, name) + ended - began)
        if ended - began >= SHOWN_S:
            SPANS.add(name.removesuffix("_s"), "phase", began, ended, "loop")


@dataclass
class Totals:
    """Running counts of this run's learner; kept in checkpoints. `wasted`: failed samples and masked tokens."""

    tokens_trained_total: int = 0
    tokens_wasted_total: int = 0
    tokens_masked_total: int = 0

    def add(self, statistics: BatchStatistics) -> None:
        self.tokens_trained_total += statistics.tokens_trained
        masked = statistics.tokens_expired + statistics.tokens_cut + statistics.tokens_unused
        self.tokens_wasted_total += masked + statistics.tokens_failed
        self.tokens_masked_total += masked

    def waste(self) -> dict[str, Waste]:
        """By reason, as in a LearnerReport."""
        return learner_waste(self.tokens_wasted_total, self.tokens_masked_total)


NO_AGES: Sequence[float] = (0.0,) * len(AGE_CLASSES)


class LossFigures(TypedDict):
    """Fields of StepMetrics that follow from the sums of learner.loss.losses.policy_loss."""

    entropy: float
    ratio_mean: float
    ratio_max: float
    ratio_p1: float
    ratio_p50: float
    ratio_p99: float
    correction_clip_fraction: float
    correction_masked_fraction: float
    veto_fraction: float
    effective_sample_fraction: float
    objective_clip_fraction: float
    mismatch_abs_mean: float
    drift_abs_mean: float
    mismatch_by_age: list[float]
    tokens_by_age: list[int]
    kl_mean: float
    routing_mismatch_fraction: float
    teacher_kl_mean: float
    teacher_tail_mean: float


def loss_figures(result: StepResult) -> LossFigures:
    """The figures of a step's loss; all 0 when nothing was trained."""
    sums = result.sums
    tokens = max(result.loss_tokens, 1)
    bins = sums.get("ratio_bins", [])
    by_age = sums.get("tokens_by_age", NO_AGES)
    drifts = zip(sums.get("mismatch_by_age", NO_AGES), by_age, strict=True)
    mismatch = [total / max(count, 1.0) for total, count in drifts]
    weight, squares = sums.get("weight", 0.0), sums.get("weight_squared", 0.0)
    effective = weight**2 / squares / tokens if squares else 0.0
    if weight == squares:  # no correction: every weight is 1, or 0 of a sample that the veto left out
        effective = min(effective, _effective_share(bins))

    def mean(name: str) -> float:
        """Per loss token."""
        return sums.get(name, 0.0) / tokens

    return {
        "entropy": mean("entropy"),
        "ratio_mean": mean("ratio"),
        "ratio_max": result.maxima.get("ratio", 0.0),
        "ratio_p1": ratio_quantile(bins, 0.01),
        "ratio_p50": ratio_quantile(bins, 0.5),
        "ratio_p99": ratio_quantile(bins, 0.99),
        "correction_clip_fraction": mean("correction_clipped"),
        "correction_masked_fraction": mean("correction_masked"),
        "veto_fraction": mean("vetoed"),
        "effective_sample_fraction": effective,
        "objective_clip_fraction": mean("objective_clipped"),
        "mismatch_abs_mean": mismatch[0] if by_age[0] else mean("mismatch"),
        "drift_abs_mean": mean("mismatch"),
        "mismatch_by_age": mismatch,
        "tokens_by_age": [round(count) for count in by_age],
        "kl_mean": mean("kl"),
        "teacher_kl_mean": mean("teacher_kl"),
        "teacher_tail_mean": mean("teacher_tail"),
        "routing_mismatch_fraction": sums.get("routing_changed", 0.0) / max(sums.get("routing_replayed", 0.0), 1.0),
    }


def _effective_share(bins: Sequence[float]) -> float:
    """Kish's effective sample size of the ratios, per token, from the centres of `ratio_bins`; 1 of no tokens."""
    if not any(bins):
        return 1.0
    counts = np.asarray(bins)
    steps = np.arange(-HALF_BINS, HALF_BINS + 1)
    ratios = np.exp(np.sign(steps) * LINEAR_BELOW * np.expm1(np.abs(steps) * BIN_WIDTH))
    return float((counts @ ratios) ** 2 / (counts @ ratios**2) / counts.sum())


class CriticFigures(TypedDict, total=False):
    """Fields of StepMetrics that follow from a critic's updates; none without a critic."""

    value_loss: float
    value_grad_norm: float
    value_lr: float
    value_clip_fraction: float
    value_explained: float
    return_mean: float


def critic_figures(result: StepResult | None) -> CriticFigures:
    """From the sums of learner.loss.value_loss.value_loss."""
    if result is None:
        return {}
    steps = max(result.sums["steps"], 1.0)

    def variance(name: str) -> float:
        return result.sums[f"{name}_squared"] / steps - (result.sums[name] / steps) ** 2

    spread = variance("returns")
    varied = spread > max(LEAST_VARIANCE, LEAST_SHARE * result.sums["returns_squared"] / steps)
    return {
        "value_loss": result.loss,
        "value_grad_norm": result.grad_norm,
        "value_lr": result.lr,
        "value_clip_fraction": result.sums["value_clipped"] / max(result.loss_tokens, 1),
        "value_explained": 1.0 - variance("errors") / spread if varied else 0.0,
        "return_mean": result.sums["returns"] / steps,
    }


def check_finite(step: int, result: StepResult, key: str = "learner.optimizer.lr") -> None:
    """Stop a run whose numbers are gone before they reach a checkpoint; `key` is its rate's. Raises SlipstreamError."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(value := getattr(result, name)):
            hint = f"begin a new run from the last checkpoint with a lower {key}"
            raise SlipstreamError(f"step {step}: {name} is {value}; {hint}")


class StallMeter:
    """Seconds of paused generation over all nodes, from running totals of nodes that come and go."""

    def __init__(self) -> None:
        self._seen: dict[str, float] | None = None

    def advance(self, status: BrokerStatus) -> float:
        """Seconds since the last call; 0 at the first, whatever earlier learners have caused."""
        now = {f"{n.report.node_id}/{n.report.pid}": n.report.generation_stall_s for n in status.nodes}
        before = self._seen
        self._seen = now if self._seen is None else {**self._seen, **now}
        if before is None:
            return 0.0
        return sum(max(0.0, total - before.get(node, 0.0)) for node, total in now.items())


@dataclass(frozen=True)
class UpdateFigures:
    """Figures of a step's optimizer updates besides their result; the same on every rank."""

    count: int = 0
    tokens: int = 0  # in the loss of at least one
    microbatches: int = 0  # those of one rank
    grad_norm_max: float = 0.0
    batch_kl: float = 0.0  # the last one's
    age_mean: float = 0.0  # updates
    age_max: int = 0
    critic: StepResult | None = None  # the critic's updates, merged like the policy's


@dataclass(frozen=True)
class Step:
    """One step that is done, for its metrics line."""

    batch: TrainingBatch
    result: StepResult
    updates: UpdateFigures
    times: Times
    totals: Totals
    elapsed_s: float  # since the loop began
    incarnation: int = 0  # which start of the learner did it


@dataclass
class GivenBack:
    """Groups that were to be generated again since the last line, and their tokens older than staleness.max, [10]."""

    groups: int = 0
    by_length_decile: "np.ndarray[Any, np.dtype[np.int64]]" = field(default_factory=lambda: np.zeros(10, np.int64))


def step_metrics(
    done: Step,
    broker: BrokerStatus,
    publisher: PublishStats,
    *,
    incarnation: int,
    given_back: GivenBack,
    shares: Mapping[str, float],
    generation_stall_s: float,
    transcripts_dropped_total: int,
) -> StepMetrics:
    """The metrics line of a step, with broker and publisher as they are at its end, and the `shares` of sources."""
    result = done.result
    return StepMetrics(
        **loss_figures(result),
        **vars(done.times),
        **_batch_figures(done.batch.statistics),
        **_waste_figures(merged_waste((broker.waste, done.totals.waste()))),
        **_fleet_figures(broker),
        **critic_figures(done.updates.critic),
        step=done.batch.step,
        policy_version=done.batch.step + 1,
        time_s=time.time(),
        elapsed_s=done.elapsed_s,
        incarnation=incarnation,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        microbatches=done.updates.microbatches,
        updates=done.updates.count,
        grad_norm_max=done.updates.grad_norm_max,
        batch_kl=done.updates.batch_kl,
        update_age_mean=done.updates.age_mean,
        update_age_max=done.updates.age_max,
        groups_regenerated=given_back.groups,
        tokens_regenerated_by_length_decile=given_back.by_length_decile.tolist(),
        sources=source_figures(done.batch.statistics.sources, shares),
        tokens_trained_total=done.totals.tokens_trained_total,
        publish_s=publisher.publish_s,
        publish_bytes=publisher.publish_bytes,
        seconds_to_active=publisher.seconds_to_active,
        canary_max_difference=publisher.canary_max_difference,
        generation_stall_s=generation_stall_s,
        transcripts_dropped_total=transcripts_dropped_total,
    )


OF_THE_BATCH = (  # fields of BatchStatistics that a line has under the same names
    "reward_mean", "reward_std", "staleness_mean", "staleness_max", "tokens_expired", "groups", "samples",
    "samples_failed", "tokens_trained", "tokens_unused", "sequence_tokens", "length_mean", "length_max", "turns_mean",
    "environment", "groups_filtered", "kv_cache_age_mean", "kv_cache_age_max", "teacher_s",
)  # fmt: skip


def _batch_figures(groups: BatchStatistics) -> dict[str, Any]:
    """Fields of StepMetrics about the step's groups."""
    episodes = max(groups.samples - groups.samples_failed, 1)
    return {name: getattr(groups, name) for name in OF_THE_BATCH} | {
        "advantage_zero_fraction": groups.groups_without_signal / max(groups.groups + groups.groups_filtered, 1),
        "tokens_expired_by_length_decile": list(groups.tokens_expired_by_length_decile),
        "truncated_fraction": groups.samples_truncated / episodes,
        "mixed_version_fraction": groups.samples_mixed / episodes,
        "samples_failed_by_reason": groups.failed_by_reason,
    }


def _waste_figures(wasted: Mapping[str, Waste]) -> dict[str, Any]:
    """Fields of StepMetrics about the run's waste, by reason."""
    lost = {reason: wasted.get(reason, Waste()) for reason in WASTE_REASONS}
    tokens = ("lost", "failed", "filtered", "regenerated", "masked", "cancelled")
    seconds = ("lost", "failed", "filtered", "regenerated", "cancelled", "stalled", "waiting")
    return {
        "tokens_wasted_total": wasted_tokens(wasted),
        **{f"tokens_wasted_{reason}": lost[reason].tokens for reason in tokens},
        **{f"seconds_wasted_{reason}": lost[reason].seconds for reason in seconds},
    }


def _fleet_figures(broker: BrokerStatus) -> dict[str, Any]:
    """Fields of StepMetrics about the broker's groups and its living nodes."""
    reports = [node.report for node in broker.nodes if node.alive and not node.report.pool]
    return {
        "tokens_generated_total": broker.tokens_generated_total,
        "groups_ready": broker.groups_ready,
        "groups_leased": broker.groups_leased,
        "nodes_live": len(reports),
        "concurrency": sum(report.concurrency for report in reports),
        "episodes_running": sum(report.episodes_running for report in reports),
        "kv_cache_usage": max((report.kv_cache_usage for report in reports), default=0.0),
        "preemptions_total": sum(report.preemptions for report in reports),
    }


def source_figures(sources: Mapping[str, SourceFigures], shares: Mapping[str, float]) -> dict[str, float]:
    """SOURCE/NAME of every figure of the sources; one without samples has those that need none."""
    found = dict[str, float]()
    for source, share in shares.items():
        own = sources.get(source, SourceFigures())
        found[f"{source}/weight"] = share
        found |= {f"{source}/groups": float(own.groups), f"{source}/samples": float(own.samples)}
        if own.samples:
            found[f"{source}/reward_mean"] = own.rewards / own.samples
            found[f"{source}/success"] = own.successes / own.samples
            found[f"{source}/truncated_fraction"] = own.truncated / own.samples
    return found
