"""A Hugging Face folder to Megatron model chunks, through Megatron-Bridge; start_weights.py gives them their values."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.deepseek import deepseek_v3_bridge  # noqa: F401  # it and the others register themselves
from megatron.bridge.models.glm import glm45_bridge  # noqa: F401
from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource
from megatron.bridge.models.llama import llama_bridge  # noqa: F401
from megatron.bridge.models.mistral import mistral_bridge  # noqa: F401
from megatron.bridge.models.qwen import qwen2_bridge, qwen3_bridge, qwen3_moe_bridge  # noqa: F401
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from common.config.converted import is_converted, read_converted
from common.config.schema import MoeConfig, ParallelConfig, RanksConfig, Recompute
from common.errors import UsageError
from learner.megatron import moe
from learner.megatron.conversion import bridge_fixes, hf_folder
from learner.megatron.cpu import compat

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Fused kernels of Apex and Transformer Engine.
_FUSED_ONLY = (
    "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_loss_fusion",
    "masked_softmax_fusion", "moe_permute_fusion", "moe_router_fusion",
    "persist_layer_norm", "moe_shared_expert_overlap",
)  # fmt: skip
_APEX = "fused_weight_gradient_mlp_cuda"  # its kernel that adds products to the gradients, and the key of that
_ACCUMULATION = "gradient_accumulation_fusion"


@dataclass
class Model:
    chunks: list[torch.nn.Module]  # GPTModel, one per virtual pipeline stage
    config: Any  # Megatron's TransformerConfig (the provider), shared by the chunks
    bridge: AutoBridge  # conversion to and from Hugging Face
    hf_config: Any  # the source's configuration
    tasks: list[Any]  # the bridge's conversion tasks, planned once; they refer to the chunks' parameters


def build_trained(path: Path, hf_config: Any, dtype: torch.dtype, learner: RanksConfig) -> Model:
    """`build` with what the config of a learner says of a model that trains: the policy, and a critic."""
    recompute, extra = learner.memory.recompute, learner.megatron.extra
    return build(path, hf_config, dtype, learner.parallel, learner.moe, recompute, extra)


def build(
    path: Path,
    hf_config: Any,
    dtype: torch.dtype,
    parallel: ParallelConfig,
    experts: MoeConfig,
    recompute: Recompute = "none",
    extra: Mapping[str, Any] = {},
) -> Model:
    """Build this rank's chunks, whose parameters have no values yet. Collective, after parallel.initialize.

    `extra`: learner.megatron.extra. Raises UsageError for rotary embeddings that Megatron gets wrong, and for tensors
    that only one side has. It does so too for what `experts` asks of a model that has none.
    """
    bridge_fixes.patch_bridge()
    bridge = open_bridge(path)
    provider = bridge.to_megatron_provider(load_weights=False)
    with _named(path):
        bridge_fixes.correct_provider(hf_config, provider)
    _configure(provider, dtype, parallel, recompute)
    moe.configure(provider, experts)
    for name, value in passed_to(TransformerConfig, extra).items():
        setattr(provider, name, value)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    virtual = parallel.virtual_pipeline
    chunks: list[torch.nn.Module] = [provider.provide(vp_stage=i if virtual > 1 else None) for i in range(virtual)]
    for chunk in chunks:
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())  # some modules, a router among them, are made on the CPU
        with _named(path):
            bridge_fixes.check_rope(hf_config, chunk)
        bridge_fixes.correct_latent_norms(chunk)
        moe.prepare(chunk, experts)
    _check_names(path, hf_config, bridge)
    tasks = bridge.get_conversion_tasks(chunks)
    _check_tasks(path, chunks, tasks)
    return Model(chunks, provider, bridge, hf_config, tasks)


class _Names(StateSource):
    """The tensors of the folder that a converted one was made of, by name only."""

    def __init__(self, names: list[str]) -> None:
        self._names = sorted(names)

    def get_all_keys(self) -> list[str]:
        return self._names

    def load_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        raise KeyError(f"a converted folder has {', '.join(keys[:5])} in Megatron's form only")


def open_bridge(path: Path) -> AutoBridge:
    """The bridge of a folder, with rope_theta where it reads it; tensors of a converted folder have names only."""
    bridge = AutoBridge.from_hf_pretrained(str(path))
    hf_folder.give_rope_theta(bridge.hf_pretrained.config)
    if is_converted(path):
        files: Any = bridge.hf_pretrained
        files._state_dict_accessor = StateDict(_Names(read_converted(path).names))
    return bridge


def passed_to(kind: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Those of learner.megatron.extra that are fields of `kind`, one of Megatron's dataclasses."""
    return {name: value for name, value in extra.items() if name in kind.__dataclass_fields__}


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"model.path: {path}: {error}") from None


