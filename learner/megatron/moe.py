"""Mixture of experts: frozen routers, load balancing that no layout changes, and the replay of routing.

Megatron-Core 0.16.1 with `calculate_per_token_loss` scales a microbatch's auxiliary loss by the rank's own tokens. It
scales the whole gradient by one over the loss tokens. So the balance would be too weak by tensor x context ranks, and
too strong by (all tokens) / (loss tokens). `Router` scales it so that, for n_m real tokens in microbatch m,

    gradient = d/dw [ main loss + balance_rate * sum over MoE layers of sum_m n_m L_m / sum_m n_m ]
    L_m = E sum_i f_i P_i    (Switch Transformer, Fedus et al., arXiv 2101.03961, equations 4 to 6)

under every layout, loss mask and reduction. Pads and fillers count as no tokens. A correction (mis, a veto,
correction_normalize) may leave tokens out of the denominator, which is known only after the forward passes. Where it
makes the denominator smaller by a factor, the balance weighs more by that factor.

The expert bias follows auxiliary-loss-free balancing (Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3,
arXiv 2412.19437, section 2.1.2). After each step b_i += balance_rate * sign(mean count - count of i).

Routing replay (Ma et al., arXiv 2510.11370): a token goes to the experts that the sampler chose for it. They are
weighted by this model's own scores, through which the router's gradient flows.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from common.config.schema import MoeConfig
from common.errors import UsageError
from learner.backend_protocol import UNKNOWN, LossFunction, Microbatch, RoutingShape
from learner.megatron import parallel
from learner.megatron.pack_layout import PackPart
from learner.megatron.parallel import mpu


def configure(provider: Any, config: MoeConfig) -> None:
    """Write `config` into Megatron's own configuration, before the model is made.

    common.config.checks has found that a model without experts needs none of it. Raises UsageError if routers have no
    bias to balance with.
    """
    if not getattr(provider, "num_moe_experts", None):
        return
    if config.balance == "bias" and not getattr(provider, "moe_router_enable_expert_bias", False):
        raise UsageError(
            "learner.moe.balance: bias needs routers with an expert bias (sigmoid scores, as in DeepSeek-V3 or "
            f"GLM-4.5); this model's have {provider.moe_router_score_function} scores; use aux_loss"
        )
    provider.moe_router_load_balancing_type = "aux_loss" if config.balance == "aux_loss" else "none"
    provider.moe_aux_loss_coeff = config.balance_rate if config.balance == "aux_loss" else 0.0
    if config.replay_routing:
        provider.moe_router_fusion = False  # Transformer Engine's kernel chooses by itself
    # A bridge's own rate would move the loaded bias although the config does not ask for it.
    provider.moe_router_bias_update_rate = config.balance_rate if config.balance == "bias" else 0.0


def prepare(chunk: torch.nn.Module, config: MoeConfig) -> None:
    """Exchange the routers of a built chunk for ours, frozen if so configured; before DDP wraps it."""
    for module in chunk.modules():
        if isinstance(module, TEGroupedMLP):
            # With expert 1 upstream reduces experts over the dense model's data-parallel ranks. Where expert_tensor is
            # not tensor, that would add gradients of different parameters.
            weights: Any = module.parameters()
            for parameter in weights:
                parameter.allreduce = False
        if isinstance(module, TopKRouter):
            router: Any = module
            router.__class__ = Router
            router.replaying = config.replay_routing
            if config.freeze_router:
                router.requires_grad_(False)


@dataclass(frozen=True)
class Frame:
    """One microbatch, as the routers of this rank need it."""

    pads: Tensor | None = None  # [tokens of this rank] bool, True where a position counts as no token
    balance_scale: float = 0.0  # factor of the auxiliary loss, whose gradient the global denominator divides later
    routed: Tensor | None = None  # [tokens of this rank, its MoE layers, chosen] to replay; the router chooses UNKNOWN
    counted: bool = False  # whether the replay of this microbatch enters the step's figures


def in_backward() -> bool:
    """Whether autograd's backward pass runs in this thread: a forward pass now is one computed again."""
    return torch._C._current_graph_task_id() != -1


class Router(TopKRouter):
    """Megatron's router with the corrections that the module's docstring describes.

    Under every schedule of Megatron a chunk's backward passes come in the order of its forward passes. So activation
    recomputation needs the oldest frame that it has not taken yet.
    """

    moe_layer: int = 0  # number of this layer among those with experts on this rank
    replaying: bool = False
    now = frame = Frame()  # the frame of the forward pass that comes next

    def start(self) -> None:
        """A new step: nothing of an earlier one is asked for again."""
        self.now = Frame()
        self.passed = deque()
        # tokens that were sent elsewhere than this router would have, and tokens that were replayed
        self.changed = torch.zeros((), dtype=torch.int64)
        self.known = 0

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """([tokens, experts] weights, [tokens, experts] bool chosen); `padding_mask` is replaced by the frame's."""
        if in_backward():
            self.frame = self.passed.popleft()
        else:
            self.frame = self.now
            self.passed.append(self.now)
        return super().routing(logits, padding_mask=self.frame.pads)

    @property
    def router_replay(self) -> "Router | None":
        """In the place of megatron's RouterReplay, which knows neither unknown rows nor pipelines."""
        return self if self.replaying else None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        """([tokens, topk] scores, [tokens, topk] int64 experts): the replayed ones, or the best where unknown."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.frame.routed is None:
            return values, own
        target = self.frame.routed[:, self.moe_layer].to(own)
        known = ((target >= 0) & (target < scores.shape[1])).all(1)
        chosen = torch.where(known[:, None], target, own)
        if self.frame.counted and not in_backward():
            moved = (chosen.sort(1).values != own.sort(1).values).any(1)
            self.changed = self.changed + moved.sum()
            self.known = self.known + known.sum()
        return scores.gather(1, chosen), chosen

    def is_aux_loss_enabled(self) -> bool:
        """Also False in a filler, whose balance is zero over zero tokens."""
        return self.frame.balance_scale > 0 and super().is_aux_loss_enabled()

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """`activation`, whose backward pass adds the auxiliary loss. Megatron's tracker is left out."""
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * self.frame.balance_scale)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert; upstream's mask lacks a dimension."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask[:, None]
            with torch.no_grad():
                tokens: Any = self.local_tokens_per_expert
                tokens += routing_map.sum(0)  # in place


