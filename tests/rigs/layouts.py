"""The parallel layouts that test_megatron_parity.py proves, and miniatures of the configs in configs/.

docs/layouts.md must list the same layouts. A miniature has the same architecture and features as its config, at sizes
that 8 CPU ranks can train. Kept: architecture class, tied or untied embeddings, rope scaling, latent attention and its
norms, the dense layers before the sparse ones, everything a router does, uneven stages, recomputation, offload, expert
options, loss. Reduced: sizes, numbers of layers and experts; parallel sizes are halved, the largest first, until 8
ranks suffice.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
from learner.megatron.cpu.compat import fused
from tests.rigs import device, tiny_models
from tests.rigs.processes import ROOT

MODELS = {
    "tied": "Qwen3, tied embeddings",
    "untied": "Qwen3",
    "llama": "Llama 3, scaled rope",
    "moe": "Qwen3-MoE, 8 experts",
}
RANKS = 8
VOCABULARY = 128
HALVED = ("data", "pipeline", "tensor", "context")  # in this order among equals
OPTIMIZER = msgspec.structs.replace(tiny_models.OPTIMIZER, lr=3e-3, warmup_steps=0, schedule="constant", weight_decay=0)


@dataclass(frozen=True)
class Layout:
    """`ranks` processes that train a model of `kind`, cut by `parallel`."""

    ranks: int
    kind: str
    parallel: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    @property
    def config(self) -> ParallelConfig:
        return ParallelConfig(**self.parallel)

    @property
    def data(self) -> int:
        return self.ranks // self.config.model_ranks

    @property
    def name(self) -> str:
        """Unique, from the sizes and the type: moe-tp2-sp-pp2-ep2-dp2."""
        config = self.config
        sizes = {"tp": config.tensor, "pp": config.pipeline, "vpp": config.virtual_pipeline, "cp": config.context}
        sizes |= {"ep": config.expert, "etp": config.expert_tensor, "dp": self.data}
        sizes |= {"first": config.first_stage_layers or 1, "last": config.last_stage_layers or 1}
        parts = [f"{name}{n}" for name, n in sizes.items() if n > 1]
        if config.sequence_parallel:
            parts.insert(1, "sp")
        rounded = ["bf16"] if self.dtype == "bfloat16" else []
        return "-".join([self.kind, *(parts or ["one"]), *rounded])

    @property
    def layers(self) -> int:
        """Two, but four where a stage has several pieces, or where there are more stages, or uneven ones."""
        config = self.config
        uneven = config.first_stage_layers or config.last_stage_layers
        return 4 if uneven or config.pipeline * config.virtual_pipeline > 2 else 2

    @property
    def model(self) -> str:
        """The name in tiny_models.py of a model of `kind` with so many layers."""
        return f"{self.kind}-deep" if self.layers > 2 else self.kind

    @property
    def cells(self) -> dict[str, str]:
        """Columns of the table that the layout decides."""
        config = self.config
        stages = layers_per_stage(self.layers, config)
        uneven = f" ({' + '.join(map(str, stages))} layers)" if len(set(stages)) > 1 else ""
        return {
            "ranks": str(self.ranks),
            "TP": str(config.tensor),
            "SP": "yes" if config.sequence_parallel else "no",
            "PP": f"{config.pipeline}{uneven}",
            "VPP": str(config.virtual_pipeline),
            "CP": str(config.context),
            "EP": str(config.expert),
            "ETP": str(config.expert_tensor),
            "DP": str(self.data),
            "model": MODELS[self.kind],
        }

    @property
    def spec(self) -> dict[str, Any]:
        """The job that the worker runs."""
        return {"name": self.name, "kind": self.model, "parallel": self.parallel, "dtype": self.dtype}


def _layouts(ranks: int, kind: str, *parallel: dict[str, Any]) -> tuple[Layout, ...]:
    return tuple(Layout(ranks, kind, sizes) for sizes in parallel)


TP2, PP2, CP2, EP2, ETP2 = ({name: 2} for name in ("tensor", "pipeline", "context", "expert", "expert_tensor"))
VPP2 = PP2 | {"virtual_pipeline": 2}

# A layout of two kinds of parallelism proves both of them: what is in another row adds no row of its own.
_ALL = (
    *(Layout(1, kind) for kind in ("tied", "untied", "moe")),
    *_layouts(2, "tied", {}, TP2, TP2 | {"sequence": False}, PP2, VPP2, CP2),
    *_layouts(2, "untied", PP2 | {"last_stage_layers": 3}),
    *_layouts(2, "llama", CP2),
    *_layouts(2, "moe", {}, TP2 | EP2),
    *_layouts(4, "tied", {}, {"pipeline": 4}, TP2 | VPP2),
    *_layouts(4, "untied", {"tensor": 4}, {"context": 4}, CP2 | VPP2),
    *_layouts(4, "moe", {"expert": 4}, EP2 | ETP2, EP2 | VPP2, TP2 | CP2 | {"expert": 4}),
    *_layouts(8, "tied", TP2 | PP2 | CP2),
    *_layouts(8, "moe", TP2 | PP2 | EP2 | {"first_stage_layers": 3}, TP2 | PP2 | CP2 | EP2 | ETP2),
)


def computed(layouts: Iterable[Layout], fused: bool) -> tuple[Layout, ...]:
    """Transformer Engine has no attention for float32 under context parallelism; there it computes in bfloat16."""
    return tuple(replace(x, dtype="bfloat16") if fused and x.config.context > 1 else x for x in layouts)


# the only ones that are tried, by the names that they have on a CPU, with commas between; all if it is empty
_NAMED = os.environ.get("SLIPSTREAM_TEST_LAYOUTS", "")
_TRIED = (x for x in _ALL if x.ranks <= device.RANKS and (not _NAMED or x.name in _NAMED.split(",")))
LAYOUTS = computed(_TRIED, fused())


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
        return max(2, parallel.pipeline * parallel.virtual_pipeline)
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
