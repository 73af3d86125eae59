"""The model of bench/gpu_weights.py: Qwen3-8B's names and shapes, as parameters and as a folder without values."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from common.weights.wire.layout import Layout

HEAD = 128  # dimension of a head
ROWS = {"embed": 151936, "q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "hidden": 4096, "inter": 12288}
Specs = list[tuple[str, tuple[int, ...]]]


def specs(layers: int, tied: bool, divisor: int = 1) -> Specs:
    """Names and shapes of Qwen3-8B with so many layers; `tied`: no lm_head. `divisor` makes each size smaller."""
    size = {name: rows // divisor for name, rows in ROWS.items()}
    hidden, inter, q, kv = size["hidden"], size["inter"], size["q_proj"], size["k_proj"]
    layer: Specs = [
        ("self_attn.q_proj.weight", (q, hidden)), ("self_attn.k_proj.weight", (kv, hidden)),
        ("self_attn.v_proj.weight", (kv, hidden)), ("self_attn.o_proj.weight", (hidden, q)),
        ("self_attn.q_norm.weight", (HEAD,)), ("self_attn.k_norm.weight", (HEAD,)),
        ("mlp.gate_proj.weight", (inter, hidden)), ("mlp.up_proj.weight", (inter, hidden)),
        ("mlp.down_proj.weight", (hidden, inter)),
        ("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,)),
    ]  # fmt: skip
    found: Specs = [("model.embed_tokens.weight", (size["embed"], hidden))]
    found += [(f"model.layers.{i}.{name}", shape) for i in range(layers) for name, shape in layer]
    found.append(("model.norm.weight", (hidden,)))
    return found if tied else [*found, ("lm_head.weight", (size["embed"], hidden))]


class Model:
    """Parameters by name, as far as a flip and its proof need them. It loads tensor by tensor, as vLLM's models do."""

    def __init__(self, named: Specs, where: torch.device) -> None:
        self.held = {name: torch.empty(shape, dtype=torch.bfloat16, device=where) for name, shape in named}
        for tensor in self.held.values():
            tensor.normal_(0.0, 0.02)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.held[name].copy_(tensor)

    def named_parameters(self, remove_duplicate: bool = True) -> Iterable[tuple[str, torch.Tensor]]:
        return self.held.items()

    def named_modules(self) -> tuple[()]:
        return ()

    def layout(self, kind: str) -> Layout:
        return Layout.of([(name, "bfloat16", tuple(t.shape)) for name, t in self.held.items()], checksums=kind)


def write_folder(folder: Path, layers: int, tied: bool, divisor: int) -> None:
    """A Hugging Face folder of the model of `specs` without values."""
    from transformers import Qwen3Config  # takes seconds

    heads = {name: ROWS[name] // divisor // HEAD for name in ("q_proj", "k_proj")}
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=ROWS["embed"] // divisor, hidden_size=ROWS["hidden"] // divisor,
        intermediate_size=ROWS["inter"] // divisor, num_hidden_layers=layers, head_dim=HEAD, tie_word_embeddings=tied,
        num_attention_heads=heads["q_proj"], num_key_value_heads=heads["k_proj"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    where = {name: "model.safetensors" for name, _ in specs(layers, tied, divisor)}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
