"""Megatron's data-parallel wrapper and distributed optimizer, and the learning-rate schedule."""

import math
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from common.config.schema import OptimizerConfig, RanksConfig
from common.errors import SlipstreamError
from learner.megatron.conversion.model import Model, passed_to
from learner.megatron.own_states import OwnStates


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warmup from lr / steps, then as the schedule says.

    Decay starts after the warmup and reaches lr * min_lr_fraction at `decay_steps` (total_steps if 0).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    end = config.decay_steps or total_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * shape)


def wrap_chunks(model: Model, learner: RanksConfig) -> list[DistributedDataParallel]:
    """The chunks with float32 main gradients, reduced over the data-parallel ranks. Collective.

    With learner.overlap the reduction runs during the last backward pass. Updated parameters are gathered during the
    next forward pass, so call `gather_parameters` before anything else reads them.
    """
    graphs = getattr(model.config, "cuda_graph_impl", "none") != "none"  # hooks, which overlap needs, are not captured
    overlap = learner.overlap and not graphs and mpu.get_data_parallel_world_size(with_context_parallel=True) > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and not learner.memory.offload_parameters,  # they leave right after the step
        **passed_to(DistributedDataParallelConfig, learner.megatron.extra),
    )
    chunks = [
        DistributedDataParallel(config=model.config, ddp_config=ddp, module=chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(model.chunks)
    ]
    if overlap:  # only the last microbatch's backward pass may reduce
        waits = [chunk.no_sync for chunk in chunks]
        model.config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return chunks


def gather_parameters(chunks: list[DistributedDataParallel]) -> None:
    """Complete the parameters that the last step left to be gathered by the next forward pass. Collective."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            waiting = group.param_gather_handle is not None or not group.param_gather_dispatched
            if chunk.ddp_config.overlap_param_gather and waiting:
                group.start_param_sync(force_sync=True)


class Optimizer:
    """AdamW with float32 states sharded over the data-parallel ranks."""

    def __init__(self, chunks: list[Any], learner: RanksConfig, dtype: torch.dtype, total_steps: int) -> None:
        self.config = config = learner.optimizer
        self.total_steps = total_steps
        self.steps = 0  # those that are done
        self.megatron: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=0.0,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                clip_grad=config.grad_clip,
                overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
                **passed_to(MegatronOptimizerConfig, learner.megatron.extra),
            ),
            chunks,
        )
        for part in self.megatron.chained_optimizers:
            for group in part.optimizer.param_groups:
                if "foreach" in group:  # torch's AdamW, without TE: a GPU would keep every intermediate result at once
                    group["foreach"] = False

    def zero_grad(self) -> None:
        """Forget the float32 copies of the gradients (bfloat16 parameters only)."""
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self) -> tuple[float, float]:
        """(gradient norm before clipping, learning rate) after applying the finalized gradients. Collective.

        Raises SlipstreamError when the gradient norm is not finite; the weights are as before.
        """
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            raise SlipstreamError(f"gradient norm is {norm} in optimizer step {self.steps}; the weights are unchanged")
        if self.config.grad_clip > 0:
            for optimizer in self.megatron.chained_optimizers:
                parameters = optimizer.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, max_norm=self.config.grad_clip, total_norm=norm)
        rate = learning_rate(self.steps, self.config, self.total_steps)
        for group in self.megatron.param_groups:
            group["lr"] = rate
            # norms and biases have wd_mult 0; applying it is the job of Megatron's scheduler, whose place this takes
            group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
        self.megatron.step_with_ready_grads()
        self.steps += 1
        return norm, rate

    def own_states(self, models: dict[str, Any], loading: bool) -> OwnStates:
        """Main parameters and states of this rank; other ranks have other parts.

        With `loading`, after `steps` is set, the states exist and wait for their values.
        """
        optimizers = self.megatron.chained_optimizers  # one, or one of dense and one of expert parameters
        for optimizer in optimizers if loading else ():
            if optimizer.is_stub_optimizer or not any(group["params"] for group in optimizer.optimizer.param_groups):
                continue
            described = optimizer.state_dict()
            for group in described["optimizer"]["param_groups"]:
                group["step"] = self.steps
            optimizer.load_state_dict(described)
        return OwnStates(optimizers, models, loading)

    def start_afresh(self) -> None:
        """Forget all states, and begin from the model's weights."""
        for optimizer in self.megatron.chained_optimizers:
            optimizer.optimizer.state.clear()
        self.megatron.reload_model_params()
