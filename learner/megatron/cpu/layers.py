"""Layer building blocks of plain torch with the module structure and parameter names of Transformer Engine's.

So default layer specs, the bridge's parameter mappings and distributed checkpoints are the same with and without it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

# ---------------------------------------------------------------- attention
# torch's SDPA in the place of TEDotProductAttention: causal, documents packed end to end, Megatron's layout thd.


_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_SHORTEST_WIDTH = 16  # documents up to this long share one group


@dataclass(frozen=True)
class _Group:
    """Documents of like length that share one batched kernel call."""

    queries: Tensor  # [documents * width of queries] int64, positions of this rank
    keys: Tensor  # [documents * width of keys] int64, positions of the keys of all context ranks, rank after rank
    documents: int
    seen: Tensor | None  # [documents, 1, width of queries, width of keys] bool, what a query sees; None: causal


class AttentionPlan:
    """Groups a pack's documents by power-of-two length into padded batches; made once per microbatch.

    Right padding is invisible under a causal mask, so only the gather and the scatter need the true lengths. Under
    context parallelism this rank has the queries of two chunks of each document (pack_layout.py), and all keys.
    """

    def __init__(
        self,
        lengths: list[int],
        contexts: int = 1,
        rank: int = 0,
        window: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`lengths` of the documents are over all context ranks; `window` tokens to the left are seen (None: all).

        Computed on the CPU, and kept on `device`.
        """
        grouped: dict[int, list[tuple[int, int]]] = {}
        at = 0
        for n in lengths:
            grouped.setdefault(max(_SHORTEST_WIDTH, 1 << (n - 1).bit_length()), []).append((at, n))
            at += n
        self.total = at // contexts  # positions of this rank
        self.groups: list[_Group] = []
        order = torch.empty(self.total, dtype=torch.int64)  # position of this rank -> row of the concatenated outputs
        base = 0
        for documents in grouped.values():
            start, length = (torch.tensor(x)[:, None] for x in zip(*documents, strict=True))
            column, keys = _columns(start, length, self.total, contexts)
            local = length // contexts
            half = length // (2 * contexts)
            row = torch.arange(int(local.max()))
            real = row < local
            queries = torch.where(real, start // contexts + row, 0)
            # the position in its document of each query, 0 where a shorter document has none
            position = torch.where(row < half, rank * half + row, (2 * contexts - 1 - rank) * half + row - half)
            position = torch.where(real, position if contexts > 1 else row, 0)
            seen = None
            if contexts > 1 or (window is not None and window < len(column) - 1):
                seen = column <= position[..., None]
                if window is not None:
                    seen &= column >= position[..., None] - window
                seen = seen[:, None]
            rows = torch.arange(base, base + queries.numel()).view_as(queries)
            order[queries[real]] = rows[real]
            group = _Group(
                queries=queries.flatten().to(device),
                keys=keys.flatten().to(device),
                documents=len(documents),
                seen=None if seen is None else seen.to(device),
            )
            self.groups.append(group)
            base += queries.numel()
        self.order = order.to(device)

    @staticmethod
    def of(packed: PackedSeqParams, contexts: int, rank: int, window: int | None) -> "AttentionPlan":
        """The plan of `packed`, kept on it for the other layers with the same window."""
        plans = packed.__dict__.setdefault("_attention_plans", {})
        if window not in plans:
            bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            lengths = (bounds[1:] - bounds[:-1]).tolist()
            plans[window] = AttentionPlan(lengths, contexts, rank, window, bounds.device)
        return plans[window]


def _columns(start: Tensor, length: Tensor, total: int, contexts: int) -> tuple[Tensor, Tensor]:
    """(positions [width], place among the gathered keys of each document's positions [documents, width])."""
    column = torch.arange(int(length.max()))
    inside = column < length
    if contexts == 1:
        return column, torch.where(inside, start + column, 0)
    half = length // (2 * contexts)
    chunk = column // half
    owner = torch.minimum(chunk, 2 * contexts - 1 - chunk)
    offset = column % half + torch.where(chunk < contexts, 0, half)
    return column, torch.where(inside, owner * total + start // contexts + offset, 0)


class SDPACoreAttention(MegatronModule):
    """softmax(QK^T)V with the signature that Megatron's SelfAttention calls."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        unsupported = {
            "cross attention": attention_type != "self",
            "attention dropout": dropout != 0,
            f"softmax type {config.softmax_type}": config.softmax_type != "vanilla",
            "query-key layer scaling": config.apply_query_key_layer_scaling,
        }
        for what, found in unsupported.items():
            if found:
                raise NotImplementedError(f"{what} without Transformer Engine")
        self.attn_mask_type = attn_mask_type
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.context: dist.ProcessGroup = groups.cp
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.window: int | None = None  # tokens to the left that a query sees besides itself
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Packed queries [t, heads, dim] give [t, heads * dim]."""
        if packed_seq_params is None or attention_bias is not None:
            raise NotImplementedError("unpacked sequences or attention bias without Transformer Engine")
        if (attn_mask_type or self.attn_mask_type) not in _CAUSAL:
            raise NotImplementedError("only causal attention without Transformer Engine")
        if self.context.size() > 1:
            sizes = [key.size(-1), value.size(-1)]
            # backward sums what the queries of every rank ask of this rank's keys and values
            both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.context)
            key, value = both.split(sizes, -1)
        repeats = query.size(-2) // key.size(-2)
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=-2) for x in (key, value))
        plan = AttentionPlan.of(packed_seq_params, self.context.size(), self.context.rank(), self.window)
        if plan.total != query.size(0):
            raise ValueError(f"documents cover {plan.total} positions of this rank, the pack has {query.size(0)}")
        outputs = []
        for group in plan.groups:
            q, k, v = (
                x.index_select(0, index).unflatten(0, (group.documents, -1)).transpose(1, 2)
                for x, index in ((query, group.queries), (key, group.keys), (value, group.keys))
            )
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=group.seen, is_causal=group.seen is None, scale=self.scale
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, plan.order).flatten(1)


# ---------------------------------------------------------------- layers


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

    return_layernorm_output = False  # an adapter beside the layer needs it

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = _norm(x, self.layer_norm_weight, self.eps)
        output, bias = super().forward(normed, *args, **kwargs)
        return (output, normed) if self.return_layernorm_output else output, bias


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
