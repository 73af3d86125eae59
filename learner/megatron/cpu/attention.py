"""Core attention without Transformer Engine: torch's SDPA, causal, documents packed end to end.

Takes the place of TEDotProductAttention in a layer spec, with Megatron's layout thd: q [t, heads, dim].
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

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
