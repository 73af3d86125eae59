"""Bounds of the loss that apply when the config leaves them unset, with their sources. Imports no torch."""

from common.config.schema import LossConfig

Bounds = tuple[float, float]

# objective -> (clip_low, clip_high)
CLIP_BOUNDS: dict[str, Bounds] = {
    "ppo_clip": (0.2, 0.28),  # DAPO (arXiv 2503.14476), section 3.1
    "cispo": (
        1.0,
        4.0,
    ),  # no lower bound (MiniMax-M1, arXiv 2506.13585, section 3.1); ratios up to 5 as ScaleRL and TRL
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
    return (
        low if config.correction_low is None else config.correction_low,
        cap if config.correction_cap is None else config.correction_cap,
    )