Router.__name__ = "TopKRouter"  # the bridge recognises replicated modules by class name


class Experts:
    """Prepares the routers of one rank's chunks for the step and the microbatch; does nothing to a dense model."""

    def __init__(self, chunks: list[torch.nn.Module], config: Any, options: MoeConfig) -> None:
        self.routers: list[Any] = [m for chunk in chunks for m in chunk.modules() if isinstance(m, Router)]
        self._biased = [router for router in self.routers if router.expert_bias is not None]
        experts = getattr(config, "num_moe_experts", None)
        self._balanced = bool(experts) and config.moe_aux_loss_coeff > 0
        self._sequence_rank = mpu.get_tensor_model_parallel_rank() if config.sequence_parallel else 0
        self._sequence_ranks = mpu.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        self._replaying = options.replay_routing  # also on a pipeline stage without routers
        self._scale = 0.0
        self._training = False
        # the shape of the routing that the model replays; None when it replays none
        self.shape: RoutingShape | None = None
        self.layers: tuple[int, ...] = ()  # whose routing this rank replays, counted among those with experts
        if experts:
            every = config.moe_layer_freq
            sparse = [i % every == 0 for i in range(config.num_layers)] if isinstance(every, int) else every
            order = [i for i, has_experts in enumerate(sparse) if has_experts]
            own = sorted({order.index(router.layer_number - 1) for router in self.routers})
            for router in self.routers:
                router.moe_layer = own.index(order.index(router.layer_number - 1))
            if self._replaying:
                self.shape = RoutingShape(len(order), config.moe_router_topk, experts)
                self.layers = tuple(own)

    def start(self, microbatches: list[Microbatch] | None = None, loss: LossFunction | None = None) -> None:
        """Begin a pass; with this data-parallel rank's microbatches and their loss if it trains. Collective."""
        for router in self.routers:
            router.start()
        self._training = loss is not None
        if self._balanced and microbatches is not None and loss is not None:
            self._scale = self._balance_scale(microbatches, loss)

    def enter(self, batch: Microbatch, part: PackPart) -> None:
        """The forward pass of `batch` comes next; `part` is what this context-parallel rank computes of it."""
        if not self.routers:
            return
        filler = not bool((batch.loss_mask > 0).any())
        tokens = 0 if filler else len(batch.tokens)
        pads = torch.ones_like(part.pads) if filler else part.pads if part.padded else None
        routed = batch.routed_experts if self._replaying else None
        if routed is not None:
            if routed.shape[1] != len(self.layers):
                routed = routed[:, self.layers]
            routed = part.local(routed, fill=UNKNOWN[str(routed.dtype).removeprefix("torch.")])
        pads, routed = (x if x is None else x.chunk(self._sequence_ranks)[self._sequence_rank] for x in (pads, routed))
        frame = Frame(pads, self._scale * tokens, routed, self._training)
        for router in self.routers:
            router.now = frame

    def biases(self) -> list[Tensor]:
        """Copies of the routers' expert biases; Megatron moves them at the end of a backward pass."""
        return [router.expert_bias.clone() for router in self._biased]

    def restore(self, biases: list[Tensor]) -> None:
        """Undo what passes did to the expert biases since `biases` returned these copies."""
        for router, bias in zip(self._biased, biases, strict=True):
            router.expert_bias.copy_(bias)

    def figures(self) -> dict[str, float]:
        """Sums over all ranks since `start`, {} where nothing is replayed. Collective over the world.

        `routing_replayed` counts (token, MoE layer) pairs whose experts were given, `routing_changed` those among them
        that this model would have sent elsewhere.
        """
        if not self._replaying:
            return {}
        pairs = [[float(router.changed), float(router.known)] for router in self.routers] or [[0.0, 0.0]]
        sums = torch.tensor(pairs, dtype=torch.float64).sum(0).to(parallel.device())
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        changed, known = sums.tolist()
        return {"routing_changed": changed, "routing_replayed": known}

    @torch.no_grad()
    def _balance_scale(self, microbatches: list[Microbatch], loss: LossFunction) -> float:
        """Global denominator over global real tokens: per token of a microbatch, before the division to come.

        The loss gives its denominator before the forward pass, with zeros for log-probabilities. So tokens that a
        correction will exclude later still count here. Without the documents' numbers no transcript keeps the zeros.
        """
        totals = torch.zeros(2, dtype=torch.float64)
        for batch in microbatches:
            if loss_tokens := float(batch.loss_mask.sum()):
                zeros = torch.zeros(len(batch.targets))
                given = {"behavior_logprobs": zeros, "proximal_logprobs": None, "numbers": ()}
                blank = replace(batch, top_logprobs=batch.teacher_top_logprobs, **given)
                denominator = loss(zeros, zeros, blank).denominator
                counted = loss_tokens if denominator is None else float(denominator)
                totals += torch.tensor([counted, float(len(batch.tokens))])
        group = mpu.get_data_parallel_group()
        if group.size() > 1:
            totals = totals.to(parallel.device())
            dist.all_reduce(totals, group=group)
        denominator, tokens = totals.tolist()
        return denominator / tokens if tokens else 0.0
