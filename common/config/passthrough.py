"""Options that a config passes on to vLLM and Megatron: rollout.engine.extra and learner.megatron.extra.

And settings of an engine that vLLM would refuse only when it starts: its rounding and the size of its steps.

A name is checked against the library's source, without importing it, which takes seconds. Where the library is not
installed, the role that needs it checks, in its own environment.
"""

import ast
import difflib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.config.architecture import Architecture
from common.config.precision import refused_type
from common.config.schema import BaseConfig, EngineConfig
from common.errors import Problem

_OURS = ""  # no key sets these, but the code relies on their values
_NODES = "rollout.nodes (a node is an engine; only the first part of a data-parallel engine would prove its weights)"
# The options that Slipstream sets itself, by the key that does.
_ENGINE = {
    "model.path": "model tokenizer hf_overrides",
    "model.dtype": "dtype",
    "run.seed": "seed",
    "learner.moe.replay_routing": "enable_return_routed_experts",
    "the key of rollout.engine": "max_model_len max_num_seqs gpu_memory_utilization block_size",
    "rollout.engine.max_batched_tokens": "max_num_batched_tokens",
    "rollout.engine.kv_cache_mib": "kv_cache_memory_bytes",
    "rollout.engine.tensor_parallel": "tensor_parallel_size",
    "rollout.engine.pipeline_parallel": "pipeline_parallel_size",
    "rollout.engine.expert_parallel": "enable_expert_parallel",
    "rollout.engine.eager": "enforce_eager",
    "rollout.engine.quantization": "quantization quantization_config",
    _OURS: "load_format skip_tokenizer_init generation_config enable_prefix_caching logprobs_mode disable_log_stats "
    "weight_transfer_config worker_cls worker_extension_cls distributed_executor_backend moe_backend nnodes device_ids "
    "prefill_context_parallel_size enable_elastic_ep enable_eplb",
    "kernel_config": "enable_flashinfer_autotune",
}
_MEGATRON = {
    "model.path": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "num_moe_experts moe_router_topk",
    "model.dtype": "params_dtype pipeline_dtype bf16 fp16 autocast_dtype",
    "learner.parallel": "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
    "learner.memory.recompute": "recompute_granularity recompute_method recompute_num_layers recompute_modules",
    "learner.optimizer": "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad",
    "learner.overlap": "overlap_grad_reduce overlap_param_gather",
    "learner.moe.balance": "moe_router_load_balancing_type moe_aux_loss_coeff moe_router_bias_update_rate "
    "moe_router_enable_expert_bias",
    _OURS: "optimizer use_distributed_optimizer grad_reduce_in_fp32 calculate_per_token_loss finalize_model_grads_func "
    "no_sync_func grad_sync_func param_sync_func use_cpu_initialization perform_initialization variable_seq_lengths "
    "moe_token_dispatcher_type hidden_dropout attention_dropout batch_p2p_comm overlap_p2p_comm "
    "deallocate_pipeline_outputs num_distributed_optimizer_instances use_megatron_fsdp use_custom_fsdp "
    "overlap_param_gather_with_optimizer_step moe_router_fusion init_method output_layer_init_method "
    "embedding_init_method",
}
TAKEN = {
    package: {name: key for key, names in keys.items() for name in names.split()}
    for package, keys in (("vllm", _ENGINE), ("megatron", _MEGATRON))
}
# On a CPU vLLM 0.32 divides the logits of draft tokens by uninitialised memory in place of their temperatures:
# expand_batch_to_tokens in v1/sample/rejection_sampler.py. No test has compared the distributions on a GPU.
_SPECULATION = "at temperatures above 0 vLLM 0.32 samples wrongly on a CPU, and its log-probabilities hide it"
_SPECULATING = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
ROUNDED = "fp8_per_channel"
_NO_CPU = "vLLM has no kernel of it for a CPU, and its rounding is not proven after a flip"
_CHECKPOINT = "vLLM only reads checkpoints that were quantised before, and the learner publishes new weights"
_KINDS = {  # vLLM's other kinds, and why a node cannot have them
    "int8_per_channel_weight_only": "vLLM silently rounds no linear layer",
    "compressed-tensors": "vLLM reloads such weights wrongly, without an error",
    "nvfp4_per_token": "vLLM silently rounds no linear layer",
    **dict.fromkeys(("fp8_per_tensor", "fp8_per_block", "mxfp8", "mxfp4", "torchao", "online"), _NO_CPU),
    **dict.fromkeys(("fp8", "awq", "gptq", "modelopt", "quark", "bitsandbytes"), _CHECKPOINT),
}
_SOURCES = {  # the options are fields of these classes
    "vllm": {"EngineArgs": "engine/arg_utils.py"},
    "megatron": {
        "TransformerConfig": "core/transformer/transformer_config.py",
        "ModelParallelConfig": "core/model_parallel_config.py",
        "OptimizerConfig": "core/optimizer/optimizer_config.py",
        "DistributedDataParallelConfig": "core/distributed/distributed_data_parallel_config.py",
    },
}


