"""The updates of one batch, on every rank alike.

    one update:  complete -> train
    several:     freeze the policy that begins the batch -> complete -> train, train, ... until none is left, or one
                 finds the policy further than kl_stop from the frozen one: it and the rest are left out

A critic makes as many updates, each after the policy's. In its first steps it trains alone: the policy's loss is
computed for its figures, and its weights stay.

Log-probabilities of the reference and of the version that begins the batch stay the same during it, as do marks and
the critic's estimates. They are computed once, over its documents as the first epoch packs them. A process that dies in
between has changed nothing durable. The batch is trained again from the checkpoint, in the same order.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from learner.backend_protocol import Backend, Microbatch, StepResult
from learner.batch.updates import Update
from learner.loop.batch_source import BatchSource
from learner.loop.step_metrics import UpdateFigures, check_finite

logger = logging.getLogger(__name__)

COUNTS = ("tokens_by_age", "mismatch_by_age")  # sums in which a token counts once, not once in every epoch
GIVEN = (
    "reference_logprobs",
    "proximal_logprobs",
    "marked",
    "values",
    "returns",
    "advantages",
)  # columns that stay the same during the batch


def train_updates(
    step: int, updates: Sequence[Update], backend: Backend, source: BatchSource, alive: Callable[[], None]
) -> tuple[StepResult, UpdateFigures]:
    """Train on every update, at least one; results are the same on every rank. Collective.

    `alive` is called after each part that learner.timeout_s bounds. Raises SlipstreamError as Backend.train_step does,
    or when a loss is no number.
    """
    done: list[tuple[Update, StepResult]] = []
    taught: list[tuple[Update, StepResult]] = []  # the critic's
    leash = _Leash(backend, source.kl_stop)
    # with a critic each of the two models comes for its own part, so that the device has one of them
    with nullcontext() if backend.critic is not None else backend.on_device():
        for update in _completed(updates, backend, source, alive):
            batches = update.microbatches
            accept = leash if done else None  # the first one trains the policy that begins the batch
            if step < source.critic_alone:
                accept = _refuse
            result = backend.train_step(batches, source.loss, source.temperature, source.entropy, accept)
            if leash.broken:
                told = (step, len(done), len(updates), leash.kl)
                logger.info("step %d ends after %d of %d updates: the divergence is %.4g", *told)
                break
            check_finite(step, result)
            alive()
            if backend.critic is not None and source.value_loss is not None:
                learned = backend.critic.train_step(batches, source.value_loss)
                check_finite(step, learned, "learner.critic.optimizer.lr")
                alive()
                taught.append((update, learned))
            done.append((update, result))
            logger.debug("step %d: %d of %d updates are done", step, len(done), len(updates))
    figures = _figures(done, source.updates, leash.kl)
    return _merged(done), replace(figures, critic=_merged(taught) if taught else None)


def _completed(
    updates: Sequence[Update], backend: Backend, source: BatchSource, alive: Callable[[], None]
) -> list[Update]:
    """The updates with everything that the loss reads; several also have the frozen policy. Collective."""
    first = [batch for update in updates if update.epoch == updates[0].epoch for batch in update.microbatches]
    if len(updates) > 1:
        frozen = backend.logprobs(first, source.temperature)
        alive()
        first = [replace(batch, proximal_logprobs=row) for batch, row in zip(first, frozen, strict=True)]
    whole = source.complete(first, alive)
    alive()
    if len(updates) == 1:
        return [replace(updates[0], microbatches=whole)]
    known = {name: _by_document(whole, name) for name in GIVEN if getattr(whole[0], name) is not None}
    return [replace(update, microbatches=[with_columns(b, known) for b in update.microbatches]) for update in updates]


def _by_document(microbatches: Sequence[Microbatch], name: str) -> dict[int, Tensor]:
    """[places] of the column `name` by number of the document; each is in one of the microbatches."""
    rows = [(batch, getattr(batch, name).split(batch.document_lengths)) for batch in microbatches if batch.numbers]
    return {number: row for batch, own in rows for number, row in zip(batch.numbers, own, strict=True)}


def with_columns(batch: Microbatch, known: Mapping[str, Mapping[int, Tensor]]) -> Microbatch:
    """The microbatch with the columns `known` by document; a filler has zeros, so that its loss has the same sums."""
    if not batch.numbers:
        zeros = torch.zeros(len(batch.targets))
        return replace(batch, **{name: zeros.bool() if name == "marked" else zeros for name in known})
    return replace(batch, **{name: torch.cat([of[n] for n in batch.numbers]) for name, of in known.items()})


def _refuse(result: StepResult) -> bool:
    """The policy stays as it is, on every rank."""
    return False


class _Leash:
    """Refuses the updates of a policy that is further than `most` from the one that began the batch; None: any goes."""

    def __init__(self, backend: Backend, most: float | None) -> None:
        self._backend = backend
        self._most = most
        self.kl = 0.0  # before the newest update, in nats per token
        self.broken = False

    def __call__(self, result: StepResult) -> bool:
        """Whether the optimizer may act on the result. The lead rank decides for all. Collective."""
        self.kl = result.sums.get("batch_kl", 0.0) / max(result.loss_tokens, 1)
        if self._most is not None:
            self.broken = self._backend.broadcast_bytes(b"+" if self.kl > self._most else b"-") == b"+"
        return not self.broken


def _merged(done: Sequence[tuple[Update, StepResult]]) -> StepResult:
    """Means of loss and gradient norm, the last rate, sums and maxima over all updates."""
    sums: dict[str, Any] = {}
    maxima: dict[str, float] = {}
    for update, result in done:
        for name, value in result.sums.items():
            if update.epoch == done[0][0].epoch or name not in COUNTS:
                sums[name] = _added(sums[name], value) if name in sums else value
        for name, value in result.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    results = [result for _, result in done]
    return StepResult(
        loss=fmean(result.loss for result in results),
        loss_tokens=sum(result.loss_tokens for result in results),
        grad_norm=fmean(result.grad_norm for result in results),
        lr=results[-1].lr,
        sums=sums,
        maxima=maxima,
    )


def _added(one: Any, other: Any) -> Any:
    return [a + b for a, b in zip(one, other, strict=True)] if isinstance(one, list) else one + other


def _figures(done: Sequence[tuple[Update, StepResult]], per_version: int, batch_kl: float) -> UpdateFigures:
    """`per_version`: the updates of a version, at most. The mean age is over every token of every update."""
    results = [result for _, result in done]
    ages = [per_version * result.sums.get("age", 0.0) + update.number * result.loss_tokens for update, result in done]
    oldest = [per_version * round(result.maxima.get("age", 0.0)) + update.number for update, result in done]
    return UpdateFigures(
        count=len(done),
        tokens=sum(result.loss_tokens for update, result in done if update.epoch == done[0][0].epoch),
        microbatches=sum(len(update.microbatches) for update, _ in done),
        grad_norm_max=max(result.grad_norm for result in results),
        batch_kl=batch_kl,
        age_mean=sum(ages) / max(sum(result.loss_tokens for result in results), 1),
        age_max=max(oldest),
    )
