"""Whether Megatron has a model, and a place for every tensor of its folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.config.supported_models import architecture_problems
from common.errors import UsageError


def check_architecture(path: Path, config: Any) -> None:
    """Whether Megatron can be trusted with a model of this configuration.

    Args:
        path: the folder, for the message.
        config: transformers configuration.

    Raises:
        UsageError: another architecture than the supported ones, or weights in a quantised format.
    """
    for key, expected, found, hint in architecture_problems(lambda name: getattr(config, name, None)):
        raise UsageError(f"{key}: {path}: expected {expected}, found {found}{f'; {hint}' if hint else ''}")


def check_names(path: Path, names: Iterable[str], known: Iterable[str], layers: int) -> None:
    """Check that every tensor of a folder has a counterpart in the Megatron model; the bridge silently drops others.

    Args:
        path: the folder, for the message.
        names: names of the tensors in the folder.
        known: names that some mapping takes.
        layers: layers of the model; files may have more of them, which predict further tokens than the next one.

    Raises:
        UsageError: some tensors have none; names them.
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
