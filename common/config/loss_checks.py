"""Checks of the loss's keys against each other; part of common/config/checks.py."""

from collections.abc import Iterator

from common.config.loss_defaults import clip_bounds, correction_bounds
from common.config.schema import LossConfig
from common.errors import Problem

UNCORRECTED = "every weight is 1 then; clip_low and clip_high bound the whole way from the sampler's policy"


def loss_problems(loss: LossConfig) -> Iterator[Problem]:
    """Keys of the loss that contradict each other or would be ignored."""
    key = "learner.loss."
    if loss.clip_dual is not None and loss.objective != "ppo_clip":
        expected = f"unset with objective: {loss.objective}"
        yield Problem(key + "clip_dual", expected, hint="it bounds ppo_clip only")
    if loss.objective == "dppo_tv" and max(clip_bounds(loss)) >= 1:
        name = "clip_low" if clip_bounds(loss)[0] >= 1 else "clip_high"
        yield Problem(key + name, "less than 1", hint="with dppo_tv it is a difference of probabilities")
    yield from _correction(loss)
    if loss.reference is not None and not loss.kl_coefficient:
        expected = "unset while learner.loss.kl_coefficient is 0"
        yield Problem(key + "reference", expected, hint="nothing would be compared with it")


def _correction(loss: LossConfig) -> Iterator[Problem]:
    """Keys of the correction that cannot have an effect, or none that makes sense."""
    key, unset = "learner.loss.", LossConfig()
    for name in ("correction", "correction_level", "correction_low", "correction_cap", "correction_normalize"):
        value = getattr(loss, name)
        if value in (getattr(unset, name), "none"):
            continue
        if loss.correction == "none":
            hint = "it belongs to a correction: tis, icepop or mis"
            yield Problem(key + name, "unset with correction: none", hint=hint)
        elif loss.proximal == "behavior":
            expected = "none or tis" if name == "correction" else "unset"
            yield Problem(key + name, f"{expected} with proximal: behavior", hint=UNCORRECTED)
    if loss.correction_veto is not None and loss.proximal == "behavior":
        yield Problem(key + "correction_veto", "unset with proximal: behavior", hint=UNCORRECTED)
    if loss.correction_veto is not None and loss.correction_veto >= 1:
        yield Problem(key + "correction_veto", "less than 1", hint="1 is the weight of an unchanged token")
    if loss.correction == "none":
        return
    if loss.correction == "tis" and loss.correction_level == "geometric":
        hint = "a geometric mean is no importance weight; icepop and mis compare it with their bounds"
        yield Problem(key + "correction_level", "token or sequence with correction: tis", hint=hint)
        return
    low, cap = correction_bounds(loss)
    if low >= cap:
        name = "correction_cap" if loss.correction_low is None else "correction_low"
        expected = f"correction_low ({low:g}) less than correction_cap ({cap:g})"
        yield Problem(key + name, expected, hint="see common/config/loss_defaults.py for what is unset")
