"""Core attention without Transformer Engine: torch's SDPA, causal, documents packed end to end (THD).

Takes the place of TEDotProductAttention in a layer spec. Layouts are Megatron's own: sbhd, q [s, b, heads, dim];
thd, q [t, heads, dim] with document bounds in PackedSeqParams.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_SHORTEST_WIDTH = 16  # documents up to this long share one group


class AttentionPlan:
    """How a pack's documents are grouped by length into padded batches; made once per microbatch.

    Documents of like power-of-two length share one batched kernel call. Right padding is invisible under a causal
    mask, so only the gather and the scatter need the true lengths.
    """

    def __init__(self, lengths: list[int]) -> None:
        groups: dict[int, list[tuple[int, int]]] = {}
        at = 0
        for n in lengths:
            groups.setdefault(max(_SHORTEST_WIDTH, 1 << (n - 1).bit_length()), []).append((at, n))
            at += n
        self.total = at
        self.gathers: list[tuple[Tensor, int]] = []  # (index into the pack [documents * width], documents)
        order = torch.empty(at, dtype=torch.int64)  # token of the pack -> row of the concatenated group outputs
        base = 0
        for documents in groups.values():
            width = max(n for _, n in documents)
            column = torch.arange(width)
            start, length = (torch.tensor(x)[:, None] for x in zip(*documents, strict=True))
            keep = column < length
            source = torch.where(keep, start + column, 0)
            rows = torch.arange(base, base + source.numel()).view_as(source)
            order[source[keep]] = rows[keep]
            self.gathers.append((source.flatten(), len(documents)))
            base += source.numel()
        self.order = order

    @staticmethod
    def of(packed: PackedSeqParams) -> "AttentionPlan":
        """The plan of `packed`, kept on it for the other layers."""
        plan = getattr(packed, "_attention_plan", None)
        if plan is None:
            bounds = packed.cu_seqlens_q
            plan = packed._attention_plan = AttentionPlan((bounds[1:] - bounds[:-1]).tolist())
        return plan


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
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        unsupported = {
            "cross attention": attention_type != "self",
            "attention dropout": dropout != 0,
            f"softmax type {config.softmax_type}": config.softmax_type != "vanilla",
            "query-key layer scaling": config.apply_query_key_layer_scaling,
            "context parallelism": config.context_parallel_size > 1,
        }
        for what, found in unsupported.items():
            if found:
                raise NotImplementedError(f"{what} without Transformer Engine")
        self.attn_mask_type = attn_mask_type
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
        """Queries [s, b, heads, dim] give [s, b, heads * dim]; packed queries [t, heads, dim] give [t, heads * dim]."""
        if attention_bias is not None:
            raise NotImplementedError("attention bias without Transformer Engine")
        if (attn_mask_type or self.attn_mask_type) not in _CAUSAL:
            raise NotImplementedError("only causal attention without Transformer Engine")
        repeats = query.size(-2) // key.size(-2)
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=-2) for x in (key, value))
        if packed_seq_params is not None:
            return self._packed(query, key, value, AttentionPlan.of(packed_seq_params))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, dim]
        return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        if plan.total != query.size(0):
            raise ValueError(f"documents cover {plan.total} tokens, the pack has {query.size(0)}")
        outputs = []
        for index, documents in plan.gathers:
            q, k, v = (
                x.index_select(0, index).unflatten(0, (documents, -1)).transpose(1, 2) for x in (query, key, value)
            )
            outputs.append(self._attend(q, k, v).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, plan.order).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.window is None or self.window >= q.size(2) - 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        i = torch.arange(q.size(2))[:, None]
        j = torch.arange(q.size(2))[None]
        mask = (j <= i) & (j >= i - self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
