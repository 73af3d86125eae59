"""A Hugging Face folder to Megatron model chunks, through Megatron-Bridge."""

import functools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import AutoConfig

from common.config import ParallelConfig
from common.errors import UsageError
from learner.megatron import bridge_fixes

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Fused kernels of Apex and Transformer Engine, and allocations by CUDA graphs: all of them need the GPU.
_CUDA_ONLY = (
    *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_loss_fusion"),
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "moe_permute_fusion", "moe_router_fusion"),
    "persist_layer_norm",
)


@dataclass
class Model:
    """One rank's share of the model.

    Attributes:
        chunks: GPTModel, one per virtual pipeline stage.
        config: Megatron's TransformerConfig (the provider), shared by the chunks.
        bridge: conversion to and from Hugging Face.
        hf_config: the source's configuration.
    """

    chunks: list[torch.nn.Module]
    config: Any
    bridge: AutoBridge
    hf_config: Any


def read_config(path: Path) -> Any:
    """The transformers configuration of a Hugging Face folder.

    Raises:
        UsageError: there is no such folder, or no usable config.json or weights in it.
    """
    if not path.is_dir():
        raise UsageError(f"model.path: expected a Hugging Face folder, found nothing at {path}")
    if not (path / "config.json").is_file():
        raise UsageError(f"model.path: {path} has no config.json")
    if not any(path.glob("*.safetensors")):
        raise UsageError(f"model.path: {path} has no *.safetensors")
    try:
        architectures = json.loads((path / "config.json").read_text()).get("architectures")
    except ValueError as error:
        raise UsageError(f"model.path: {path / 'config.json'} is not JSON: {error}") from None
    if not architectures:
        raise UsageError(f"model.path: {path / 'config.json'} names no architectures")
    config = AutoConfig.from_pretrained(path)
    bridge_fixes.prepare_config(config)
    return config


def check_layout(config: Any, parallel: ParallelConfig, world_size: int) -> None:
    """Whether a model of this configuration can be cut that way.

    Raises:
        UsageError: naming the key that does not fit.
    """
    experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    later = {"context": parallel.context > 1, "expert_tensor": parallel.expert_tensor > 1}
    for key, used in later.items():
        if used:
            raise UsageError(f"learner.parallel.{key}: only 1 is supported yet, found {getattr(parallel, key)}")
    if parallel.expert > 1 and not experts:
        raise UsageError(f"learner.parallel.expert: {parallel.expert} for a model without experts")
    if experts and parallel.tensor > 1:
        raise UsageError("learner.parallel.tensor: a model with experts needs sequence parallelism, not supported yet")
    if world_size % parallel.model_ranks:
        raise UsageError(
            f"learner.parallel: tensor x pipeline x context = {parallel.model_ranks} does not divide "
            f"learner.world_size {world_size}"
        )
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    dimensions = {"attention heads": heads, "key-value heads": kv_heads, "vocabulary entries": config.vocab_size}
    for what, n in dimensions.items():
        if n % parallel.tensor:
            raise UsageError(f"learner.parallel.tensor: {parallel.tensor} does not divide the model's {n} {what}")
    if experts and experts % parallel.expert:
        raise UsageError(f"learner.parallel.expert: {parallel.expert} does not divide the model's {experts} experts")
    stages = parallel.pipeline * parallel.virtual_pipeline
    key = "virtual_pipeline" if parallel.virtual_pipeline > 1 else "pipeline"
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise UsageError("learner.parallel.virtual_pipeline: needs learner.parallel.pipeline of at least 2")
    if config.num_hidden_layers % stages:
        raise UsageError(
            f"learner.parallel.{key}: {stages} pipeline stages do not divide the model's "
            f"{config.num_hidden_layers} layers"
        )


def build(path: Path, hf_config: Any, dtype: torch.dtype, parallel: ParallelConfig) -> Model:
    """Build and load this rank's chunks. Collective, after parallel.initialize.

    Raises:
        UsageError: an architecture that the bridge does not know, or rotary embeddings that Megatron gets wrong.
    """
    bridge_fixes.patch_bridge()
    try:
        bridge = AutoBridge.from_hf_pretrained(str(path))
    except ValueError as error:
        raise UsageError(f"model.path: {path}: {error}") from None
    bridge_fixes.prepare_config(bridge.hf_pretrained.config)
    provider = bridge.to_megatron_provider(load_weights=False)
    bridge_fixes.correct_provider(hf_config, provider)
    _configure(provider, dtype, parallel)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    virtual = parallel.virtual_pipeline
    chunks = [provider.provide(vp_stage=i if virtual > 1 else None) for i in range(virtual)]
    for chunk in chunks:
        bridge_fixes.check_rope(hf_config, chunk)
    bridge.load_hf_weights(chunks, str(path))
    return Model(chunks, provider, bridge, hf_config)


def _configure(provider: Any, dtype: torch.dtype, parallel: ParallelConfig) -> None:
    on_cuda = torch.cuda.is_available()
    provider.tensor_model_parallel_size = parallel.tensor
    provider.pipeline_model_parallel_size = parallel.pipeline
    provider.context_parallel_size = parallel.context
    provider.expert_model_parallel_size = parallel.expert
    provider.expert_tensor_parallel_size = parallel.expert_tensor
    provider.virtual_pipeline_model_parallel_size = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    provider.sequence_parallel = False
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16, provider.autocast_dtype = dtype == torch.bfloat16, False, None
    provider.use_cpu_initialization = not on_cuda
    # False would drop the tensor-parallel attributes, and the gradient norm would come out too small
    provider.perform_initialization = True
    provider.calculate_per_token_loss = True
    provider.variable_seq_lengths = parallel.pipeline > 1
    provider.moe_token_dispatcher_type = "alltoall"  # allgather refuses variable lengths, also in a dense model
    provider.hidden_dropout = provider.attention_dropout = 0.0
    if parallel.virtual_pipeline > 1:
        # batched p2p mixes messages between the same two ranks; the send buffer must outlive an asynchronous send
        provider.overlap_p2p_comm, provider.batch_p2p_comm = True, False
        provider.deallocate_pipeline_outputs = False
    if not on_cuda:
        for name in _CUDA_ONLY:
            if hasattr(provider, name):
                setattr(provider, name, False)
    spec = provider.transformer_layer_spec
    if isinstance(spec, functools.partial) and "use_transformer_engine" in spec.keywords:
        spec.keywords["use_transformer_engine"] = True  # cpu_layers stands in for it
