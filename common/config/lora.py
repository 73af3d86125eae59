"""The adapters that `learner.lora` asks for, and the layers that may have one."""

from typing import Annotated

import msgspec
from msgspec import Meta

from common.config.types import Positive, PositiveFloat, Strict, Text

# A linear layer under Megatron's name, and its matrices under those of Hugging Face
PROJECTIONS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


class LoraConfig(Strict, frozen=True, kw_only=True):
    """Adapters of low rank that train in the place of the model's weights; docs/lora.md."""

    rank: Positive  # Rank of every adapter. Raise it where adapters learn less than the whole model does.
    alpha: PositiveFloat | None = None  # An adapter's output is multiplied by alpha / rank. Unset, alpha is 2 x rank.
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # Share of an adapter's inputs that a warm start drops.
    # Linear layers that get an adapter, in every layer of the model.
    targets: list[Text] = msgspec.field(default_factory=lambda: [*PROJECTIONS])

    @property
    def factor(self) -> float:
        """`alpha`, as it applies."""
        return 2.0 * self.rank if self.alpha is None else self.alpha
