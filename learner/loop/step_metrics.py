"""The metrics line of one step, from its parts."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.contract import BrokerStatus, Waste
from broker.delivery.nodes import merged_waste, wasted_tokens
from common.errors import SlipstreamError
from common.metrics import StepMetrics
from learner.backend_protocol import StepResult
from learner.batch.batch import BatchStatistics, TrainingBatch
from learner.loss.token_diagnostics import AGE_CLASSES, ratio_quantile
from learner.publish.figures import PublishStats


@dataclass
class Times:
    """Seconds of one step's parts; see common.metrics.StepMetrics for what each covers."""

    step_s: float = 0.0
    learner_idle_s: float = 0.0
    train_s: float = 0.0
    batch_s: float = 0.0
    snapshot_s: float = 0.0
    checkpoint_s: float = 0.0


@dataclass
class Totals:
    """Running counts of this run's learner; kept in checkpoints. `tokens_wasted`: failed samples and masked tokens."""

    tokens_trained: int = 0
    tokens_wasted: int = 0
    tokens_masked: int = 0

    def add(self, statistics: BatchStatistics) -> None:
        self.tokens_trained += statistics.tokens_trained
        self.tokens_wasted += statistics.tokens_expired + statistics.tokens_failed
        self.tokens_masked += statistics.tokens_expired

    def waste(self) -> dict[str, Waste]:
        """By reason, as in a LearnerReport."""
        return {"failed": Waste(self.tokens_wasted - self.tokens_masked), "masked": Waste(self.tokens_masked)}


NO_AGES: Sequence[float] = (0.0,) * len(AGE_CLASSES)


@dataclass(frozen=True)
class LossFigures:
    """A step's loss sums as means per loss token, under the names of common.metrics.StepMetrics."""

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

    @classmethod
    def of(cls, result: StepResult) -> "LossFigures":
        """From the sums that learner.loss.losses.policy_loss declares; all 0 when nothing was trained."""
        tokens = max(result.loss_tokens, 1)
        means = {name: value / tokens for name, value in result.sums.items()}
        bins = result.histograms.get("ratio_bins", [])
        by_age = result.histograms.get("tokens_by_age", NO_AGES)
        mismatch = [
            total / max(count, 1.0)
            for total, count in zip(result.histograms.get("mismatch_by_age", NO_AGES), by_age, strict=True)
        ]
        drift, squares = means.get("mismatch", 0.0), means.get("weight_squared", 0.0)
        return cls(
            entropy=means.get("entropy", 0.0),
            ratio_mean=means.get("ratio", 0.0),
            ratio_max=result.maxima.get("ratio", 0.0),
            ratio_p1=ratio_quantile(bins, 0.01),
            ratio_p50=ratio_quantile(bins, 0.5),
            ratio_p99=ratio_quantile(bins, 0.99),
            correction_clip_fraction=means.get("correction_clipped", 0.0),
            correction_masked_fraction=means.get("correction_masked", 0.0),
            veto_fraction=means.get("vetoed", 0.0),
            effective_sample_fraction=means["weight"] ** 2 / squares if squares else 0.0,
            objective_clip_fraction=means.get("objective_clipped", 0.0),
            mismatch_abs_mean=mismatch[0] if by_age[0] else drift,
            drift_abs_mean=drift,
            mismatch_by_age=mismatch,
            tokens_by_age=[round(count) for count in by_age],
            kl_mean=means.get("kl", 0.0),
            routing_mismatch_fraction=result.sums.get("routing_changed", 0.0)
            / max(result.sums.get("routing_replayed", 0.0), 1.0),
        )


def check_finite(step: int, result: StepResult) -> None:
    """Stop a run whose numbers are gone before they reach a checkpoint; raises SlipstreamError."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(value := getattr(result, name)):
            raise SlipstreamError(
                f"step {step}: {name} is {value}; the last checkpoint is unharmed, try a lower learner.optimizer.lr"
            )


def waste_metrics(wasted: Mapping[str, Waste]) -> dict[str, Any]:
    """Under the names of common.metrics.StepMetrics: tokens_wasted_REASON and seconds_wasted_REASON."""
    found = {f"tokens_wasted_{reason}": spent.tokens for reason, spent in wasted.items()}
    found |= {f"seconds_wasted_{reason}": spent.seconds for reason, spent in wasted.items()}
    return {name: found[name] for name in StepMetrics.__struct_fields__ if name in found}


def engine_metrics(broker: BrokerStatus) -> dict[str, Any]:
    """How full the engines of the living nodes are."""
    reports = [node.report for node in broker.nodes if node.alive]
    return {
        "concurrency": sum(report.concurrency for report in reports),
        "episodes_running": sum(report.episodes_running for report in reports),
        "kv_cache_usage": max((report.kv_cache_usage for report in reports), default=0.0),
        "preemptions_total": sum(report.preemptions for report in reports),
    }


@dataclass(frozen=True)
class FleetFigures:
    """Broker, nodes and weight plane at the end of a step."""

    broker: BrokerStatus
    publisher: PublishStats
    regenerated: int  # groups that the step gave back
    generation_stall_s: float  # over all nodes, since the last step


@dataclass(frozen=True)
class Step:
    """One optimizer step that is done, for its metrics line."""

    batch: TrainingBatch
    result: StepResult
    microbatches: int
    times: Times
    totals: Totals
    elapsed_s: float  # since the loop began


def named_like(kind: type[StepMetrics], figures: object) -> dict[str, Any]:
    """The attributes of `figures` that `kind` has under the same name."""
    return {name: value for name in kind.__struct_fields__ if (value := getattr(figures, name, None)) is not None}


def step_metrics(done: Step, incarnation: int, fleet: FleetFigures) -> StepMetrics:
    """The metrics line of a step."""
    step, result, statistics, totals = done.batch.step, done.result, done.batch.statistics, done.totals
    broker, publisher = fleet.broker, fleet.publisher
    samples = statistics.samples - statistics.samples_failed
    wasted = merged_waste((broker.waste, totals.waste()))
    return StepMetrics(
        step=step,
        policy_version=step + 1,
        time_s=time.time(),
        elapsed_s=done.elapsed_s,
        incarnation=incarnation,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        **vars(LossFigures.of(result)),
        **vars(done.times),
        **named_like(StepMetrics, statistics),
        **named_like(StepMetrics, publisher),
        advantage_zero_fraction=statistics.groups_without_signal
        / max(statistics.groups + statistics.groups_filtered, 1),
        groups_regenerated=fleet.regenerated,
        truncated_fraction=statistics.samples_truncated / max(samples, 1),
        microbatches=done.microbatches,
        generation_stall_s=fleet.generation_stall_s,
        tokens_generated_total=broker.tokens_generated_total,
        tokens_trained_total=totals.tokens_trained,
        tokens_wasted_total=wasted_tokens(wasted),
        **waste_metrics(wasted),
        groups_ready=broker.groups_ready,
        groups_leased=broker.groups_leased,
        nodes_live=sum(node.alive for node in broker.nodes),
        mixed_version_fraction=statistics.samples_mixed / max(samples, 1),
        samples_failed_by_reason=statistics.failed_by_reason,
        **engine_metrics(broker),
    )
