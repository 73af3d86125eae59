"""The Megatron implementation of learner.backend.Backend."""

# ruff: noqa: E402
import atexit
import gc

_collecting = gc.isenabled()
gc.disable()  # hundreds of thousands of objects that stay: walking them while they are made costs a second

from learner.megatron import cpu_compat

cpu_compat.enable()  # before the first import of megatron

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from common.config import Config, OptimizerConfig, ParallelConfig, SftConfig
from learner.backend import LossFunction, Microbatch, StepResult
from learner.megatron import checkpoint, parallel
from learner.megatron.export import Exporter
from learner.megatron.hf_folder import check_layout, read_config
from learner.megatron.model import DTYPES, build
from learner.megatron.optimizer import Optimizer, wrap_chunks
from learner.megatron.schedule import Schedule

gc.freeze()  # nor does a later collection walk them
atexit.register(gc.unfreeze)  # else extension modules complain of leaks when the process ends
if _collecting:
    gc.enable()

logger = logging.getLogger(__name__)


class MegatronBackend:
    """A Hugging Face model on Megatron-Core with its optimizer, spread over the ranks of the world.

    Attributes:
        rank: global rank.
        world_size: ranks in all.
        data_parallel_rank: which replica's share of the batch this rank computes.
        data_parallel_size: replicas.
        vocab_size: entries of the vocabulary.
    """

    @classmethod
    def of(cls, config: Config | SftConfig) -> "MegatronBackend":
        """The backend that a job's or a warm start's config describes. Collective; raises as `__init__` does."""
        learner, model, run = config.learner, config.model, config.run
        return cls(Path(model.path), model.dtype, learner.parallel, learner.optimizer, run.steps, run.seed)

    def __init__(
        self,
        model_path: Path,
        dtype: str,
        layout: ParallelConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        seed: int = 0,
    ) -> None:
        """Join the world, build the model and load its weights. Collective.

        Args:
            model_path: Hugging Face folder.
            dtype: of the parameters, float32 or bfloat16; main gradients and optimizer states are float32.
            layout: sizes of the model-parallel groups; what remains of the world is data-parallel.
            optimizer: AdamW and its schedule.
            total_steps: where the schedule ends unless the optimizer's decay_steps says otherwise.
            seed: of Megatron's random generators.

        Raises:
            UsageError: a folder, a layout or a model that cannot be used; naming it.
        """
        hf_config = read_config(Path(model_path))
        self.model_path, self.layout = Path(model_path), layout
        check_layout(hf_config, layout, parallel.world_size())
        parallel.initialize(layout, seed)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.data_parallel_rank = mpu.get_data_parallel_rank()
        self.data_parallel_size = mpu.get_data_parallel_world_size()
        self.vocab_size = int(hf_config.vocab_size)
        model = build(self.model_path, hf_config, DTYPES[dtype], layout)
        self.chunks = wrap_chunks(model)
        self.optimizer = Optimizer(self.chunks, optimizer, DTYPES[dtype], total_steps)
        self.schedule = Schedule(self.chunks, model.config, parallel.device())
        self.exporter = Exporter(model, self.chunks)
        if self.rank == 0:
            logger.info(
                "model %s on %d ranks: tensor %d, pipeline %d x %d, expert %d, data %d; %s, %s",
                *(self.model_path, self.world_size, layout.tensor, layout.pipeline, layout.virtual_pipeline),
                *(layout.expert, self.data_parallel_size, dtype, parallel.device().type),
            )

    def train_step(
        self, microbatches: list[Microbatch], loss: LossFunction, temperature: float = 1.0, entropy: bool = False
    ) -> StepResult:
        """See learner.backend.Backend.train_step. Collective.

        Raises:
            SlipstreamError: the gradient norm is not finite; the weights are unchanged.
        """
        self.optimizer.zero_grad()
        totals = self.schedule.train(microbatches, loss, temperature, entropy)
        norm, rate = self.optimizer.step()
        mean = totals.loss_sum / max(1, totals.loss_tokens)
        return StepResult(mean, totals.loss_tokens, norm, rate, totals.sums, totals.maxima)

    def logprobs(self, microbatches: list[Microbatch], temperature: float = 1.0) -> list[Tensor]:
        """[T] float32 log-probabilities of the targets, on the CPU of every rank of the replica. Collective."""
        return self.schedule.logprobs(microbatches, temperature)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor on this rank's device), in a fixed order, on every rank. Collective.

        A tensor may share memory with the parameter: copy what must outlive the next step.
        """
        with torch.no_grad():
            yield from self.exporter.tensors()

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face folder that transformers and vLLM load; complete or absent. Collective."""
        self.exporter.save(self.model_path, Path(path))

    def save_checkpoint(self, path: Path) -> None:
        """Model, optimizer, step and RNG into the new folder `path`: durable on return, or absent. Collective."""
        checkpoint.save(Path(path), self.chunks, self.optimizer, self.layout)

    def load_checkpoint(self, path: Path) -> None:
        """The reverse, also under another parallel layout. Collective."""
        checkpoint.load(Path(path), self.chunks, self.optimizer, self.layout)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes to every rank. Collective."""
        return parallel.broadcast_bytes(data)

    def close(self) -> None:
        """Leave torch.distributed. Collective."""
        parallel.shutdown()
