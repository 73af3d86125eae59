"""The architectures that are proven to load, compute and come back as in transformers; no torch here.

tests/integration/test_architectures.py is the proof; docs/models.md says what is refused and why.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import UsageError

SUPPORTED = (
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


def check_architecture(path: Path, config: Any) -> None:
    """Whether Megatron can be trusted with a model of this configuration.

    Args:
        path: the folder, for the message.
        config: transformers configuration, or anything with `architectures`.

    Raises:
        UsageError: another architecture, or weights in a quantised format.
    """
    architecture = (getattr(config, "architectures", None) or ["none"])[0]
    if architecture not in SUPPORTED:
        raise UsageError(f"model.path: {path}: {architecture} is not supported; these are: {', '.join(SUPPORTED)}")
    if getattr(config, "quantization_config", None):
        raise UsageError(
            f"model.path: {path} holds quantised weights (quantization_config in config.json), whose scales "
            "Megatron-Bridge drops; convert them to bfloat16 first"
        )


def check_names(path: Path, names: Iterable[str], known: Iterable[str], layers: int) -> None:
    """Whether every tensor of a folder has a place in the Megatron model; the bridge drops others without a word.

    Args:
        path: the folder, for the message.
        names: of the tensors in the folder.
        known: names that some mapping takes.
        layers: of the model; files may hold further ones, which predict more than the next token.

    Raises:
        UsageError: naming some that have none.
    """
    taken = set(known)
    lost = [name for name in names if name not in taken and not _ignored(name, layers)]
    if lost:
        raise UsageError(
            f"model.path: {path}: Megatron has no place for {', '.join(sorted(lost)[:5])} ({len(lost)} tensors in all)"
        )


def _ignored(name: str, layers: int) -> bool:
    parts = name.split(".")
    further = parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= layers
    return further or name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
