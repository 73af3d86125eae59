"""The patches with which all of TRL 1.16's ways train on a CPU; they are set at run time, and nothing is edited.

PATCHES says what each patch is for, and WAYS which way needs which. Results name them. vLLM's server imports this file
through --worker-extension-cls, so that patches are set in its worker, too.
"""

import atexit
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import harness

WORKER = "TRL_PATCHES_WORKER"  # set in the server's processes
PATCHES = {
    "keep_weights": "vLLM packs the weights of linear layers for the CPU and drops the parameters that a sync fills",
    "float32": "TRL gives its own LLM no dtype, and vLLM would sample in bfloat16 from a float32 model",
    "gloo": "vLLM's and TRL's transfer of weights is NCCL's alone: gloo takes its place, one broadcast per tensor",
    "api_server": "the server starts as a module: vLLM's command line looks for a package named vllm",
    "init_communicator": "TRL's client refuses a device that is not CUDA",
    "tree_attention": "the kernel comes from the Hub and needs CUDA: torch's attention, one call per segment",
    "peak_flops": "TRL asks CUDA for the device's name",
    "unseeded": "vLLM's engine dies of a seeded request whose prefill is cut: a CPU's generator has no offset",
    "chat_template": "the asynchronous trainer takes conversations only: a template that adds nothing",
    "game_loop": "the game's turns in the place of tool calls, which the model was not taught",
}
WAYS = {
    "transformers": (),
    "colocate": ("keep_weights", "float32"),
    "server": ("keep_weights", "gloo", "api_server", "init_communicator"),
    "async": ("keep_weights", "gloo", "api_server", "tree_attention", "peak_flops", "unseeded", "chat_template"),
}


def names(way: str, task: str) -> list[str]:
    """The patches of a way of TRL."""
    return [*WAYS[way], *(["game_loop"] if way == "async" and task == "number_guessing" else [])]


def keep_weights() -> None:
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = plain


class Gloo:
    """A group of two ranks in the shape of vLLM's PyNcclCommunicator."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group as create

        self._group = create(address, port, rank, world_size, "gloo")
        self.group = SimpleNamespace()  # TRL clears two attributes of it at the end

    def broadcast(self, tensor: Any, src: int) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        del self._group


def send(iterator: Any, group: Gloo, src: int, post_iter_func: Any, **_: Any) -> None:
    """In the place of vLLM's packed_nccl_broadcast_producer."""
    for item in iterator:
        group.broadcast(post_iter_func(item).detach().contiguous(), src)


def open_endpoint(info: dict[str, Any], rank: int = 0) -> Gloo:
    """In the place of vLLM's trainer_init."""
    return Gloo(info["master_address"], info["master_port"], rank, info["world_size"])


def init_communicator(self: Any, device: Any = None) -> None:
    """In the place of VLLMClient.init_communicator, without its demand for CUDA."""
    info = {"master_address": "127.0.0.1", "master_port": harness.free_port(), "rank_offset": 1}
    info["world_size"] = self.get_world_size() + 1
    with ThreadPoolExecutor(max_workers=1) as pool:
        asked = pool.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
        self.communicator = open_endpoint(info)
        asked.result()
    atexit.register(self.close_communicator)


def tree_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: Any = None, **tree: Any
) -> Any:
    """In the place of TRL's FlashAttention-3 kernel: each segment of the prefix tree sees its path.

    query: [1, heads, tokens, head_dim]; returns [1, tokens, heads, head_dim].
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    index = tree["tree_kv_index"]
    query = query[0]
    keys = key[0].index_select(1, index)
    values = value[0].index_select(1, index)
    starts = tree["tree_cu_seqlens_q"].tolist()
    ends = tree["tree_cu_seqlens_k"].tolist()
    parts = []
    for q0, q1, k0, k1 in zip(starts[:-1], starts[1:], ends[:-1], ends[1:], strict=True):
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril((k1 - k0) - (q1 - q0))  # causal from the lower right
        q, k, v = query[None, :, q0:q1], keys[None, :, k0:k1], values[None, :, k0:k1]
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)[0])
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def patch_server_client() -> None:
    """The trainer's side of the way `server`."""
    import trl.generation.vllm_client as client

    client.VLLMClient.init_communicator = init_communicator
    client.packed_nccl_broadcast_producer = send


def patch_asynchronous() -> None:
    """The trainer's side of the way `async`."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing, weight_transfer

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing.tree_attention = tree_attention
    weight_transfer.open_trainer_endpoint = open_endpoint
    weight_transfer.packed_nccl_broadcast_producer = send
    weight_transfer.get_ip = lambda: "127.0.0.1"


class Extension:
    """vLLM's worker imports this file for it."""


def patch_worker() -> None:
    """The server's side: gloo in NCCL's place in vLLM's life cycle of an update, and requests without seeds."""
    import torch
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.sampling_params import SamplingParams, SamplingType

    class GlooEngine(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info: Any) -> None:
            rank = init_info.rank_offset + self.parallel_config.rank
            self.model_update_group = Gloo(init_info.master_address, init_info.master_port, rank, init_info.world_size)

        def receive_weights(self, update_info: Any) -> None:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                self.model_update_group.broadcast(weight, src=0)
                self.model.load_weights([(name, weight)])

    WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
    keep_weights()
    SamplingParams.sampling_type = property(
        lambda self: SamplingType.GREEDY if self.temperature < 1e-5 else SamplingType.RANDOM
    )


if WORKER in os.environ:
    patch_worker()
