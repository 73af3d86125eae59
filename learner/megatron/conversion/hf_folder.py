"""Hugging Face folders: checks before any group is made, and new ones that are complete or absent. No megatron here."""

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.config.parallel_layout import ModelShape, model_problems, world_problems
from common.config.schema import ParallelConfig
from common.config.supported_models import architecture_problems
from common.errors import UsageError
from common.process.files import replace_folder, sync


def read_config(path: Path) -> Any:
    """The transformers configuration of a Hugging Face folder.

    Raises:
        UsageError: there is no such folder, no usable config.json or weights in it, or another architecture than
            the supported ones.
    """
    if not path.is_dir():
        raise UsageError(f"model.path: expected a Hugging Face folder, found nothing at {path}")
    if not (path / "config.json").is_file():
        raise UsageError(f"model.path: {path} has no config.json")
    if not any(path.glob("*.safetensors")):  # the bridge reads no other format
        raise UsageError(f"model.path: {path} has no *.safetensors")
    from transformers import AutoConfig  # seconds; the checks above need none of it

    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"model.path: {path / 'config.json'}: {error}") from None
    if not config.architectures:
        raise UsageError(f"model.path: {path / 'config.json'} names no architectures")
    check_architecture(path, config)
    give_rope_theta(config)
    return config


def check_architecture(path: Path, config: Any) -> None:
    """Raise UsageError for another architecture than the supported ones, or weights in a quantised format."""
    for problem in architecture_problems(lambda name: getattr(config, name, None)):
        raise UsageError(f"{path}: {problem}")


def check_layout(config: Any, parallel: ParallelConfig, world_size: int) -> None:
    """Whether a model of this configuration can be cut that way.

    Raises:
        UsageError: naming the key that does not fit.
    """
    shape = ModelShape.of(lambda name: getattr(config, name, None))
    for problem in [*world_problems(world_size, parallel), *model_problems(shape, parallel)]:
        raise UsageError(str(problem))


def give_rope_theta(config: Any) -> None:
    """Put rope_theta where megatron-bridge 0.3.1 looks for it.

    transformers 5 keeps rope_theta in config.rope_parameters. Megatron-Bridge 0.3.1 reads config.rope_theta and
    silently takes 10000 without it. Likewise transformers 4 ignores rope_parameters in a file written by 5.

    Raises:
        UsageError: a scaled rotary embedding that this transformers cannot read.
    """
    import transformers

    rope = getattr(config, "rope_parameters", None) or {}
    if int(transformers.__version__.split(".")[0]) < 5 and rope.get("rope_type", "default") != "default":
        raise UsageError(
            f"model config has rope_parameters of type {rope['rope_type']!r}, written by transformers 5, which "
            f"transformers {transformers.__version__} does not read; write the config with transformers 4"
        )
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            setattr(config, name, rope[name])


def check_names(path: Path, names: Iterable[str], known: Iterable[str], layers: int) -> None:
    """Raise UsageError for tensors of a folder that no mapping takes; the bridge silently drops them.

    Files may have more than the model's `layers`; those predict further tokens than the next one.
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


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty staging folder, which takes the place of `path` when its content is on the disk.

    Leftovers of a killed process are removed.
    """
    staging = path.with_name(f".{path.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    yield staging
    for file in sorted(staging.rglob("*")):
        if file.is_file():
            sync(file)
    sync(staging)
    replace_folder(staging, path)
    sync(path.parent)
