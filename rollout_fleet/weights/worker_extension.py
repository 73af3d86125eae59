"""Weights inside the engine's worker: vLLM's weight-transfer interface over the receiver of common/weights.

`slipstream_handle` hands over the learner's messages. A Publish starts a thread that receives while generation
continues. `update_weights` loads the verified buffer in place, rounded where the engine computes in 8 bits. A second
thread then reads the live parameters back as a proof. All are called through collective_rpc, between two steps.
"""

import threading
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.distributed.weight_transfer import base

from common.weights.transports.nccl import own_stream, remember_device
from common.weights.wire import flat_buffer, messages
from common.weights.wire.layout import Layout
from rollout_fleet.vllm_patches import worker_process
from rollout_fleet.vllm_patches.shared_files import this_worker
from rollout_fleet.weights import rounding, weight_proof
from rollout_fleet.weights.tensor_parallel import EngineWorkers
from rollout_fleet.weights.weight_proof import Proof


@dataclass
class SlipstreamUpdateInfo(base.WeightTransferUpdateInfo):
    """Use the staged version."""

    incarnation: int
    version: int


class SlipstreamTransferEngine(base.WeightTransferEngine[base.WeightTransferInitInfo, SlipstreamUpdateInfo]):
    """Registered as 'slipstream'."""

    init_info_cls = base.WeightTransferInitInfo
    update_info_cls = SlipstreamUpdateInfo
    supports_draft_weight_update = False
    model: Any  # a module of vLLM's with load_weights

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Without data parallelism the world is the workers of this engine.
        self.workers = EngineWorkers(get_world_group(), remember_device())
        self.receiver = self.workers.receiver
        self.proof: Proof | None = None
        self._proving: threading.Thread | None = None
        self._applied: tuple[int, int] | None = None
        self._loaded: torch.Tensor | None = None  # a shard's or rounded parameters are compared with it

    @property
    def _rounds(self) -> bool:
        """Whether the parameters are roundings of what was published."""
        return self.model_config.quantization is not None

    def init_transfer_engine(self, init_info: base.WeightTransferInitInfo) -> None:
        """Nothing: the learner's messages come through `slipstream_handle`."""

    def start_weight_update(self) -> None:
        """The parameters are about to change: let the proof of the last version end first."""
        if self._proving is not None:
            self._proving.join()
        self.proof = None
        self._applied = None

    def receive_weights(self, update_info: SlipstreamUpdateInfo) -> None:
        """Load the staged version into the live parameters, on every rank; raises ValueError when it is not staged."""
        layout = self.receiver.layout
        flat: torch.Tensor | None = None
        error: Exception | None = None
        if layout is None:
            raise ValueError("no layout was announced")
        try:
            flat = self.workers.take(update_info.incarnation, update_info.version, layout.total_bytes)
        except Exception as failure:
            error = failure
        self.workers.agree(error)  # rounding is collective in vLLM: it would wait for a rank without the buffer
        assert flat is not None
        try:
            with torch.no_grad():
                if self._rounds:
                    rounding.load_and_round(self.model, flat_buffer.view(flat, layout), self.model_config)
                else:
                    self.model.load_weights(flat_buffer.view(flat, layout))
                worker_process.renew(self.model, self.model_config.dtype)
            if torch.cuda.is_available():  # other threads prove the parameters and write the buffer
                torch.cuda.current_stream().synchronize()
        except Exception as failure:  # without it the other ranks would wait for this one for ever
            error = failure
        self.workers.agree(error)
        self._applied = (update_info.incarnation, update_info.version)
        self._loaded = flat if self.workers.size > 1 or self._rounds else None
        if self.workers.receives:
            self.receiver.give_back(flat)

    def finish_weight_update(self) -> None:
        """Begin to prove; generation continues, and the engine delays its results until the proof is there."""
        if self._applied is None:
            return
        self._proving = threading.Thread(target=self._prove, args=(*self._applied, self.receiver.layout), daemon=True)
        self._proving.start()

    def shutdown(self) -> None:
        self.receiver.close()

    def _prove(self, incarnation: int, version: int, layout: Layout) -> None:
        flat = self._loaded
        self._loaded = None
        try:
            # In the model's stream every copy of a parameter would wait for an engine step, and the next step for it.
            with own_stream(self.device, "prove"):
                self.proof = self._proof(incarnation, version, layout, flat)
        except Exception as error:  # whatever prevents the proof is the reason not to trust these weights
            self.proof = Proof(incarnation, version, error=f"{type(error).__name__}: {error}")
        self.workers.lock()

    def _proof(self, incarnation: int, version: int, layout: Layout, flat: torch.Tensor | None) -> Proof:
        if flat is None:
            return Proof(incarnation, version, weight_proof.checksum(self.model, layout))
        # A shard that matches its part of the version proves the whole version's checksum.
        shards = get_tp_group()
        dtype = self.model_config.dtype if self._rounds else None
        weight_proof.check_shard(self.model, layout, flat, shards.rank_in_group, shards.world_size, dtype)
        parts = weight_proof.part_checksums(flat, layout, self.workers.rank, self.workers.size)
        return Proof(incarnation, version, parts=parts)


class WorkerExtension:
    """Mixed into vLLM's worker (worker_extension_cls), so that collective_rpc finds these methods."""

    weight_transfer_engine: Any
    model_runner: Any

    def slipstream_handle(self, message: bytes, node_id: str) -> bytes:
        """As `Receiver.handle`, with encoded messages; workers other than the first only note the layout."""
        told = messages.decode_from_learner(message)
        engine = self.weight_transfer_engine
        if not engine.workers.receives:
            if not isinstance(told, messages.Welcome):
                return b""
            told = msgspec.structs.replace(told, learner_endpoint="")  # the first worker serves
            engine.workers.forget()
        answer = engine.receiver.handle(told, node_id)
        return b"" if answer is None else messages.encode(answer)

    def slipstream_staging(self) -> bytes:
        """Encoded StagingStatus."""
        return msgspec.msgpack.encode(self.weight_transfer_engine.receiver.status)

    def slipstream_moe_layers(self) -> list[int]:
        """Numbers, from 0, of the layers with routed experts."""
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        return sorted(m.layer_id for m in self.model_runner.get_model().modules() if isinstance(m, MoERunner))

    def slipstream_unrounded_layers(self) -> list[str]:
        """Names of the linear layers that are not in 8 bits."""
        return rounding.unrounded_layers(self.model_runner.get_model())

    def slipstream_shared_files(self) -> bytes:
        """Encoded Worker of shared_files.py: this process and the shared memory files that it maps."""
        return msgspec.msgpack.encode(this_worker())

    def slipstream_proof(self) -> bytes:
        """Encoded Proof of the newest flip, or None while it is not there yet."""
        return msgspec.msgpack.encode(self.weight_transfer_engine.proof)