def passthrough_problems(config: BaseConfig) -> Iterator[Problem]:
    """Names that cannot be passed on: those of another key, and those that the library does not have."""
    for key, package, extra in _extras(config):
        known = known_names(package) if extra else frozenset[str]()
        for name in extra:
            ours = _NODES if package == "vllm" and name.startswith("data_parallel") else TAKEN[package].get(name)
            if package == "megatron" and (why := refused_type(name)):
                yield Problem(f"{key}.{name}", "training in bfloat16 or float32", f"'{name}'", why)
            elif name in _SPECULATING and package == "vllm":
                yield Problem(f"{key}.{name}", "an engine without speculative decoding", f"'{name}'", _SPECULATION)
            elif ours is not None:
                hint = f"use {ours} instead" if ours else "Slipstream relies on the value that it sets"
                yield Problem(f"{key}.{name}", f"no option that Slipstream sets for {package}", f"'{name}'", hint)
            elif known and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                hint = f"did you mean '{near[0]}'?" if near else None
                yield Problem(f"{key}.{name}", f"an option of {package}", f"unknown name '{name}'", hint)


def quantization_problems(engine: EngineConfig, model: Architecture | None) -> Iterator[Problem]:
    """Why nodes cannot round the published weights as rollout.engine.quantization says."""
    kind = engine.quantization
    key = "rollout.engine.quantization"
    if kind is None:
        return
    if kind != ROUNDED:
        near = difflib.get_close_matches(kind, [ROUNDED, *_KINDS], n=1, cutoff=0.6)
        hint = f"did you mean '{near[0] if near and near[0] not in _KINDS else ROUNDED}'?"
        if why := _KINDS.get(kind):
            hint = f"{why}; {hint}"
        yield Problem(key, f"{ROUNDED} or null", f"'{kind}'", hint)
    elif model is not None and model.experts is not None:
        hint = "vLLM has no kernel of it for a CPU, and their rounding is not proven after a flip"
        yield Problem(key, "null for a model with experts", f"'{kind}'", hint)


def engine_step_problems(engine: EngineConfig) -> Iterator[Problem]:
    """Steps that are too small, as vLLM's SchedulerConfig.verify_max_model_len says when the engine starts."""
    key, tokens = "rollout.engine.max_batched_tokens", engine.max_batched_tokens
    if tokens is None:
        return
    if tokens < engine.max_num_seqs:
        hint = "every sequence that generates takes one token of a step"
        yield Problem(key, f"at least rollout.engine.max_num_seqs ({engine.max_num_seqs})", hint=hint)
    if engine.extra.get("enable_chunked_prefill") is False and tokens < engine.max_model_len:
        yield Problem(key, f"at least rollout.engine.max_model_len ({engine.max_model_len}) without chunked prefill")


def passthrough_warnings(config: BaseConfig) -> Iterator[str]:
    for key, package, extra in _extras(config):
        if extra:
            yield f"{key}: {', '.join(extra)} go to {package} untested; the proofs of docs/guarantees.md may fail."


def known_names(package: str) -> frozenset[str]:
    """The options of 'vllm' or 'megatron' in this environment; none where it is not installed."""
    found = find_spec(package)
    names: set[str] = set()
    for folder in (found.submodule_search_locations or ()) if found else ():
        for kind, file in _SOURCES[package].items():
            text = (Path(folder) / file).read_text(encoding="utf-8") if (Path(folder) / file).is_file() else ""
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and node.name == kind:
                    names.update(ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign))
    return frozenset(names)


def _extras(config: BaseConfig) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    yield "learner.megatron.extra", "megatron", config.learner.megatron.extra
    if config.rl is not None:
        yield "rollout.engine.extra", "vllm", config.rl.rollout.engine.extra
