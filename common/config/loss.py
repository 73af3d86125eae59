"""Bounds and options of the loss that apply when the config leaves them unset, with their sources; checks of its keys.

A part that is 'module:function' has no bounds here. Its options are checked where it can be imported, which takes
torch: learner/loss/plugins.py.
"""

from collections.abc import Iterator, Mapping

from common.config.loss_keys import LossConfig
from common.config.schema import Config
from common.config.tasks import PENALTY
from common.errors import Problem, meant

UNCORRECTED = "every weight is 1 then; clip_low and clip_high bound the whole way from the sampler's policy"
UNMOVED = "under proximal: recompute no token has moved when the batch begins"

Bounds = tuple[float, float]

# objective -> (clip_low, clip_high)
CLIP_BOUNDS: dict[str, Bounds] = {
    "ppo_clip": (0.2, 0.28),  # DAPO (arXiv 2503.14476), section 3.1
    "cispo": (1.0, 4.0),  # MiniMax-M1 (arXiv 2506.13585), section 3.1: no lower bound; up to 5 as ScaleRL and TRL
    "gspo": (3e-4, 4e-4),  # GSPO (arXiv 2507.18071), section 5.1
    "dppo_tv": (0.2, 0.2),  # probability differences; prime-rl
    "dppo_kl": (0.05, 0.05),  # nats; DPPO (arXiv 2602.04879), Binary-KL
    "gmpo": (0.4, 0.4),  # logarithms of ratios; GMPO (arXiv 2507.20673), section 4; TRL
    "clip_cov": (0.2, 0.2),  # verl's clip_ratio
}
PLUGIN_BOUNDS = CLIP_BOUNDS["ppo_clip"]  # clip_low and clip_high of 'module:function', where they are unset
WITHOUT_BOUNDS = ("sapo", "kl_cov", "m2po")

