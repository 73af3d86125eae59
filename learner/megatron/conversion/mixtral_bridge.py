"""Mixtral for Megatron-Bridge 0.3.1, which has no bridge of its own for it.

Checkpoints name one matrix per expert, `block_sparse_moe.experts.N.w1` (gate), `w3` (up) and `w2` (down);
transformers 5 fuses them in memory, but writes and reads these names. Importing this module registers the bridge.
"""

import re
from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import MixtralForCausalLM

register: Any = MegatronModelBridge.register_bridge  # typed for classes that need no arguments


@register(source=MixtralForCausalLM, target=GPTModel, model_type="mixtral")
class MixtralBridge(Qwen3MoEBridge):
    """Mixtral 8x7B and 8x22B: Qwen3's layers without norms of queries and keys, and other names for the experts.

    Hugging Face divides the softmax over all experts by the sum of the chosen: the softmax over the chosen, as Qwen3's.
    """

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Megatron's provider for a Hugging Face configuration."""
        provider = super().provider_bridge(hf_pretrained)
        provider.qk_layernorm = False
        provider.moe_ffn_hidden_size = hf_pretrained.config.intermediate_size
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        """The parameters of Hugging Face that each of Megatron's is built from."""
        ours, theirs = "decoder.layers.*.mlp", "model.layers.*.block_sparse_moe"
        up, gate = f"{theirs}.experts.*.w3.weight", f"{theirs}.experts.*.w1.weight"
        other = re.compile(r"\.mlp\.|[qk]_layernorm")
        return MegatronMappingRegistry(
            *(mapping for mapping in super().mapping_registry() if not other.search(mapping.megatron_param)),
            AutoMapping(f"{ours}.router.weight", f"{theirs}.gate.weight"),
            AutoMapping(f"{ours}.experts.linear_fc2.weight*", f"{theirs}.experts.*.w2.weight"),
            GatedMLPMapping(f"{ours}.experts.linear_fc1.weight*", gate=gate, up=up),
        )
