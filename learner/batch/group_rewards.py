"""The rewards of a group as an advantage estimator sees them, and those of an episode's tokens as a critic does."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.errors import HopelessError, Problem
from common.evaluation import ROUNDING
from common.rollouts import Group, Sample
from learner.loss.types import GroupRewards


def rewards_of(group: Group, sampled: Sequence[int], success: float) -> GroupRewards:
    """`sampled`: tokens of each sample that did not fail, in order; `success`: tasks.success."""
    good = np.array([sample.error is None for sample in group.samples])
    samples = [sample for sample in group.samples if sample.error is None]

    def column(values: Sequence[float]) -> np.ndarray:
        out = np.full(len(good), np.nan)
        out[good] = values
        return out

    lengths = np.zeros(len(good), dtype=np.int64)
    lengths[good] = sampled
    names = dict.fromkeys(name for sample in samples for name in sample.metrics)
    parts = {name: column([sample.metrics.get(name, np.nan) for sample in samples]) for name in names}
    totals = column([sample.reward for sample in samples])
    totals[np.abs(totals - success) <= ROUNDING] = success  # estimators compare both
    return GroupRewards(totals, lengths, parts, success)


def check_estimates(estimates: Any, rewards: Sequence[GroupRewards], function: str) -> None:
    """Raise HopelessError unless an estimator gave a finite number for each sample that did not fail.

    A user's function may fit the rewards of the launch's checks alone. A restart takes the same samples again.
    """
    wrong = f"{len(estimates)} groups of advantages for {len(rewards)} groups of rewards"
    if len(estimates) == len(rewards):
        pairs = zip(estimates, rewards, strict=True)
        shown = (f"{_listed(own)} for the rewards {_listed(g.totals)}" for own, g in pairs if not _usable(own, g))
        wrong = next(shown, "")
    if wrong:
        hint = "NaN is the reward of a failed sample; docs/losses.md says what an estimator must do"
        problem = Problem("learner.loss.advantage", "a finite number for each sample", f"{wrong} by {function}", hint)
        raise HopelessError(str(problem))


def _usable(own: Any, group: GroupRewards) -> bool:
    good = ~np.isnan(group.totals)
    return np.shape(own) == group.totals.shape and bool(np.isfinite(np.asarray(own, dtype=np.float64)[good]).all())


def _listed(numbers: Any) -> object:
    return np.asarray(numbers).round(6).tolist()


def rewards_of_tokens(sample: Sample, number: int) -> np.ndarray:
    """[T] float32: what the tokens of the sample's path `number` were paid.

    Each turn's reward is at its last token. A sample of several paths, or without the spans of its turns, is paid as a
    whole at the last sampled token of the path.
    """
    path = sample.paths[number]
    sampled = path.loss_mask.numpy() > 0
    found = np.zeros(len(sampled), dtype=np.float32)
    spans = sample.turn_spans
    if not sample.branches and spans and len(spans) == len(sample.turn_rewards):
        for (_, end), reward in zip(spans, sample.turn_rewards, strict=True):
            found[min(max(end, 1), len(found)) - 1] += reward
    elif sampled.any():
        found[sampled.nonzero()[0][-1]] = sample.reward
    return found
