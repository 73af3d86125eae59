"""Changes to vLLM's workers: layers compute with their parameters, and the CPU's model runner returns routed experts.

So weights can be changed in place, read back and proven after a flip.

**Packed copies.** On the CPU vLLM 0.32 pads and prepacks weights (for oneDNN, AMX or its experts) in place of the
parameters. A later load_weights then raises or writes rows of one layout into another, and weights cannot be read back.
With tied embeddings lm_head silently keeps the old packed weights. Reading the parameters costs little.

**Derived tensors.** Latent attention (MLA) decodes with two matrices that vLLM takes out of kv_b_proj once after
loading. In vLLM 0.32-0.33 they are views of unquantised weights, which a flip changes too, on the backends with plain
products. Other backends have copies: AMX_MLA packs its own, decode context parallelism gathers them, ROCm's kernels
quantise them. Prefill never reads these. `renew` computes them again at every flip.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from rollout_fleet.vllm_patches.engine_process import require

FEW_ROWS = 16  # below these two, the overhead of a call dominates, and torch's own linear is faster
SMALL_WEIGHT = 1 << 18
_mkldnn = torch.ops.mkldnn
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(_mkldnn, "_linear_pointwise")


def keep_cpu_weights_live() -> None:
    """Linear layers and experts compute with their parameters; experts use one plain product per expert in use."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    require(utils, "dispatch_cpu_unquantized_gemm")
    require(CPUUnquantizedExperts, "process_weights_after_loading", "apply")

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = linear  # type: ignore[assignment]

    def nothing(experts: Any, layer: Any) -> None: ...

    utils.dispatch_cpu_unquantized_gemm = plain
    CPUUnquantizedExperts.process_weights_after_loading = nothing  # type: ignore[method-assign]
    CPUUnquantizedExperts.apply = _apply_experts  # type: ignore[method-assign]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b from the parameter, about as fast as from a packed copy; [rows, in] x [out, in] -> [rows, out].

    In bfloat16 torch's linear calls oneDNN by itself; in float32 it calls MKL, which is slower with large weights.
    """
    large = x.dim() == 2 and len(x) >= FEW_ROWS and weight.numel() >= SMALL_WEIGHT and x.dtype == torch.float32
    if large and _HAS_ONEDNN and not torch.compiler.is_compiling():
        return _mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _apply_experts(
    experts: Any,
    *,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    expert_map: Any,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """output [T, H] = sum over a token's experts of weight * w2 (act(gate x) * up x); w1 [E, 2 I, H], w2 [E, H, I]."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    functions = {
        MoEActivation.SILU: F.silu,
        MoEActivation.GELU: F.gelu,
        MoEActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    }
    if activation not in functions:
        raise NotImplementedError(f"experts with {activation} on CPU")
    chosen = topk_ids.flatten()
    if expert_map is not None:  # -1: another worker has the expert, and adds its part
        chosen = expert_map[chosen]
    order = chosen.argsort(stable=True)
    total = torch.zeros_like(output, dtype=torch.float32)
    at = int((chosen < 0).sum())
    for expert, count in enumerate(torch.bincount(chosen[chosen >= 0], minlength=len(w1)).tolist()):
        if not count:
            continue
        places = order[at : at + count]
        at += count
        tokens = places // topk_ids.shape[1]
        bias1, bias2 = (None if b is None else b[expert] for b in (experts.w1_bias, experts.w2_bias))
        gate, up = F.linear(hidden_states[tokens], w1[expert], bias1).chunk(2, -1)
        out = F.linear(functions[activation](gate) * up, w2[expert], bias2).float()
        total.index_add_(0, tokens, out if apply_router_weight_on_input else out * topk_weights.flatten()[places, None])
    output.copy_(total)


def renew(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Compute again what attention layers of `model` derive from parameters; as after vLLM's own loading."""
    from vllm.model_executor.layers import attention

    require(attention, "is_deferred_attention_layer")
    for layer in model.modules():
        if attention.is_deferred_attention_layer(layer):
            derived: Any = layer
            derived.process_weights_after_loading(dtype)  # in place where it can: a CUDA graph has the addresses


def compute_mla_from_parameters() -> None:
    """On the CPU, latent attention keeps kv_b_proj beside AMX's packed copies, and rotates every head and key.

    AMX_MLA (vLLM 0.32-0.33) frees kv_b_proj once its copies are made, so a flip could neither load nor prove it.
    The CPU's rotary kernel takes the head stride of latent attention's queries [T, heads, rope] for the token stride.
    """
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    require(MLAAttention, "process_weights_after_loading")
    require(RotaryEmbedding, "forward_cpu", "forward_native")
    process = MLAAttention.process_weights_after_loading
    rotate = RotaryEmbedding.forward_cpu

    def process_and_keep(layer: Any, act_dtype: torch.dtype) -> None:
        weight = layer.kv_b_proj.weight
        process(layer, act_dtype)
        layer.kv_b_proj.weight = weight

    def rotate_any(layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        return rotate(layer, positions, query, key) if query.dim() == 2 else layer.forward_native(positions, query, key)

    MLAAttention.process_weights_after_loading = process_and_keep  # type: ignore[method-assign]
    RotaryEmbedding.forward_cpu = rotate_any  # type: ignore[method-assign]


def return_routed_experts_on_cpu() -> None:
    """enable_return_routed_experts also with the model runner that the CPU has.

    vLLM 0.32 serves it only in its second model runner, which needs triton. That one's connector needs two things
    from a runner: the requests of the batch, and the progress of each.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    require(VllmConfig, "_verify_aux_output_compatibility")
    initialize = CPUModelRunner.initialize_kv_cache
    execute = CPUModelRunner.execute_model
    sample = CPUModelRunner.sample_tokens

    def verify(config: Any) -> None:
        if config.aux_output_config.enabled and not config.model_config.is_moe:
            raise ValueError("routed experts of a model without experts")

    def initialize_with_routing(runner: Any, config: Any, is_profiling: bool = False, **options: Any) -> None:
        initialize(runner, config, is_profiling, **options)
        if runner.vllm_config.aux_output_config.enabled and not is_profiling:
            runner.slipstream_routing = get_aux_output_connector(runner.model, runner.vllm_config, config)

    def execute_with_routing(runner: Any, scheduled: Any, *rest: Any, **options: Any) -> Any:
        connector = getattr(runner, "slipstream_routing", None)
        if connector is not None:
            connector.begin_step(scheduled.aux_output_connector_metadata)
        result = execute(runner, scheduled, *rest, **options)
        if connector is not None and runner.execute_model_state is not None:
            batch = runner.input_batch
            counts = [scheduled.num_scheduled_tokens[request_id] for request_id in batch.req_ids]
            read = SimpleNamespace(  # the three attributes of the second runner's batch that the connector reads
                req_ids=list(batch.req_ids),
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(counts)].copy(),
            )
            runner.slipstream_routed = connector.prepare_output(read)
        return result

    def sample_with_routing(runner: Any, *rest: Any, **options: Any) -> Any:
        output = sample(runner, *rest, **options)
        routed = runner.__dict__.pop("slipstream_routed", None)
        if routed is not None:
            sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            routed.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = routed.process_output()
        return output

    VllmConfig._verify_aux_output_compatibility = verify  # type: ignore[method-assign]
    CPUModelRunner.initialize_kv_cache = initialize_with_routing  # type: ignore[method-assign]
    CPUModelRunner.execute_model = execute_with_routing  # type: ignore[method-assign]
    CPUModelRunner.sample_tokens = sample_with_routing  # type: ignore[method-assign]
