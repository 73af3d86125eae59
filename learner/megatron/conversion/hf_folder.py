"""Hugging Face folders: configuration, type, companions of the weights, new ones that are complete or absent.

No megatron here.
"""

import contextlib
import hashlib
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from common.config.converted import is_converted, read_converted
from common.errors import UsageError
from common.process.files import replace_folder, sync
from common.safetensors_header import headers

_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
# Megatron keeps the first in float32 whatever the model's type is, and computes the others itself.
_FLOAT32_ANYWAY = ("e_score_correction_bias", "rotary_emb.inv_freq")
_SAMPLE_BYTES = 1024
# These keys of config.json do not change the hidden states.
_IRRELEVANT = {
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "max_position_embeddings", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


def read_config(path: Path) -> Any:
    """The transformers configuration of a Hugging Face folder; common.config.checks has looked at its content.

    Raises UsageError when there is no usable config.json in it.
    """
    from transformers import AutoConfig  # takes seconds

    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"model.path: {path / 'config.json'}: {error}") from None
    if not config.architectures:
        raise UsageError(f"model.path: {path / 'config.json'} names no architectures")
    give_rope_theta(config)
    return config


def check_shape(key: str, path: Path, expected: Any) -> None:
    """Raise UsageError, naming `key`, unless the model in `path` has the shape of the configuration `expected`."""
    theirs, ours = read_config(path).to_dict(), expected.to_dict()
    names = sorted((theirs.keys() | ours.keys()) - _IRRELEVANT)
    pairs = [(name, theirs.get(name), ours.get(name)) for name in names]
    different = [f"{name} {found} instead of {own}" for name, found, own in pairs if found != own]
    if different:
        raise UsageError(f"{key}: {path} is not a model of the policy's shape: {', '.join(different[:3])}")


def give_rope_theta(config: Any) -> None:
    """Copy rope_theta from rope_parameters, where transformers 5 keeps it, to where Megatron-Bridge 0.3.1 reads it.

    The bridge silently takes 10000 without it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            setattr(config, name, rope[name])


def weights_digest(path: Path) -> str:
    """Identifies the weights of a folder, however they are spread over its files.

    It follows from every tensor's name, type and shape, and from its first, middle and last bytes. A converted folder
    has that of the one which it is from.
    """
    if is_converted(path):
        return read_converted(path).weights
    found: list[bytes] = []
    for data, begin, tensors in headers(path):
        for name, told in tensors.items():
            digest = hashlib.sha256(f"{name} {told['dtype']} {told['shape']}".encode())
            start, end = told["data_offsets"]
            for at in (start, (start + end) // 2, max(start, end - _SAMPLE_BYTES)):
                data.seek(begin + at)
                digest.update(data.read(min(_SAMPLE_BYTES, end - at)))
            found.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(found))).hexdigest()


def check_names(path: Path, names: Iterable[str], known: Iterable[str], layers: int) -> None:
    """Raise UsageError for tensors of a folder that no mapping takes; the bridge silently drops them.

    Files may have more than the model's `layers`; those predict further tokens than the next one.
    """
    taken = set(known)
    lost = []
    for name in names:
        parts = name.split(".")
        further = parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= layers
        derived = name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
        if name not in taken and not further and not derived:
            lost.append(name)
    if lost:
        raise UsageError(
            f"model.path: {path}: Megatron has no place for {', '.join(sorted(lost)[:5])} ({len(lost)} tensors in all)"
        )


def stored_dtype(path: Path) -> Literal["float32", "bfloat16"]:
    """The smaller of the learner's types that keeps every weight of a folder; its files' headers say what they have."""
    for _, _, tensors in headers(path):
        for name, told in tensors.items():
            if told["dtype"] != "BF16" and not name.endswith(_FLOAT32_ANYWAY):
                return "float32"
    return "bfloat16"


def stored_bytes(path: Path) -> int:
    """Bytes of the weights of a folder in the type of `stored_dtype`."""
    size = 4 if stored_dtype(path) == "float32" else 2
    return sum(
        math.prod(told["shape"]) * (4 if name.endswith(_FLOAT32_ANYWAY) else size)
        for _, _, tensors in headers(path)
        for name, told in tensors.items()
    )


def copy_companions(source: Path, target: Path) -> None:
    """Copy all but the weights: configuration, tokenizer, chat template, custom code."""
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _WEIGHT_FILES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)


def staging_of(path: Path) -> Path:
    """Where the new folder `path` is until it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty staging folder, which takes the place of `path` when its content is on the disk."""
    staging = staging_of(path)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)  # a full disk needs the space
        raise
    for file in sorted(staging.rglob("*")):
        if file.is_file():
            sync(file)
    sync(staging)
    replace_folder(staging, path)
    sync(path.parent)
