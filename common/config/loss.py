"""Bounds of the loss that apply when the config leaves them unset, with their sources, and checks of its keys."""

from collections.abc import Iterator

from common.config.schema import Config, LossConfig
from common.errors import Problem

UNCORRECTED = "every weight is 1 then; clip_low and clip_high bound the whole way from the sampler's policy"
NO_BOUND = (1.0, 1e3)  # no ratio is below 1 - 1, and one above 1,001 is no longer a matter of clipping
NEVER_STOPS = {"cispo"}  # objectives whose bound leaves every token its gradient

Bounds = tuple[float, float]

# objective -> (clip_low, clip_high)
CLIP_BOUNDS: dict[str, Bounds] = {
    "ppo_clip": (0.2, 0.28),  # DAPO (arXiv 2503.14476), section 3.1
    "cispo": (1.0, 4.0),  # MiniMax-M1 (arXiv 2506.13585), section 3.1: no lower bound; up to 5 as ScaleRL and TRL
    "gspo": (3e-4, 4e-4),  # GSPO (arXiv 2507.18071), section 5.1
    "dppo_tv": (0.2, 0.2),  # probability differences; prime-rl
}

# (correction, correction_level) -> (correction_low, correction_cap)
CORRECTION_BOUNDS: dict[tuple[str, str], Bounds] = {
    ("tis", "token"): (0.0, 2.0),  # verl, slime, SkyRL
    ("tis", "sequence"): (0.0, 5.0),  # SkyRL; verl: 2 to 10
    ("icepop", "token"): (0.5, 5.0),  # IcePop (arXiv 2510.18855); NeMo-RL
    ("icepop", "sequence"): (0.2, 5.0),  # as mis
    ("icepop", "geometric"): (0.999, 1.002),  # NeMo-RL's seq-mask-tis
    ("mis", "token"): (0.5, 2.0),  # slime
    ("mis", "sequence"): (0.2, 5.0),  # SkyRL's cap; its inverse below, as verl
    ("mis", "geometric"): (0.99, 1.01),  # SkyRL
}


def clip_bounds(config: LossConfig) -> Bounds:
    """(clip_low, clip_high) of the config's objective."""
    low, high = CLIP_BOUNDS[config.objective]
    return low if config.clip_low is None else config.clip_low, high if config.clip_high is None else config.clip_high


def correction_bounds(config: LossConfig) -> Bounds:
    """(correction_low, correction_cap) of the config's correction; raises KeyError when it has no such level."""
    low, cap = CORRECTION_BOUNDS[config.correction, config.correction_level]
    low = low if config.correction_low is None else config.correction_low
    return low, cap if config.correction_cap is None else config.correction_cap


def loss_problems(loss: LossConfig, measures_kl: bool = False) -> Iterator[Problem]:
    """Keys of the loss that contradict each other or would be ignored; `measures_kl`: a source has a KL term."""
    key = "learner.loss."
    if loss.clip_dual is not None and loss.objective != "ppo_clip":
        yield Problem(key + "clip_dual", f"unset with objective: {loss.objective}", hint="it bounds ppo_clip only")
    if loss.objective == "dppo_tv" and max(clip_bounds(loss)) >= 1:
        name = "clip_low" if clip_bounds(loss)[0] >= 1 else "clip_high"
        yield Problem(key + name, "less than 1", hint="with dppo_tv it is a difference of probabilities")
    yield from _correction(loss)
    if loss.reference is not None and not (loss.kl_coefficient or measures_kl):
        expected = "unset while learner.loss.kl_coefficient is 0"
        yield Problem(key + "reference", expected, hint="nothing would be compared with it")


def update_problems(config: Config) -> Iterator[Problem]:
    """Keys about the updates of a step that contradict each other or would be ignored."""
    learner = config.learner
    loss = learner.loss
    if learner.minibatches > learner.groups_per_step:
        hint = "an update trains on whole groups"
        yield Problem("learner.minibatches", f"at most learner.groups_per_step ({learner.groups_per_step})", hint=hint)
    low, high = clip_bounds(loss)
    free = loss.objective in NEVER_STOPS or (low >= NO_BOUND[0] and high >= NO_BOUND[1])
    if learner.epochs > 1 and loss.proximal == "behavior" and free:
        expected = f"1 with proximal: behavior, objective: {loss.objective} and bounds that take no token's gradient"
        hint = "each epoch would push the same tokens further: use another objective or bounds, or proximal: recompute"
        yield Problem("learner.epochs", expected, hint=hint)
    if loss.kl_stop is not None and learner.updates == 1:
        hint = "learner.epochs and learner.minibatches are 1, so no update is left to leave out"
        yield Problem("learner.loss.kl_stop", "unset with one update per batch", hint=hint)
    most = config.staleness.max_updates
    if most is not None and most < learner.updates - 1:
        hint = "even the newest tokens are so old in the last update, which would train nothing"
        expected = f"at least {learner.updates - 1} with {learner.updates} updates per batch"
        yield Problem("staleness.max_updates", expected, hint=hint)


def _correction(loss: LossConfig) -> Iterator[Problem]:
    """Keys of the correction that cannot have an effect, or none that makes sense."""
    key = "learner.loss."
    unset = LossConfig()
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
        yield Problem(key + name, expected, hint="see common/config/loss.py for what is unset")
