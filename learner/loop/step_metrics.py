"""The metrics line of one step, from its parts."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from broker.contract import BrokerStatus
from common.errors import SlipstreamError
from common.metrics import StepMetrics
from common.span_buffer import SPANS
from common.waste import Waste, merged_waste, wasted_tokens
from common.weights.source.nodes import PublishStats
from learner.backend_protocol import StepResult
from learner.batch.batch import BatchStatistics, TrainingBatch
from learner.loss.token_diagnostics import AGE_CLASSES, ratio_quantile

SHOWN_S = 1e-4  # shorter parts are not in the trace


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
        self.tokens_wasted_total += statistics.tokens_expired + statistics.tokens_failed
        self.tokens_masked_total += statistics.tokens_expired

    def waste(self) -> dict[str, Waste]:
        """By reason, as in a LearnerReport."""
        masked = self.tokens_masked_total
        return {"failed": Waste(self.tokens_wasted_total - masked), "masked": Waste(masked)}


NO_AGES: Sequence[float] = (0.0,) * len(AGE_CLASSES)
# Fields of common.metrics.StepMetrics that are the mean per loss token of a sum of learner.loss.losses.policy_loss.
MEANS = {
    "entropy": "entropy",
    "ratio_mean": "ratio",
    "correction_clip_fraction": "correction_clipped",
    "correction_masked_fraction": "correction_masked",
    "veto_fraction": "vetoed",
    "objective_clip_fraction": "objective_clipped",
    "drift_abs_mean": "mismatch",
    "kl_mean": "kl",
}


def loss_figures(result: StepResult) -> dict[str, Any]:
    """A step's loss sums under the names of common.metrics.StepMetrics; all 0 when nothing was trained."""
    sums, tokens = result.sums, max(result.loss_tokens, 1)
    bins, by_age = sums.get("ratio_bins", []), sums.get("tokens_by_age", NO_AGES)
    drifts = zip(sums.get("mismatch_by_age", NO_AGES), by_age, strict=True)
    mismatch = [total / max(count, 1.0) for total, count in drifts]
    means = {name: sums.get(source, 0.0) / tokens for name, source in MEANS.items()}
    squares = sums.get("weight_squared", 0.0)
    return {
        **means,
        "ratio_max": result.maxima.get("ratio", 0.0),
        "ratio_p1": ratio_quantile(bins, 0.01),
        "ratio_p50": ratio_quantile(bins, 0.5),
        "ratio_p99": ratio_quantile(bins, 0.99),
        "effective_sample_fraction": sums["weight"] ** 2 / squares / tokens if squares else 0.0,
        "mismatch_abs_mean": mismatch[0] if by_age[0] else means["drift_abs_mean"],
        "mismatch_by_age": mismatch,
        "tokens_by_age": [round(count) for count in by_age],
        "routing_mismatch_fraction": sums.get("routing_changed", 0.0) / max(sums.get("routing_replayed", 0.0), 1.0),
    }


def check_finite(step: int, result: StepResult) -> None:
    """Stop a run whose numbers are gone before they reach a checkpoint; raises SlipstreamError."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(value := getattr(result, name)):
            raise SlipstreamError(
                f"step {step}: {name} is {value}; the last checkpoint is unharmed, try a lower learner.optimizer.lr"
            )


class StallMeter:
    """Seconds of paused generation over all nodes, from running totals of nodes that come and go."""

    def __init__(self) -> None:
        self._seen: dict[str, float] | None = None

    def advance(self, status: BrokerStatus) -> float:
        """Seconds since the last call; 0 at the first, whatever earlier learners have caused."""
        now = {f"{n.report.node_id}/{n.report.pid}": n.report.generation_stall_s for n in status.nodes}
        before, self._seen = self._seen, now if self._seen is None else {**self._seen, **now}
        if before is None:
            return 0.0
        return sum(max(0.0, total - before.get(node, 0.0)) for node, total in now.items())


@dataclass(frozen=True)
class Step:
    """One optimizer step that is done, for its metrics line."""

    batch: TrainingBatch
    result: StepResult
    microbatches: int
    times: Times
    totals: Totals
    elapsed_s: float  # since the loop began


def step_metrics(done: Step, broker: BrokerStatus, publisher: PublishStats, **others: Any) -> StepMetrics:
    """The metrics line of a step, with broker and publisher as they are at its end; `others`: further fields of it."""
    step, result, statistics = done.batch.step, done.result, done.batch.statistics
    samples = statistics.samples - statistics.samples_failed
    wasted = merged_waste((broker.waste, done.totals.waste()))
    reports = [node.report for node in broker.nodes if node.alive and not node.report.pool]
    figures = loss_figures(result) | others
    for part in (result, statistics, publisher, done, done.times, done.totals):
        figures |= vars(part)
    for reason, spent in wasted.items():
        figures |= {f"tokens_wasted_{reason}": spent.tokens, f"seconds_wasted_{reason}": spent.seconds}
    figures |= {
        "step": step,
        "policy_version": step + 1,
        "time_s": time.time(),
        "advantage_zero_fraction": statistics.groups_without_signal
        / max(statistics.groups + statistics.groups_filtered, 1),
        "truncated_fraction": statistics.samples_truncated / max(samples, 1),
        "tokens_generated_total": broker.tokens_generated_total,
        "tokens_wasted_total": wasted_tokens(wasted),
        "groups_ready": broker.groups_ready,
        "groups_leased": broker.groups_leased,
        "nodes_live": len(reports),
        "concurrency": sum(report.concurrency for report in reports),
        "episodes_running": sum(report.episodes_running for report in reports),
        "kv_cache_usage": max((report.kv_cache_usage for report in reports), default=0.0),
        "preemptions_total": sum(report.preemptions for report in reports),
        "mixed_version_fraction": statistics.samples_mixed / max(samples, 1),
        "samples_failed_by_reason": statistics.failed_by_reason,
    }
    return StepMetrics(**{name: figures[name] for name in StepMetrics.__struct_fields__ if name in figures})
