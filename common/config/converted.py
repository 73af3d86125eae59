"""A model folder that `slipstream convert` wrote: its weights are a Megatron checkpoint instead of safetensors files.

    DIR/config.json, tokenizer files   as in the Hugging Face folder; every role reads them there
    DIR/megatron/                      the weights, which any parallel layout loads
    DIR/megatron/converted.json        written last: where they are from, and which files belong to them

Only the learner reads the weights. A node gets its own from the learner. No torch here.
"""

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from common.errors import UsageError

WEIGHTS = "megatron"
MANIFEST = "converted.json"
FORMAT = 1
AGAIN = "run `slipstream convert` again, into another folder"


class Forward(msgspec.Struct, frozen=True):
    """Hugging Face's results for the documents of the forward check (learner/megatron/conversion/verify.py)."""

    logprobs: list[float]  # in float32
    rounding: float = 0.0  # nats by which its own differ in bfloat16, for the share of tokens that must agree


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """The content of converted.json."""

    format: int = FORMAT
    source: str  # the Hugging Face folder; for a name of the hub its copy in the cache
    dtype: Literal["float32", "bfloat16"]  # the stored weights' type; it keeps every value of the source
    config: str  # SHA-256 of config.json
    weights: str  # identifies the weights of the source (learner/megatron/conversion/hf_folder.py)
    names: list[str]  # Hugging Face names of the tensors that the source had
    files: dict[str, int]  # bytes of each file in DIR/megatron, by its path there
    forward: Forward | None = None  # None for a source that the forward check does not run

    @property
    def weight_bytes(self) -> int:
        return sum(self.files.values())


def is_converted(folder: Path) -> bool:
    """Whether the learner takes the weights from DIR/megatron; safetensors files come first where both are."""
    return (folder / WEIGHTS).is_dir() and not any(folder.glob("*.safetensors"))


def config_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


def read_converted(folder: Path) -> Converted:
    """The manifest of a converted folder; raises UsageError when the folder is incomplete, damaged or mixed."""
    weights = folder / WEIGHTS
    manifest = weights / MANIFEST
    try:
        found = msgspec.json.decode(manifest.read_bytes(), type=Converted)
        if found.format != FORMAT:
            raise UsageError(f"{manifest} has format {found.format}, this version reads {FORMAT}; {AGAIN}")
        for name, size in found.files.items():
            if (here := (weights / name).stat().st_size) != size:
                raise UsageError(f"{weights / name} has {here:,} bytes instead of {size:,}; copy it anew, or {AGAIN}")
        same = config_digest(folder) == found.config
    except FileNotFoundError as error:
        missing = f"{folder} is not completely converted: {error.filename} is missing"
        raise UsageError(f"{missing}; copy it anew, or {AGAIN}") from None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise UsageError(f"{manifest} cannot be read: {error}; {AGAIN}") from None
    if not same:
        why = "the weights beside it are converted for another config.json"
        raise UsageError(f"{folder / 'config.json'} was changed: {why}; {AGAIN}")
    return found
