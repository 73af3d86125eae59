"""The supervised warm start: the same backend, packing and optimizer as the RL loop, with a cross-entropy loss."""

import gc
import logging
import time
from collections.abc import Callable

from common.config import SftConfig
from common.errors import SlipstreamError
from common.metrics import MetricsWriter, SftMetrics
from learner.backend import Backend
from learner.losses import cross_entropy
from learner.packing import microbatches_for
from learner.sft_data import SftDataset
from learner.step_metrics import check_finite

logger = logging.getLogger(__name__)

LOG_EVERY_S = 2.0


class Stopped(SlipstreamError):
    """A warm start was told to stop; it writes no model."""


def run_sft(
    config: SftConfig,
    backend: Backend,
    dataset: SftDataset,
    metrics: MetricsWriter | None,
    stop_requested: Callable[[], str | None] = lambda: None,
) -> None:
    """Train for run.steps steps. Collective; every rank reads the same dataset.

    Args:
        config: of the job.
        backend: a freshly loaded model.
        dataset: rows.
        metrics: where the lead rank writes its lines, None on the others.
        stop_requested: why to stop, None to go on; asked on the lead rank.

    Raises:
        UsageError: a row longer than learner.micro_batch_tokens.
        Stopped: when told to.
        SlipstreamError: loss or gradients are not finite.
    """
    gc.collect()
    gc.freeze()
    logged = began = time.monotonic()
    for step in range(config.run.steps):
        _agree_to_go_on(backend, stop_requested)
        documents = dataset.step(step, config.learner.sequences_per_step)
        packed = microbatches_for(
            documents,
            backend.data_parallel_rank,
            backend.data_parallel_size,
            config.learner.micro_batch_tokens,
            multiple=backend.document_multiple,
            hidden_size=backend.hidden_size,
        )
        result = backend.train_step(packed, cross_entropy)
        check_finite(step, result)
        now = time.monotonic()
        if metrics is not None:
            line = SftMetrics(
                step=step,
                time_s=time.time(),
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens_trained=result.loss_tokens,
                sequence_tokens=sum(document.places for document in documents),
                step_s=now - began,
            )
            metrics.write(line)
            if now - logged >= LOG_EVERY_S or step + 1 == config.run.steps:
                logger.info("step %d of %d: loss %.4f, %.3f s", step + 1, config.run.steps, result.loss, now - began)
                logged = now
        began = now


def _agree_to_go_on(backend: Backend, stop_requested: Callable[[], str | None]) -> None:
    """Every rank leaves at the same step, or none. Collective."""
    reason = stop_requested() or "" if backend.rank == 0 else ""
    if backend.world_size > 1:
        reason = backend.broadcast_bytes(reason.encode() if backend.rank == 0 else None).decode()
    if reason:
        raise Stopped(f"stopped by {reason} before the end; no model was written")
