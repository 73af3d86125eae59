"""From a config in configs/ to its miniature: the same architecture and features at sizes that 8 CPU ranks can train.

Kept: architecture class, tied or untied embeddings, rope scaling, latent attention and its norms, the dense layers
before the sparse ones, everything a router does, uneven stages, recomputation, offload, expert options, loss.
Reduced: sizes, numbers of layers and experts; parallel sizes are halved, the largest first, until 8 ranks suffice.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from common.config.architecture import read_architecture
from common.config.loading import load_either
from common.config.parallel_layout import layers_per_stage
from common.config.schema import (
    BaseConfig,
    Config,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    SftLearnerConfig,
)
from tests.integration.megatron import tiny_models

ROOT = Path(__file__).resolve().parents[3]
RANKS = 8
VOCABULARY = 128
HALVED = ("data", "pipeline", "tensor", "context")  # in this order among equals
OPTIMIZER = msgspec.structs.replace(tiny_models.OPTIMIZER, lr=3e-3, warmup_steps=0, schedule="constant", weight_decay=0)


@dataclass(frozen=True)
class Miniature:
    """A model's config.json and what the learner is told."""

    name: str
    ranks: int
    document: dict[str, Any]
    learner: LearnerConfig | SftLearnerConfig
    max_tokens: int | None  # only an RL job has it

    def alone(self) -> LearnerConfig | SftLearnerConfig:
        """The learner of the same miniature on one rank."""
        return msgspec.structs.replace(self.learner, world_size=1, parallel=ParallelConfig())

    @property
    def routing(self) -> tuple[int, int] | None:
        """(MoE layers, experts) when routing is replayed."""
        model = read_architecture(self.document)
        replays = self.learner.moe.replay_routing and model.experts is not None
        return (sum(model.moe_layers), model.experts.count) if replays else None

    def backend(self, folder: Path, learner: LearnerConfig | SftLearnerConfig) -> Any:
        """Collective."""
        from learner.megatron.backend import MegatronBackend

        model = ModelConfig(path=str(folder / "models" / self.name), dtype="float32", verify=False)
        return MegatronBackend(model, learner, total_steps=10, seed=1)


def miniature(name: str) -> Miniature:
    """The miniature of configs/NAME.yaml."""
    config = load_either(ROOT / "configs" / f"{name}.yaml")
    document = json.loads((ROOT / "configs" / "models" / Path(config.model.path).name / "config.json").read_text())
    parallel, ranks = _parallel(config, document["num_hidden_layers"])
    rl = isinstance(config, Config)
    learner = msgspec.structs.replace(
        config.learner, world_size=ranks, parallel=parallel, optimizer=OPTIMIZER, micro_batch_tokens=64
    )
    small = _document(document, config, parallel)
    return Miniature(name, ranks, small, learner, config.rollout.max_tokens if rl else None)


def _parallel(config: BaseConfig, layers: int) -> tuple[ParallelConfig, int]:
    real = config.learner.parallel
    sizes = {"data": config.learner.world_size // real.model_ranks, "pipeline": real.pipeline}
    sizes |= {"tensor": real.tensor, "context": real.context}
    while prod(sizes.values()) > RANKS:
        largest = max(HALVED, key=lambda name: (sizes[name], -HALVED.index(name)))
        sizes[largest] //= 2
    inside = sizes["tensor"] * sizes["context"] * sizes["data"]
    experts = min(real.expert, inside // real.expert_tensor)
    cut = {name: size for name, size in sizes.items() if name != "data"}
    small = msgspec.structs.replace(real, **cut, expert=experts)
    if real.first_stage_layers is not None or real.last_stage_layers is not None:
        stages = layers_per_stage(layers, real)
        first, middle, last = stages[0], stages[1], stages[-1]
        # two layers per stage, one where the config has fewer than in the middle, three where it has more
        ends = [2 + (n > middle) - (n < middle) for n in (first, last)]
        if small.pipeline == 2 and ends[0] == ends[1]:
            ends[1] += 1
        small = msgspec.structs.replace(small, first_stage_layers=ends[0], last_stage_layers=ends[1])
    return small, prod(sizes.values())


def _layers(parallel: ParallelConfig) -> int:
    if parallel.first_stage_layers is None or parallel.last_stage_layers is None:
        return max(2, 2 * parallel.pipeline)
    return parallel.first_stage_layers + 2 * (parallel.pipeline - 2) + parallel.last_stage_layers


def _document(real: dict[str, Any], config: BaseConfig, parallel: ParallelConfig) -> dict[str, Any]:
    heads, layers = 2 * max(2, parallel.tensor), _layers(parallel)
    grouped = real["num_key_value_heads"] < real["num_attention_heads"]
    sizes: dict[str, Any] = {
        **dict(hidden_size=64, intermediate_size=128, num_hidden_layers=layers, max_window_layers=layers),
        **dict(num_attention_heads=heads, num_key_value_heads=heads // 2 if grouped else heads, head_dim=16),
        **dict(vocab_size=VOCABULARY, max_position_embeddings=512, initializer_range=0.1, torch_dtype="float32"),
        **dict(bos_token_id=1, eos_token_id=2, moe_intermediate_size=32, num_experts=8, num_local_experts=8),
        **dict(n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1),
        **dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
    }
    small = real | {name: value for name, value in sizes.items() if name in real}
    if real.get("rope_scaling"):  # so that it matters for documents of 40 tokens
        small["rope_scaling"] = real["rope_scaling"] | {"original_max_position_embeddings": 64}
    return small
