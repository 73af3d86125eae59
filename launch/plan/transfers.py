"""Sizes of published versions, of checkpoints, and of the memory of an engine."""

import msgspec

from common.config.schema import Config
from common.weights.layout import Layout
from launch.plan.architecture import Architecture, Attention
from launch.plan.model_parameters import count, hf_tensors
from launch.plan.static_memory import ADAM_BYTES, ITEM_BYTES

MIB = 1 << 20
MAIN_PARAMETER_BYTES = 4  # saved with the optimizer, whatever the model's dtype


class Publish(msgspec.Struct, frozen=True):
    """One policy version on its way to the nodes.

    Attributes:
        bytes: size of the flat buffer, which the lead rank and every node keep in host memory.
        buckets: number of pieces in which it is sent.
        bytes_per_s: rate at which a publish just ends within weights.timeout_s.
    """

    bytes: int
    buckets: int
    tensors: int
    bytes_per_s: float


class Engine(msgspec.Struct, frozen=True):
    """One vLLM engine's memory, per device.

    Attributes:
        weight_bytes: size of its share of the weights.
        cache_bytes_per_token: size of the key-value cache for one token.
    """

    devices: int
    weight_bytes: int
    cache_bytes_per_token: float

    def cache_tokens(self, device_bytes: float, utilization: float) -> int:
        """Tokens whose keys and values fit beside the weights; 0 when the weights do not fit."""
        return max(0, int((device_bytes * utilization - self.weight_bytes) / self.cache_bytes_per_token))


def publish_of(config: Config, model: Architecture) -> Publish:
    """The weight plane's flat buffer for this model."""
    layout = Layout.of([(name, config.model.dtype, shape) for name, shape in hf_tensors(model)])
    return Publish(
        bytes=layout.total_bytes,
        buckets=-(-layout.total_bytes // (config.weights.bucket_mib * MIB)),
        tensors=len(layout.entries),
        bytes_per_s=layout.total_bytes / config.weights.timeout_s,
    )


def checkpoint_bytes(model: Architecture, dtype: str) -> int:
    """Size of one checkpoint: parameters, float32 main parameters and Adam's two states."""
    return count(model) * (ITEM_BYTES[dtype] + MAIN_PARAMETER_BYTES + ADAM_BYTES)


def engine_of(config: Config, model: Architecture) -> Engine:
    """The memory of one of the fleet's engines; keys and values have the model's dtype."""
    devices, item = config.rollout.engine.tensor_parallel, ITEM_BYTES[config.model.dtype]
    a = model.attention
    if isinstance(a, Attention):
        heads = max(a.kv_heads, devices)  # vLLM copies a key-value head where there are fewer than devices
        per_layer = 2 * heads * a.head_dim / devices
    else:
        per_layer = a.kv_rank + a.rope_dim  # the compressed form, whole on every device
    return Engine(devices, count(model) * item // devices, per_layer * model.layers * item)