def _check_tasks(path: Path, chunks: list[torch.nn.Module], tasks: list[Any]) -> None:
    """The bridge only logs a parameter that it has no source for, and leaves it random."""
    planned = {(task.vp_stage, task.param_name) for task in tasks if task is not None and task.param_weight is not None}
    missing = [
        name
        for stage, chunk in enumerate(chunks)
        for name, _ in chunk.named_parameters()
        if (stage, name) not in planned
        and not (chunk.share_embeddings_and_output_weights and name.startswith("output_layer."))
    ]
    if missing:
        raise UsageError(f"model.path: {path} has no weights for {', '.join(missing[:5])} ({len(missing)} in all)")


def _check_names(path: Path, hf_config: Any, bridge: AutoBridge) -> None:
    translator: Any = bridge._model_bridge
    translator._hf_config = hf_config  # GLM's asks for it
    registry = translator.mapping_registry()
    names = bridge.hf_pretrained.state.source.get_all_keys()
    alike = {name: re.sub(r"(?<=\.)\d+(?=\.)", "0", name) for name in names}  # one look-up for all layers and experts
    taken = {one for one in set(alike.values()) if registry.hf_to_megatron_lookup(one) is not None}
    known = [name for name, one in alike.items() if one in taken]
    hf_folder.check_names(path, names, known, hf_config.num_hidden_layers)


def _leave(weight: Tensor) -> None:
    """Leave a new parameter as its memory is."""


def _configure(provider: Any, dtype: torch.dtype, parallel: ParallelConfig, recompute: Recompute) -> None:
    on_cuda = torch.cuda.is_available()
    provider.tensor_model_parallel_size = parallel.tensor
    provider.pipeline_model_parallel_size = parallel.pipeline
    provider.context_parallel_size = parallel.context
    provider.expert_model_parallel_size = parallel.expert
    provider.expert_tensor_parallel_size = parallel.expert_tensor
    provider.virtual_pipeline_model_parallel_size = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    provider.sequence_parallel = parallel.sequence_parallel
    provider.num_layers_in_first_pipeline_stage = parallel.first_stage_layers
    provider.num_layers_in_last_pipeline_stage = parallel.last_stage_layers
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16 = dtype == torch.bfloat16
    provider.fp16 = False
    provider.autocast_dtype = None
    provider.use_cpu_initialization = not on_cuda
    # False would drop the tensor-parallel attributes, and the gradient norm would come out too small. So modules
    # initialise, with a function that writes nothing. Every parameter is loaded, as _check_tasks finds.
    provider.perform_initialization = True
    provider.init_method = provider.output_layer_init_method = provider.embedding_init_method = _leave
    provider.calculate_per_token_loss = True
    provider.variable_seq_lengths = parallel.pipeline > 1
    provider.moe_token_dispatcher_type = "alltoall"  # allgather refuses variable lengths, also in a dense model
    provider.hidden_dropout = provider.attention_dropout = 0.0
    # the backward pass computes nothing again, core attention, or every layer
    provider.recompute_granularity = None if recompute == "none" else recompute
    provider.recompute_method, provider.recompute_num_layers = ("uniform", 1) if recompute == "full" else (None, None)
    provider.recompute_modules = ["core_attn"]
    if parallel.virtual_pipeline > 1:
        # batched p2p mixes messages between the same two ranks; the send buffer must outlive an asynchronous send
        provider.overlap_p2p_comm = True
        provider.batch_p2p_comm = False
        provider.deallocate_pipeline_outputs = False
    fused = compat.fused()
    for name in () if fused else _FUSED_ONLY:
        if hasattr(provider, name):
            setattr(provider, name, False)
    if not fused or find_spec(_APEX) is None:  # DeepSeek's bridge asks for it all the same
        setattr(provider, _ACCUMULATION, False)
    spec = provider.transformer_layer_spec
    if isinstance(spec, functools.partial) and "use_transformer_engine" in spec.keywords:
        spec.keywords["use_transformer_engine"] = True  # layers.py may stand in for it
