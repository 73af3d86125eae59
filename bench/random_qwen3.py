"""Random Qwen3 models of the published shapes: configuration, size by the plan, folder and batches."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from common.config.architecture import Architecture, Attention
from common.config.schema import MemoryConfig, ParallelConfig

# hidden, intermediate, heads, key-value heads, head dimension, tied
QWEN3 = {
    "0.6B": (1024, 3072, 16, 8, 128, True),
    "4B": (2560, 9728, 32, 8, 128, True),
    "8B": (4096, 12288, 32, 8, 128, False),
    "tiny": (64, 128, 4, 2, 16, True),
}


@dataclass(frozen=True)
class Model:
    shape: str
    layers: int
    vocabulary: int
    divisor: int = 1  # makes each size but a head's smaller
    tied: bool | None = None  # None: as published

    @property
    def sizes(self) -> tuple[int, int, int, int, int, bool]:
        *sizes, dim, tied = QWEN3[self.shape]
        hidden, ffn, heads, kv_heads = (size // self.divisor for size in sizes)
        return hidden, ffn, heads, kv_heads, dim, tied if self.tied is None else self.tied

    @property
    def architecture(self) -> Architecture:
        hidden, ffn, heads, kv_heads, dim, tied = self.sizes
        attention = Attention(heads, kv_heads, dim, qk_norm=True)
        dense = (False,) * self.layers
        return Architecture(
            "qwen3", self.layers, hidden, ffn, self.vocabulary, tied, 40960, attention, None, moe_layers=dense
        )

    def config(self) -> Any:
        """The configuration of transformers."""
        from transformers import Qwen3Config

        return Qwen3Config(
            **self.keys(), tie_word_embeddings=self.sizes[-1], max_position_embeddings=40960,
            architectures=["Qwen3ForCausalLM"], eos_token_id=1, pad_token_id=0,
        )  # fmt: skip

    def keys(self) -> dict[str, int]:
        """The shape in config.json's keys."""
        hidden, ffn, heads, kv_heads, dim, _ = self.sizes
        return {
            "vocab_size": self.vocabulary, "hidden_size": hidden, "intermediate_size": ffn,
            "num_hidden_layers": self.layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": dim,
        }  # fmt: skip

    def flops(self, tokens: int, document: int) -> float:
        """Operations of forward and backward over `tokens` in documents of one length."""
        hidden, ffn, heads, kv_heads, dim, _ = self.sizes
        layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn
        weights = self.layers * layer + hidden * self.vocabulary
        seen = (document + 1) / 2
        return tokens * (6.0 * weights + 12.0 * self.layers * heads * dim * seen)

    def planned(self, tokens: int, recompute: str) -> dict[str, int]:
        """Bytes by kind, as `slipstream plan` counts them on one rank."""
        from launch.plan.layout import Sizes
        from launch.plan.memory import ITEM_BYTES, activations, resident

        alone, memory = ParallelConfig(), MemoryConfig(recompute=recompute)  # pyright: ignore[reportArgumentType]
        held = next(resident(self.architecture, alone, Sizes.of(1, alone), "bfloat16"))
        flowing = next(activations(self.architecture, alone, memory, tokens, 1, ITEM_BYTES["bfloat16"]))
        kinds = {
            "weights": held.parameters,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "activations": flowing.layers,
            "logits": flowing.output + flowing.recomputed,
        }
        return {**kinds, "forward and backward": sum(kinds.values()), "update": sum([*kinds.values()][:3])}

    def fits(self, tokens: int, recompute: str, device: float, activations: float = 1.0) -> bool:
        """Whether the plan fits, when a layer keeps `activations` times as much as the plan says."""
        from launch.plan.memory import fits

        planned = self.planned(tokens, recompute)
        return fits(planned["forward and backward"] + (activations - 1.0) * planned["activations"], device)


def write_folder(folder: Path, model: Model) -> None:
    """A Hugging Face folder without values: `write_header` says what is in the place of its weights."""
    model.config().save_pretrained(folder)
    write_header(folder, model)


def write_header(folder: Path, model: Model) -> None:
    """A safetensors file with names and shapes, whose values are a hole: they are zeros, and take no space."""
    from launch.plan.layout import hf_tensors

    header: dict[str, Any] = {}
    at = 0
    for name, shape in hf_tensors(model.architecture):
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at := at + 2 * prod(shape))}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + at)


def batches_of(model: Model, tokens: int, document: int, pieces: int = 1) -> list[Any]:
    """`pieces` microbatches, `tokens` in all."""
    import numpy as np

    from learner.batch.packing import Document, build

    draw = np.random.Generator(np.random.PCG64(0))
    rows = draw.integers(3, model.vocabulary, (tokens // document, document + 1)).astype(np.int32)
    documents = [Document(row, np.ones(len(row), dtype=np.uint8)) for row in rows]
    each = len(documents) // pieces
    return build(documents, [[*range(n * each, (n + 1) * each)] for n in range(pieces)])
