"""Mixtral for Megatron-Bridge 0.3.1, which has no bridge of its own for it.

Checkpoints name one matrix per expert, `block_sparse_moe.experts.N.w1` (gate), `w3` (up) and `w2` (down);
transformers 5 fuses them in memory, but writes and reads these names. Importing this module registers the bridge.
"""

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import MixtralForCausalLM

_PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "model.layers.*.input_layernorm.weight",
    "decoder.layers.*.self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    "decoder.layers.*.pre_mlp_layernorm.weight": "model.layers.*.post_attention_layernorm.weight",
    "decoder.layers.*.mlp.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "decoder.layers.*.mlp.experts.linear_fc2.weight*": "model.layers.*.block_sparse_moe.experts.*.w2.weight",
}


@MegatronModelBridge.register_bridge(source=MixtralForCausalLM, target=GPTModel, model_type="mixtral")
class MixtralBridge(MegatronModelBridge):
    """Mixtral 8x7B and 8x22B: Mistral's layers with a router over top-k experts, softmax over the chosen ones."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Megatron's provider for a Hugging Face configuration."""
        provider = super().provider_bridge(hf_pretrained)
        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.position_embedding_type = "rope"
        provider.add_bias_linear = False
        provider.add_qkv_bias = False
        provider.qk_layernorm = False
        provider.hidden_dropout = 0.0
        provider.moe_ffn_hidden_size = hf_pretrained.config.intermediate_size
        provider.moe_grouped_gemm = True
        provider.moe_permute_fusion = True
        # Hugging Face divides the softmax over all experts by the sum of the chosen: the softmax over the chosen
        provider.moe_router_pre_softmax = False
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        """The parameters of Hugging Face that each of Megatron's is built from."""
        attention, experts = "model.layers.*.self_attn", "model.layers.*.block_sparse_moe.experts.*"
        return MegatronMappingRegistry(
            *(AutoMapping(megatron_param=ours, hf_param=theirs) for ours, theirs in _PLAIN.items()),
            QKVMapping(
                megatron_param="decoder.layers.*.self_attention.linear_qkv.weight",
                q=f"{attention}.q_proj.weight",
                k=f"{attention}.k_proj.weight",
                v=f"{attention}.v_proj.weight",
            ),
            GatedMLPMapping(
                megatron_param="decoder.layers.*.mlp.experts.linear_fc1.weight*",
                gate=f"{experts}.w1.weight",
                up=f"{experts}.w3.weight",
            ),
        )
