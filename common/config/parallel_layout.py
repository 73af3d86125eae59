"""Whether a model can be cut into a parallel layout, and into what; no torch, so config checks can ask too."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.config.schema import ParallelConfig

Problem = tuple[str, str, str, str | None]  # key, expected, found, hint
_KEY = "learner.parallel."


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model's config.json that a config is checked against; 0: not given there."""

    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    intermediate: int
    experts: int
    chosen_experts: int
    expert_intermediate: int
    positions: int

    @staticmethod
    def of(value: Callable[[str], object]) -> "ModelShape":
        """From a function that looks a name of config.json up, and answers None where there is none."""

        def number(*names: str) -> int:
            found = (value(name) for name in names)
            return next((x for x in found if isinstance(x, int) and not isinstance(x, bool)), 0)

        return ModelShape(
            layers=number("num_hidden_layers"),
            heads=number("num_attention_heads"),
            kv_heads=number("num_key_value_heads"),
            vocabulary=number("vocab_size"),
            intermediate=number("intermediate_size"),
            experts=number("num_experts", "num_local_experts", "n_routed_experts"),
            chosen_experts=number("num_experts_per_tok"),
            expert_intermediate=number("moe_intermediate_size"),
            positions=number("max_position_embeddings"),
        )


def document_multiple(parallel: ParallelConfig) -> int:
    """Every document is padded to a multiple of this: each context rank takes two equal chunks of it (zigzag)."""
    return 2 * parallel.context if parallel.context > 1 else 1


def layers_per_stage(layers: int, parallel: ParallelConfig) -> tuple[int, ...]:
    """Layers of each pipeline stage, all its virtual stages together; raises ValueError(*Problem)."""
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    stages, virtual = parallel.pipeline, parallel.virtual_pipeline
    if stages == 1:
        for name, given in (("first_stage_layers", first), ("last_stage_layers", last)):
            if given is not None:
                raise ValueError(f"{_KEY}{name}", "none while pipeline is 1", str(given), None)
        return (layers,)
    middle = stages - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    each = rest // middle if middle else 0
    if each * middle != rest or (middle and each < 1):
        expected = f"a divisor of the model's {layers} layers"
        if first or last:
            expected = f"stages that share {rest} of the model's {layers} layers evenly"
        found = f"{middle} besides those of first_stage_layers and last_stage_layers" if first or last else str(stages)
        hint = None if first or last else f"{_KEY}first_stage_layers and last_stage_layers may differ from the others"
        raise ValueError(f"{_KEY}pipeline", expected, found, hint)
    sizes = [each] * stages
    sizes[0], sizes[-1] = first or each, last or each
    uneven = next((n for n in sizes if n % virtual), None)
    if uneven is not None:
        raise ValueError(f"{_KEY}virtual_pipeline", f"a divisor of a stage's {uneven} layers", str(virtual), None)
    return tuple(sizes)


def world_problems(world_size: int, parallel: ParallelConfig) -> Iterator[Problem]:
    """Why the ranks cannot be cut so, whatever the model."""
    ranks = parallel.model_ranks
    if world_size % ranks:
        made = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {ranks}"
        yield "learner.world_size", f"a multiple of {ranks} ({made})", str(world_size), None
    experts = parallel.pipeline * parallel.expert * parallel.expert_tensor
    if world_size % experts:
        made = f"pipeline {parallel.pipeline} x expert {parallel.expert} x expert_tensor {parallel.expert_tensor}"
        yield "learner.world_size", f"a multiple of {experts} ({made})", str(world_size), None
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        hint = f"raise {_KEY}pipeline first"
        yield f"{_KEY}virtual_pipeline", "1 while pipeline is 1", str(parallel.virtual_pipeline), hint


def model_problems(shape: ModelShape, parallel: ParallelConfig) -> Iterator[Problem]:
    """Why a model of that shape cannot be cut so."""
    divided = {
        "attention heads": shape.heads,
        "key-value heads": shape.kv_heads,
        "vocabulary entries": shape.vocabulary,
        "intermediate features": shape.intermediate,
    }
    for what, n in divided.items():
        if n % parallel.tensor:
            yield f"{_KEY}tensor", f"a divisor of the model's {n} {what}", str(parallel.tensor), None
    if shape.layers:
        try:
            layers_per_stage(shape.layers, parallel)
        except ValueError as error:
            yield error.args[0], error.args[1], error.args[2], error.args[3]
    if not shape.experts:
        for name, size in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
            if size > 1:
                yield f"{_KEY}{name}", "1, since the model has no experts", str(size), None
        return
    if shape.experts % parallel.expert:
        yield f"{_KEY}expert", f"a divisor of the model's {shape.experts} experts", str(parallel.expert), None
    if shape.expert_intermediate % parallel.expert_tensor:
        expected = f"a divisor of the experts' {shape.expert_intermediate} intermediate features"
        yield f"{_KEY}expert_tensor", expected, str(parallel.expert_tensor), None
    if parallel.tensor > 1 and not parallel.sequence:
        hint = "Megatron routes every token once only when the tensor-parallel ranks share the sequence"
        yield f"{_KEY}sequence", "true for a model with experts and tensor > 1", "false", hint