STOPS = 1.0  # nats per token: a learner.loss.kl_stop above it bounds nothing that is worth training
# objective -> clip_high from which a token of positive advantage keeps its gradient although it is about 10 times as
# likely, or almost certain. Tokens of negative advantage need no bound: their gradient r A fades.
UNBOUNDED: dict[str, float] = {
    **dict.fromkeys(("ppo_clip", "cispo", "clip_cov"), 10.0),  # ratios above 1
    "gspo": 0.5,  # geometric means of the ratios of a sample's tokens, above 1
    "sapo": 10.0,  # 1 / tau_high
    "dppo_tv": 0.9,  # probability differences
    "dppo_kl": 2.0,  # nats
    "gmpo": 2.4,  # logarithms of ratios
    **dict.fromkeys(("kl_cov", "m2po"), 0.0),  # they have no bound
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
PLUGIN_CORRECTION_BOUNDS: Bounds = (0.0, 2.0)  # as tis of tokens

# part -> the values that its options may have, both ends included; their defaults are those of its function
OPTIONS: dict[str, dict[str, Bounds]] = {
    "sapo": {"tau_high": (1e-3, 1e3), "tau_low": (1e-3, 1e3)},
    "clip_cov": {"share": (0.0, 1.0), "least": (-1e9, 1e9), "most": (-1e9, 1e9)},
    "kl_cov": {"share": (0.0, 1.0), "coefficient": (0.0, 1e9)},
    "m2po": {"moment": (1e-9, 1e9)},
    "pass_at_k": {"k": (1.0, 1e9)},
}
DEFAULT_K = 4.0  # samples of one draw in pass_at_k
MARKING = ("clip_cov", "kl_cov", "m2po")  # they see the whole batch; learner/loss/whole_batch.py
# estimator -> why tasks.truncated: penalized does not go with it
UNPENALIZED = {
    "maxrl": "it divides by the mean of a group's rewards, which the penalty brings near 0",
    "pass_at_k": "a right answer with a penalty would count as a failure",
}
MARK_OPTIONS = ("share", "least", "most", "moment")  # those of their options that say which tokens are marked
OVER_THE_BATCH = ("reinforce_pp", "gdpo", "gae")  # estimators by which a group of equal rewards may have advantages
OF_ONE = ("reinforce_pp", "gae")  # estimators by which a sample alone in its group may have an advantage

# The keys of the loss that take 'module:function'.
PLUGIN_KEYS = ("objective", "advantage", "correction", "reduction", "kl_estimator")


def is_plugin(name: str) -> bool:
    """Whether the name of a part is an import path."""
    return ":" in name


def plugins(config: Config) -> dict[str, str]:
    """The import path by the key that names it.

    A source has an entry if its estimator or the options for it are its own.
    """
    loss = config.learner.loss
    named = {f"learner.loss.{key}": getattr(loss, key) for key in PLUGIN_KEYS}
    for name, source in config.tasks.sources.items():
        if source.advantage is not None or source.advantage_options:
            named[f"tasks.sources.{name}.advantage"] = source.advantage or loss.advantage
    return {key: name for key, name in named.items() if is_plugin(name)}


def clip_bounds(config: LossConfig) -> Bounds:
    """(clip_low, clip_high) of the config's objective."""
    low, high = CLIP_BOUNDS.get(config.objective, PLUGIN_BOUNDS)
    return low if config.clip_low is None else config.clip_low, high if config.clip_high is None else config.clip_high


def correction_bounds(config: LossConfig) -> Bounds:
    """(correction_low, correction_cap) of the config's correction; raises KeyError when it has no such level."""
    if is_plugin(config.correction):
        low, cap = PLUGIN_CORRECTION_BOUNDS
    else:
        low, cap = CORRECTION_BOUNDS[config.correction, config.correction_level]
    low = low if config.correction_low is None else config.correction_low
    return low, cap if config.correction_cap is None else config.correction_cap


def loss_problems(loss: LossConfig, measures_kl: bool = False) -> Iterator[Problem]:
    """Keys of the loss that contradict each other or would be ignored; `measures_kl`: a source has a KL term."""
    key = "learner.loss."
    yield from _objective(loss)
    yield from option_problems(f"{key}objective_options", loss.objective, loss.objective_options)
    yield from _correction(loss)
    if loss.reference is not None and not (loss.kl_coefficient or measures_kl):
        expected = "unset while learner.loss.kl_coefficient is 0"
        yield Problem(key + "reference", expected, hint="nothing would be compared with it")


def _objective(loss: LossConfig) -> Iterator[Problem]:
    """Bounds that the objective has not, or cannot have, and what leaves it without effect."""
    key = "learner.loss."
    clips = loss.objective in ("ppo_clip", "clip_cov") or is_plugin(loss.objective)
    if loss.clip_dual is not None and not clips:
        hint = "it bounds ppo_clip and clip_cov only"
        yield Problem(key + "clip_dual", f"unset with objective: {loss.objective}", hint=hint)
    for name in ("clip_low", "clip_high") if loss.objective in WITHOUT_BOUNDS else ():
        if getattr(loss, name) is not None:
            hint = "it has objective_options instead; docs/algorithms.md"
            yield Problem(key + name, f"unset with objective: {loss.objective}", hint=hint)
    if loss.objective == "dppo_tv" and max(clip_bounds(loss)) >= 1:
        name = "clip_low" if clip_bounds(loss)[0] >= 1 else "clip_high"
        yield Problem(key + name, "less than 1", hint="with dppo_tv it is a difference of probabilities")
    if loss.objective in MARKING and loss.distillation is not None and loss.distillation.objective == "advantage":
        hint = "it compares advantages over the batch before the teacher's opinion is in them"
        yield Problem(key + "objective", "another one with distillation.objective: advantage", hint=hint)
    least, most = (loss.objective_options.get(name, default) for name, default in (("least", 1.0), ("most", 5.0)))
    if loss.objective == "clip_cov" and least >= most:
        yield Problem(key + "objective_options", "least below most with clip_cov", f"{least:g} and {most:g}")


def option_problems(key: str, name: str, options: Mapping[str, float]) -> Iterator[Problem]:
    """Options, at `key`, that the part of this name has not, or values that they cannot have."""
    if is_plugin(name) or name == "gdpo":
        return
    known = OPTIONS.get(name, {})
    for option, value in options.items():
        if option not in known:
            hint = meant(option, known, f"{name} has {', '.join(known) or 'none'}")
            yield Problem(key, f"options of {name}", option, hint)
            continue
        least, most = known[option]
        if not least <= value <= most:
            yield Problem(key, f"{option} from {least:g} to {most:g} with {name}", f"{value:g}")


def advantage_problems(at: str, config: Config) -> Iterator[Problem]:
    """Options of a source's estimator, the one at the key path `at`; `config` is its job."""
    loss = config.learner.loss
    key = f"{at}.advantage_options"
    options = loss.advantage_options
    yield from option_problems(key, loss.advantage, options)
    if config.tasks.truncated == "penalized" and (why := UNPENALIZED.get(loss.advantage)):
        expected = "another estimator with tasks.truncated: penalized"
        yield Problem(f"{at}.advantage", expected, loss.advantage, f"{why}; docs/rewards.md has the other values")
    size = config.rollout.group_size
    if loss.advantage == "pass_at_k" and not 1 <= (k := options.get("k", DEFAULT_K)) <= size - 1:
        hint = "k of all the samples of a group succeed as soon as one does, so nothing would be compared"
        yield Problem(key, f"k from 1 to rollout.group_size - 1 ({size - 1}) with pass_at_k", f"{k:g}", hint)
    if loss.advantage == "pass_at_k" and options.get("k", DEFAULT_K) % 1:
        yield Problem(key, "a whole number as k", f"{options['k']:g}")
    if loss.advantage == "gdpo":
        yield from _gdpo(key, config)


def _gdpo(key: str, config: Config) -> Iterator[Problem]:
    """Rewards that gdpo lacks, or does not know."""
    weights = config.learner.loss.advantage_options
    page = "docs/algorithms.md"
    if not any(weights.values()):
        yield Problem(key, "the names of the rewards with their weights, some not 0, for gdpo", "none", page)
    if config.tasks.truncated == "penalized" and weights.get(PENALTY, 0) <= 0:
        hint = "gdpo sees the rewards that it names alone, so the penalty would have no effect"
        expected = f"{PENALTY} with a weight above 0, for gdpo with tasks.truncated: penalized"
        yield Problem(key, expected, f"{weights.get(PENALTY, 'none')}", hint)
    known = _reward_names(config)
    for name in weights:
        if known is not None and name not in known:
            yield Problem(key, "rewards of this job", name, meant(name, known, f"it has {', '.join(sorted(known))}"))


def _reward_names(config: Config) -> set[str] | None:
    """The names of the numbers of a sample; None where only the environment knows them."""
    reward = config.tasks.reward
    if reward is None or isinstance(reward, str):
        return None
    names = {PENALTY} if config.tasks.truncated == "penalized" else set[str]()
    for entry in reward:
        own = entry.name or (entry.function or entry.scorer or "").rpartition(":")[2]
        several = entry.weight if isinstance(entry.weight, dict) else None
        names |= {own} if several is None else {"/".join(filter(None, (entry.name, each))) for each in several}
    return names


def update_problems(config: Config) -> Iterator[Problem]:
    """Keys about the updates of a step that contradict each other or would be ignored."""
    learner = config.learner
    loss = learner.loss
    if learner.minibatches > learner.groups_per_step:
        hint = "an update trains on whole groups"
        yield Problem("learner.minibatches", f"at most learner.groups_per_step ({learner.groups_per_step})", hint=hint)
    idle = loss.objective == "m2po" or (loss.objective == "kl_cov" and learner.updates == 1)
    if idle and loss.proximal == "recompute":
        hint = f"{UNMOVED}, and {loss.objective} would change nothing"
        expected = f"behavior or loglinear with objective: {loss.objective}"
        yield Problem("learner.loss.proximal", expected, hint=hint)
    _, high = clip_bounds(loss)
    if loss.objective == "sapo":
        high = 1 / max(loss.objective_options.get("tau_high", 1.0), OPTIONS["sapo"]["tau_high"][0])
    free = high >= UNBOUNDED.get(loss.objective, UNBOUNDED["ppo_clip"])
    # cispo caps a ratio, which begins at 1 elsewhere; a part of anybody's may have no bound
    free = free or (loss.proximal == "behavior" and (loss.objective == "cispo" or is_plugin(loss.objective)))
    if learner.epochs > 1 and free and (loss.kl_stop is None or loss.kl_stop > STOPS):
        expected = f"1 with objective: {loss.objective}, these bounds, and no learner.loss.kl_stop of at most {STOPS:g}"
        hint = "a likely token may keep its gradient, so each epoch would push it further; minibatches do not"
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
