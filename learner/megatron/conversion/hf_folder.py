"""Checks of a Hugging Face folder and a parallel layout, without megatron and before any group is made."""

import json
from pathlib import Path
from typing import Any

from common.config.parallel_layout import ModelShape, model_problems, world_problems
from common.config.schema import ParallelConfig
from common.errors import UsageError
from learner.megatron.conversion.architectures import check_architecture


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
    try:
        architectures = json.loads((path / "config.json").read_text()).get("architectures")
    except ValueError as error:
        raise UsageError(f"model.path: {path / 'config.json'} is not JSON: {error}") from None
    if not architectures:
        raise UsageError(f"model.path: {path / 'config.json'} names no architectures")
    from transformers import AutoConfig  # seconds; the checks above need none of it

    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"model.path: {path / 'config.json'}: {error}") from None
    check_architecture(path, config)
    give_rope_theta(config)
    return config


def check_layout(config: Any, parallel: ParallelConfig, world_size: int) -> None:
    """Whether a model of this configuration can be cut that way.

    Raises:
        UsageError: naming the key that does not fit.
    """
    shape = ModelShape.of(lambda name: getattr(config, name, None))
    for key, expected, found, hint in [*world_problems(world_size, parallel), *model_problems(shape, parallel)]:
        raise UsageError(f"{key}: expected {expected}, found {found}{f'; {hint}' if hint else ''}")


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
