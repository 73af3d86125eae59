"""The parallel layouts that test_megatron_parity.py proves; docs/layouts.md must list the same ones."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from common.config.parallel_layout import layers_per_stage
from common.config.schema import ParallelConfig
from learner.megatron.cpu.compat import fused
from tests.device import RANKS

LAYERS = 4  # every model of the suite has so many
MODELS = {
    "tied": "Qwen3, tied embeddings",
    "untied": "Qwen3",
    "llama": "Llama 3, scaled rope",
    "moe": "Qwen3-MoE, 8 experts",
}


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
    def cells(self) -> dict[str, str]:
        """Columns of the table that the layout decides."""
        config = self.config
        stages = layers_per_stage(LAYERS, config)
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
        return {"name": self.name, "kind": self.kind, "parallel": self.parallel, "dtype": self.dtype}


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
    *_layouts(4, "tied", {}, {"pipeline": 4}, PP2, TP2 | VPP2),
    *_layouts(4, "untied", {"tensor": 4}, {"context": 4}, CP2 | VPP2),
    *_layouts(4, "moe", {"expert": 4}, TP2 | EP2, EP2 | ETP2, EP2 | CP2, EP2 | VPP2, TP2 | CP2 | {"expert": 4}),
    *_layouts(8, "tied", TP2 | PP2 | CP2),
    *_layouts(8, "moe", TP2 | PP2 | EP2 | {"first_stage_layers": 3}, TP2 | PP2 | CP2 | EP2 | ETP2),
)


def computed(layouts: Iterable[Layout], fused: bool) -> tuple[Layout, ...]:
    """Transformer Engine has no attention for float32 under context parallelism; there it computes in bfloat16."""
    return tuple(replace(x, dtype="bfloat16") if fused and x.config.context > 1 else x for x in layouts)


LAYOUTS = computed((layout for layout in _ALL if layout.ranks <= RANKS), fused())
