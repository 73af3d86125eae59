"""Checks of `learner.lora`: whether its adapters fit the model, the layout and the other keys."""

from collections.abc import Iterator

from common.config.architecture import Architecture, LatentAttention
from common.config.lora import PROJECTIONS, LoraConfig
from common.config.schema import BaseConfig
from common.errors import Problem, meant

_KEY = "learner.lora."
_FEED_FORWARD = {"linear_fc1", "linear_fc2"}


def lora_problems(config: BaseConfig, model: Architecture | None) -> Iterator[Problem]:
    """Keys of the adapters that fit neither the model, the layout nor the other keys."""
    lora = config.learner.lora
    if lora is None:
        if config.rl is not None and config.rl.weights.encoding == "adapter":
            yield Problem("weights.encoding", "full or delta without learner.lora", "adapter")
        return
    tensor = config.learner.parallel.tensor
    if lora.rank % tensor:
        hint = "every tensor-parallel rank has an equal part of each adapter"
        yield Problem(f"{_KEY}rank", f"a multiple of learner.parallel.tensor ({tensor})", hint=hint)
    yield from _targets(lora)
    if lora.dropout and config.rl is not None:
        hint = "a token's ratio would compare two networks that drop different features"
        yield Problem(f"{_KEY}dropout", "0 in an RL job", hint=hint)
    if lora.dropout and tensor > 1:
        hint = "its ranks would drop the same places of different features"
        yield Problem(f"{_KEY}dropout", "0 with learner.parallel.tensor > 1", hint=hint)
    if config.learner.moe.balance != "none":
        hint = "the routers belong to the weights that stay as they are"
        yield Problem("learner.moe.balance", "none with learner.lora", hint=hint)
    if model is None:
        return
    if isinstance(model.attention, LatentAttention):
        hint = "no adapter is proven there"
        yield Problem("learner.lora", "unset for a model with latent attention", "a section", hint)
    elif model.experts is not None and (found := sorted(_FEED_FORWARD & set(lora.targets))):
        hint = "experts have no adapters; linear_qkv and linear_proj may have some"
        yield Problem(f"{_KEY}targets", "no feed-forward layers in a model with experts", ", ".join(found), hint)


def _targets(lora: LoraConfig) -> Iterator[Problem]:
    key = f"{_KEY}targets"
    layers = ", ".join(PROJECTIONS)
    if len(set(lora.targets)) < max(1, len(lora.targets)):
        yield Problem(key, f"one or more of {layers}, each once", ", ".join(lora.targets) or "none")
    for name in lora.targets:
        if name not in PROJECTIONS:
            fused = next((ours for ours, theirs in PROJECTIONS.items() if name in theirs), None)
            hint = meant(name, PROJECTIONS, "docs/lora.md")
            if fused is not None:
                hint = f"'{name}' is a part of '{fused}', whose parts share an adapter"
            yield Problem(key, f"some of {layers}", name, hint)
