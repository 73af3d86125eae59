"""The architectures that are proven to load, compute and come back as in transformers; no torch here.

tests/integration/test_architectures.py is the proof; docs/models.md says what is refused and why.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from common.errors import Problem

SUPPORTED = (
    "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM",
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip


def architecture_problems(value: Callable[[str], object]) -> Iterator[Problem]:
    """Why Megatron cannot be trusted with a model; `value` looks a name of its config.json up, None: not there."""
    named = value("architectures")
    first = cast("Sequence[object]", named)[0] if isinstance(named, list | tuple) and named else None
    if first is not None and first not in SUPPORTED:
        hint = "docs/models.md says why"
        yield Problem("model.path", f"one of {', '.join(SUPPORTED)}", f"{first} in config.json", hint)
    if value("quantization_config"):
        found = "quantised ones (quantization_config in config.json)"
        yield Problem("model.path", "weights in bfloat16 or float32", found, "Megatron-Bridge drops their scales")
