"""The metrics line of one step, from its parts."""

import math
import time
from dataclasses import dataclass

from broker.contract import BrokerStatus
from common.errors import SlipstreamError
from common.metrics import StepMetrics
from learner.backend import StepResult
from learner.batch import BatchStatistics
from learner.publisher_protocol import PublishStats


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
    """Running counts of this run's learner; kept in checkpoints."""

    tokens_trained: int = 0
    tokens_wasted: int = 0

    def add(self, statistics: BatchStatistics) -> None:
        self.tokens_trained += statistics.tokens_trained
        self.tokens_wasted += statistics.tokens_expired + statistics.tokens_failed + statistics.tokens_filtered


@dataclass(frozen=True)
class LossFigures:
    """A step's loss sums as means per loss token; see common.metrics.StepMetrics."""

    entropy: float
    ratio_mean: float
    ratio_max: float
    correction_clip_fraction: float
    objective_clip_fraction: float
    mismatch_abs_mean: float
    drift_abs_mean: float

    @classmethod
    def of(cls, result: StepResult) -> "LossFigures":
        """From the sums that learner.losses.policy_loss declares; all 0 when nothing was trained."""
        tokens = max(result.loss_tokens, 1)
        sums = result.sums
        drift = sums.get("mismatch", 0.0) / tokens
        fresh = sums.get("fresh_tokens", 0.0)
        return cls(
            entropy=sums.get("entropy", 0.0) / tokens,
            ratio_mean=sums.get("ratio", 0.0) / tokens,
            ratio_max=result.maxima.get("ratio", 0.0),
            correction_clip_fraction=sums.get("correction_clipped", 0.0) / tokens,
            objective_clip_fraction=sums.get("objective_clipped", 0.0) / tokens,
            mismatch_abs_mean=sums["mismatch_fresh"] / fresh if fresh else drift,
            drift_abs_mean=drift,
        )


def check_finite(step: int, result: StepResult) -> None:
    """Stop a run whose numbers are gone before they reach a checkpoint; raises SlipstreamError."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(value := getattr(result, name)):
            raise SlipstreamError(
                f"step {step}: {name} is {value}; the last checkpoint is unharmed, try a lower learner.optimizer.lr"
            )


def step_metrics(
    *,
    step: int,
    incarnation: int,
    elapsed_s: float,
    result: StepResult,
    statistics: BatchStatistics,
    microbatches: int,
    regenerated: int,
    times: Times,
    totals: Totals,
    broker: BrokerStatus,
    nodes_live: int,
    generation_stall_s: float,
    publisher: PublishStats,
) -> StepMetrics:
    """Everything that is said of step `step`."""
    figures = LossFigures.of(result)
    samples = statistics.samples - statistics.samples_failed
    return StepMetrics(
        step=step,
        policy_version=step + 1,
        time_s=time.time(),
        elapsed_s=elapsed_s,
        incarnation=incarnation,
        reward_mean=statistics.reward_mean,
        reward_std=statistics.reward_std,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        entropy=figures.entropy,
        ratio_mean=figures.ratio_mean,
        ratio_max=figures.ratio_max,
        correction_clip_fraction=figures.correction_clip_fraction,
        objective_clip_fraction=figures.objective_clip_fraction,
        mismatch_abs_mean=figures.mismatch_abs_mean,
        drift_abs_mean=figures.drift_abs_mean,
        advantage_zero_fraction=statistics.groups_without_signal
        / max(statistics.groups + statistics.groups_filtered, 1),
        staleness_mean=statistics.staleness_mean,
        staleness_max=statistics.staleness_max,
        tokens_expired=statistics.tokens_expired,
        tokens_expired_by_length_decile=list(statistics.tokens_expired_by_length_decile),
        groups_regenerated=regenerated,
        groups=statistics.groups,
        samples=statistics.samples,
        samples_failed=statistics.samples_failed,
        tokens_trained=statistics.tokens_trained,
        sequence_tokens=statistics.sequence_tokens,
        length_mean=statistics.length_mean,
        length_max=statistics.length_max,
        turns_mean=statistics.turns_mean,
        truncated_fraction=statistics.samples_truncated / max(samples, 1),
        microbatches=microbatches,
        environment=statistics.environment,
        step_s=times.step_s,
        learner_idle_s=times.learner_idle_s,
        train_s=times.train_s,
        batch_s=times.batch_s,
        snapshot_s=times.snapshot_s,
        checkpoint_s=times.checkpoint_s,
        publish_s=publisher.publish_s,
        publish_bytes=publisher.publish_bytes,
        seconds_to_active=publisher.seconds_to_active,
        canary_max_difference=publisher.canary_max_difference,
        generation_stall_s=generation_stall_s,
        tokens_generated_total=broker.tokens_generated_total,
        tokens_trained_total=totals.tokens_trained,
        tokens_wasted_total=broker.tokens_wasted_total + totals.tokens_wasted,
        groups_ready=broker.groups_ready,
        groups_leased=broker.groups_leased,
        nodes_live=nodes_live,
        groups_filtered=statistics.groups_filtered,
    )
