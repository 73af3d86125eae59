"""Layer building blocks of plain torch with the module structure and parameter names of Transformer Engine's.

So default layer specs, the bridge's parameter mappings and distributed checkpoints are the same with and without it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from learner.megatron.cpu.attention import SDPACoreAttention


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (F.rms_norm(x.float(), (x.size(-1),), None, eps) * weight.float()).to(x.dtype)


def _norm_weight(config: Any, size: int) -> torch.nn.Parameter:
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        raise NotImplementedError(f"normalization {config.normalization} without Transformer Engine")
    weight: Any = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel
    return weight


class Norm(torch.nn.Module):
    """TENorm: RMSNorm, computed in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return _norm(x, self.weight, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear: the norm's weight lives in the linear layer."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(_norm(x, self.layer_norm_weight, self.eps), *args, **kwargs)


class DuplicatedLinear(torch.nn.Module):
    """TELinear in its duplicated mode: every tensor-parallel rank has the whole weight."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        parallel_mode: str,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias or parallel_mode != "duplicated":
            raise NotImplementedError(f"a {parallel_mode} linear layer, bias {bias}, without Transformer Engine")
        self.config = config
        self.parallel_mode = parallel_mode
        weight: Any = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(weight)
        weight.allreduce = True
        # each rank has the gradient of its part of the sequence; Megatron adds them up
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class _GroupedLinear(torch.nn.Module):
    """The experts of one rank: weight0, weight1, ... (names and checkpoint keys of TE's GroupedLinear)."""

    tp_axis: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise NotImplementedError("expert bias without Transformer Engine")
        self.num_gemms = num_gemms
        self.groups = pg_collection
        shape = [output_size, input_size]
        shape[self.tp_axis] //= pg_collection.expt_tp.size()
        for i in range(num_gemms):
            weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            weight.allreduce = config.expert_model_parallel_size == 1
            weight.tensor_model_parallel = True
            weight.partition_dim = self.tp_axis
            weight.partition_stride = 1
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x: Tensor, splits: list[int]) -> tuple[Tensor, None]:
        parts = [F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(x.split(splits))]
        return torch.cat(parts), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        out: dict[str, Any] = {}
        experts = self.groups.ep.size() * self.num_gemms
        first = self.groups.ep.rank() * self.num_gemms
        for i in range(self.num_gemms):
            key = f"{i}.weight"
            tensors = {key: getattr(self, f"weight{i}")}
            axes = {key: self.tp_axis}
            offsets = (*sharded_offsets, (len(sharded_offsets), first + i, experts))
            groups = {"tp_group": self.groups.expt_tp, "dp_cp_group": metadata["dp_cp_group"]}
            part = make_sharded_tensors_for_checkpoint(tensors, "", axes, offsets, **groups)
            replace_prefix_for_sharding(part, f"{i}.", prefix)
            tensor = part[key]
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
            out[f"{prefix}weight{i}"] = tensor
        return out


# The bridge recognises fused modules by class name.
ColumnParallelGroupedLinear = type("TEColumnParallelGroupedLinear", (_GroupedLinear,), {"tp_axis": 0})
RowParallelGroupedLinear = type("TERowParallelGroupedLinear", (_GroupedLinear,), {"tp_axis": 1})
DuplicatedLinear.__name__ = "TELinear"
LayerNormColumnParallelLinear.__name__ = "TELayerNormColumnParallelLinear"


class PlainSpecProvider(LocalSpecProvider):
    """Answers megatron-core's layer specs in Transformer Engine's place."""

    def linear(self) -> type:
        return DuplicatedLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return SDPACoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[type, Any]:
        if not moe_use_grouped_gemm:
            return super().grouped_mlp_modules(moe_use_grouped_gemm, moe_use_legacy_grouped_gemm)
        grouped = MLPSubmodules(linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear)
        return TEGroupedMLP, grouped


def register() -> None:
    """Put these blocks where megatron-core's specs look for Transformer Engine's."""
    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
    from megatron.core.transformer import multi_latent_attention, transformer_block

    gpt_layer_specs.TESpecProvider = moe_module_specs.TESpecProvider = PlainSpecProvider
    gpt_layer_specs.TENorm = Norm
    transformer_block.LayerNormImpl = Norm
    multi_latent_attention.TELinear = DuplicatedLinear
