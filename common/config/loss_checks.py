"""Checks of the loss's keys against each other; part of common/config/checks.py."""

from collections.abc import Iterator

from common.config.loss_defaults import clip_bounds, correction_bounds
from common.config.parallel_layout import Problem
from common.config.schema import LossConfig

UNCORRECTED = "every weight is 1 then; clip_low and clip_high bound the whole way from the sampler's policy"


def loss_problems(loss: LossConfig) -> Iterator[Problem]:
    """Keys of the loss that contradict each other or would be ignored."""
    key = "learner.loss."
    if loss.clip_dual is not None and loss.objective != "ppo_clip":
        expected = f"unset with objective: {loss.objective}"
        yield key + "clip_dual", expected, str(loss.clip_dual), "it bounds ppo_clip only"
    if loss.objective == "dppo_tv" and max(clip_bounds(loss)) >= 1:
        name = "clip_low" if clip_bounds(loss)[0] >= 1 else "clip_high"
        hint = "with dppo_tv it is a difference of probabilities"
        yield key + name, "less than 1", str(getattr(loss, name)), hint
    yield from _correction(loss)
    if loss.reference is not None and not loss.kl_coefficient:
        expected = "unset while learner.loss.kl_coefficient is 0"
        yield key + "reference", expected, loss.reference, "nothing would be compared with it"


def _correction(loss: LossConfig) -> Iterator[Problem]:
    """Keys of the correction that cannot have an effect, or none that makes sense."""
    key, unset = "learner.loss.", LossConfig()
    for name in ("correction", "correction_level", "correction_low", "correction_cap", "correction_normalize"):
        value = getattr(loss, name)
        if value in (getattr(unset, name), "none"):
            continue
        if loss.correction == "none":
            hint = "it belongs to a correction: tis, icepop or mis"
            yield key + name, "unset with correction: none", str(value), hint
        elif loss.proximal == "behavior":
            expected = "none or tis" if name == "correction" else "unset"
            yield key + name, f"{expected} with proximal: behavior", str(value), UNCORRECTED
    if loss.correction_veto is not None and loss.proximal == "behavior":
        yield key + "correction_veto", "unset with proximal: behavior", str(loss.correction_veto), UNCORRECTED
    if loss.correction_veto is not None and loss.correction_veto >= 1:
        yield key + "correction_veto", "less than 1", str(loss.correction_veto), "1 is the weight of an unchanged token"
    if loss.correction == "none":
        return
    if loss.correction == "tis" and loss.correction_level == "geometric":
        hint = "a geometric mean is no importance weight; icepop and mis compare it with their bounds"
        yield key + "correction_level", "token or sequence with correction: tis", "geometric", hint
        return
    low, cap = correction_bounds(loss)
    if low >= cap:
        name = "correction_cap" if loss.correction_low is None else "correction_low"
        expected = f"correction_low ({low:g}) less than correction_cap ({cap:g})"
        yield key + name, expected, str(getattr(loss, name)), "see common/config/loss_defaults.py for what is unset"
