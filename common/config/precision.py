"""Types of numbers in which the learner does not train, each with its reason."""

import re

FLOAT16 = (
    "float16 training is refused: its gradients leave the type's range without a loss scale, which this learner does "
    "not have; bfloat16 costs the same"
)
FLOAT8 = (
    "FP8 training is refused: no test here proves its gradients, its checkpoints or what nodes would get; nodes may "
    "round their weights instead (rollout.engine.quantization)"
)


def refused_type(name: str) -> str | None:
    """The reason if a person means a type below 16 bits, or float16, by `name`; None for any other name."""
    word = name.lower()
    if re.fullmatch(r"(float|fp|f)_?16|half", word):
        return FLOAT16
    return FLOAT8 if re.match(r"(mx|nv)?(float|fp|f)_?[48]", word) else None
