"""Whether a model is supported, and can be cut into a parallel layout; no torch, so config checks can ask too."""

import math
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from common.config.architecture import KIND_OF, Architecture, first_class
from common.config.schema import ParallelConfig
from common.errors import Problem

PLAIN = "SLIPSTREAM_PLAIN_LAYERS"  # any value: do without Transformer Engine, though it is installed
_KEY = "learner.parallel."


def architecture_problems(value: Callable[[str], object]) -> Iterator[Problem]:
    """Why Megatron cannot be trusted with a model; `value` looks a name of its config.json up, None: not there."""
    first = first_class(value("architectures"))
    if first is not None and first not in KIND_OF:
        hint = "docs/models.md says why"
        yield Problem("model.path", f"one of {', '.join(KIND_OF)}", f"{first} in config.json", hint)
    if value("quantization_config"):
        found = "quantised ones (quantization_config in config.json)"
        yield Problem("model.path", "weights in bfloat16 or float32", found, "Megatron-Bridge drops their scales")


def document_multiple(parallel: ParallelConfig) -> int:
    """Every document is padded to a multiple of this: each context rank takes two equal chunks of it (zigzag)."""
    return 2 * parallel.context if parallel.context > 1 else 1


def padded(places: int, parallel: ParallelConfig) -> int:
    """Places that a document of so many takes in a microbatch."""
    multiple = document_multiple(parallel)
    return -(-places // multiple) * multiple


def layers_per_stage(layers: int, parallel: ParallelConfig) -> tuple[int, ...]:
    """Layers of each pipeline stage, all its virtual stages together; raises ValueError(Problem)."""
    first = parallel.first_stage_layers
    last = parallel.last_stage_layers
    stages = parallel.pipeline
    virtual = parallel.virtual_pipeline
    if stages == 1:
        for name, given in (("first_stage_layers", first), ("last_stage_layers", last)):
            if given is not None:
                raise ValueError(Problem(f"{_KEY}{name}", "none while pipeline is 1", str(given)))
        return (layers,)
    middle = stages - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    each = rest // middle if middle else 0
    if each * middle != rest or (middle and each < 1):
        ends = "first_stage_layers and last_stage_layers"
        if first or last:
            expected = f"stages that share {rest} of the model's {layers} layers evenly"
            raise ValueError(Problem(f"{_KEY}pipeline", expected, f"{middle} besides those of {ends}"))
        hint = f"{_KEY}{ends} may differ from the others"
        raise ValueError(Problem(f"{_KEY}pipeline", f"a divisor of the model's {layers} layers", str(stages), hint))
    sizes = [each] * stages
    sizes[0], sizes[-1] = first or each, last or each
    uneven = next((n for n in sizes if n % virtual), None)
    if uneven is not None:
        raise ValueError(Problem(f"{_KEY}virtual_pipeline", f"a divisor of a stage's {uneven} layers", str(virtual)))
    return tuple(sizes)


def attention_problems(dtype: str, parallel: ParallelConfig) -> Iterator[Problem]:
    """Layouts without an attention in Transformer Engine, where this Python has it and is to use it."""
    fused = find_spec("transformer_engine") is not None and not os.environ.get(PLAIN)
    if fused and dtype == "float32" and parallel.context > 1:
        hint = f"Transformer Engine has no attention for float32 there; {PLAIN}=1 does without it"
        yield Problem("model.dtype", f"bfloat16 with {_KEY}context {parallel.context}", dtype, hint)


def world_problems(world_size: int, parallel: ParallelConfig) -> Iterator[Problem]:
    """Why the ranks cannot be cut so, whatever the model."""
    for names in (("tensor", "pipeline", "context"), ("pipeline", "expert", "expert_tensor")):
        sizes = {name: getattr(parallel, name) for name in names}
        if world_size % (ranks := math.prod(sizes.values())):
            made = " x ".join(f"{name} {size}" for name, size in sizes.items())
            yield Problem("learner.world_size", f"a multiple of {ranks} ({made})", str(world_size))
    if (virtual := parallel.virtual_pipeline) > 1 and parallel.pipeline == 1:
        yield Problem(f"{_KEY}virtual_pipeline", "1 while pipeline is 1", str(virtual), f"raise {_KEY}pipeline first")


def model_problems(model: Architecture, parallel: ParallelConfig) -> Iterator[Problem]:
    """Why a model of that shape cannot be cut so."""
    divided = {
        "attention heads": model.attention.heads,
        "key-value heads": model.attention.kv_heads,
        "vocabulary entries": model.vocabulary,
        "intermediate features": model.ffn,
    }
    for what, n in divided.items():
        if n % parallel.tensor:
            yield Problem(f"{_KEY}tensor", f"a divisor of the model's {n} {what}", str(parallel.tensor))
    try:
        layers_per_stage(model.layers, parallel)
    except ValueError as error:
        yield error.args[0]
    if model.experts is None:
        for name, size in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
            if size > 1:
                yield Problem(f"{_KEY}{name}", "1, since the model has no experts", str(size))
        return
    if model.experts.count % parallel.expert:
        yield Problem(f"{_KEY}expert", f"a divisor of the model's {model.experts.count} experts", str(parallel.expert))
    if model.experts.ffn % parallel.expert_tensor:
        expected = f"a divisor of the experts' {model.experts.ffn} intermediate features"
        yield Problem(f"{_KEY}expert_tensor", expected, str(parallel.expert_tensor))
    if parallel.tensor > 1 and not parallel.sequence:
        hint = "Megatron routes every token once only when the tensor-parallel ranks share the sequence"
        yield Problem(f"{_KEY}sequence", "true for a model with experts and tensor > 1", "false", hint)
