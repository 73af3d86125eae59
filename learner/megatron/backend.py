"""The Megatron implementation of learner.backend_protocol.Backend."""

# ruff: noqa: E402
import atexit
import gc

_collecting = gc.isenabled()
gc.disable()  # the imports make hundreds of thousands of objects; walking them meanwhile costs a second

from learner.megatron.cpu import compat

compat.enable()  # before the first import of megatron

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from common.config.parallel_layout import document_multiple, world_problems
from common.config.passthrough import passthrough_warnings
from common.config.schema import BaseConfig, ModelConfig, RanksConfig
from common.errors import UsageError
from learner.backend_protocol import LossFunction, Microbatch, StepResult
from learner.megatron import parallel, start_weights
from learner.megatron.checkpoint import CheckpointWriter
from learner.megatron.conversion import verify
from learner.megatron.conversion.export import Exporter
from learner.megatron.conversion.hf_folder import read_config
from learner.megatron.conversion.model import DTYPES, build_trained
from learner.megatron.critic import FOLDER as CRITIC_FOLDER
from learner.megatron.critic import Critic
from learner.megatron.lora import Adapters
from learner.megatron.memory import Offload, Reference
from learner.megatron.moe import Experts
from learner.megatron.optimizer import Optimizer, wrap_chunks
from learner.megatron.schedule import Schedule

gc.freeze()  # later collections do not walk them either
atexit.register(gc.unfreeze)  # else extension modules complain of leaks when the process ends
if _collecting:
    gc.enable()

logger = logging.getLogger(__name__)


class MegatronBackend:
    """A Hugging Face model on Megatron-Core with its optimizer; see learner.backend_protocol.Backend."""

    broadcast_bytes = staticmethod(parallel.broadcast_bytes)
    all_gather_bytes = staticmethod(parallel.gather)
    deliver = staticmethod(parallel.deliver)
    largest = staticmethod(parallel.largest)
    close = staticmethod(parallel.shutdown)

    @classmethod
    def of(cls, config: BaseConfig, resumes: bool = False) -> "MegatronBackend":
        """The backend that a job's or a warm start's config describes. Collective; raises as `__init__` does."""
        made = cls(config.model, config.learner, config.run.steps * config.learner.updates, config.run.seed, resumes)
        for warning in passthrough_warnings(config) if made.rank == 0 else ():
            logger.warning("%s", warning)
        return made

    def __init__(
        self, model: ModelConfig, learner: RanksConfig, total_steps: int, seed: int = 0, resumes: bool = False
    ) -> None:
        """Join the world, build the model and load its weights. Collective.

        Main gradients and optimizer states are float32, whatever the model's dtype is. `total_steps`: the step at which
        the schedule ends, unless the optimizer's decay_steps names another. The policy's schedule begins when a critic
        has had its first steps alone. `seed` is that of Megatron's random generators. `resumes`, where rank 0's counts:
        load_checkpoint comes next, so the weights of model.path are not read. Raises UsageError, naming the folder, the
        layout or the model that cannot be used.
        """
        self.model_path = Path(model.path)
        layout = learner.parallel
        dtype = DTYPES[model.dtype]
        for problem in world_problems(parallel.world_size(), layout):
            raise UsageError(str(problem))
        hf_config = read_config(self.model_path)
        parallel.initialize(layout, seed, learner.timeout_s)
        resumes = parallel.broadcast_bytes(b"resumes" * resumes) != b""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.data_parallel_rank = mpu.get_data_parallel_rank()
        self.data_parallel_size = mpu.get_data_parallel_world_size()
        self.vocab_size = int(hf_config.vocab_size)
        self.hidden_size = int(hf_config.hidden_size)
        self.document_multiple = document_multiple(layout)
        if model.verify:
            verify.check_translation(self.model_path, hf_config, dtype, layout)
        built = build_trained(self.model_path, hf_config, dtype, learner)
        if not resumes or learner.lora is not None:  # a checkpoint of adapters has no other weights
            start_weights.load(self.model_path, built, layout)
        self.adapters = Adapters(built, learner.lora, self.model_path, seed)
        self.chunks = wrap_chunks(built, learner)
        alone = learner.value_model.warmup_steps * learner.updates if learner.value_model else 0
        self.optimizer = Optimizer(self.chunks, learner, dtype, total_steps - alone)
        experts = Experts(built.chunks, built.config, learner.moe)
        self.routing_shape = experts.shape
        self.routing_layers = experts.layers
        self.schedule = Schedule(self.chunks, built.config, parallel.device(), experts)
        if model.verify and not resumes:
            verify.check_weights(self.model_path, hf_config, dtype, self.schedule.logprobs)
        self.exporter = Exporter(built, self.adapters)
        self.part_layout = self.exporter.part.layout
        self.reference = Reference(model, learner, built, self.chunks)
        self.checkpoints = CheckpointWriter(self.chunks, self.optimizer, layout, self.adapters.identity)
        self.offload = Offload(learner.memory, self.chunks, self.optimizer)
        self.on_device = self.offload.parameters
        self._whole = self.offload.whole
        critic = learner.value_model
        self.critic = None if critic is None else Critic(model, learner, critic, total_steps, resumes)
        if self.rank == 0:
            sizes = f"tensor {layout.tensor}, pipeline {layout.pipeline} x {layout.virtual_pipeline}"
            sizes += f", expert {layout.expert}, data {self.data_parallel_size}"
            kind = f"{model.dtype}, {parallel.device().type}"
            logger.info("model %s on %d ranks: %s; %s", self.model_path, self.world_size, sizes, kind)

    def train_step(
        self,
        microbatches: list[Microbatch],
        loss: LossFunction,
        temperature: float = 1.0,
        entropy: bool = False,
        accept: Callable[[StepResult], bool] | None = None,
    ) -> StepResult:
        """Raises SlipstreamError when the gradient norm is not finite; the weights are unchanged."""
        with self.offload.parameters(), self.offload.gradients():
            self.optimizer.zero_grad()
            biases = self.schedule.experts.biases()
            result = self.schedule.train(microbatches, loss, temperature, entropy)
            if accept is not None and not accept(result):
                self.schedule.experts.restore(biases)
                return result
            with self.offload.optimizer():
                norm, rate = self.optimizer.step()
        return replace(result, grad_norm=norm, lr=rate)

    def logprobs(self, microbatches: list[Microbatch], temperature: float = 1.0) -> list[Tensor]:
        with self.offload.parameters(), self.adapters.whole():
            return self.schedule.logprobs(microbatches, temperature)

    def reference_logprobs(self, microbatches: list[Microbatch], temperature: float = 1.0) -> list[Tensor]:
        """The reference is the model in learner.loss.reference, else in model.path; it has its own routing.

        It has no adapters.
        """
        unrouted = [replace(batch, routed_experts=None) for batch in microbatches]
        with self._whole(), self.adapters.disabled(), self.reference.in_place():
            return self.schedule.logprobs(unrouted, temperature)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """On this rank's device. A tensor may share memory with the parameter: copy it before asking for the next."""
        with self._whole():
            yield from self.exporter.tensors()

    def export_frozen(self) -> Iterator[tuple[str, Tensor]]:
        with self._whole():
            yield from self.exporter.tensors(trained=False)

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        with self._whole():
            yield from self.adapters.tensors()

    def export_part(self) -> Iterator[tuple[str, Tensor]]:
        """As `export`. Ranks of one tensor-parallel group advance together: one that pauses delays the others."""
        with self._whole():
            yield from self.exporter.part.tensors()

    def save_hf(self, path: Path) -> None:
        with self._whole():
            self.exporter.save(self.model_path, path)

    def start_checkpoint(self, path: Path) -> None:
        with self._whole(), self.offload.optimizer():
            self.checkpoints.start(path)
        if self.critic is not None:
            self.critic.start_checkpoint(path)

    def checkpoint_done(self, wait: bool) -> bool:
        done = self.checkpoints.done(wait)
        return done and (self.critic is None or self.critic.checkpoints.done(wait))

    def load_checkpoint(self, path: Path) -> None:
        """Raises UsageError as CheckpointWriter.load, and when either has a critic and the other has none."""
        saved = (path / CRITIC_FOLDER).is_dir()
        if saved != (self.critic is not None):
            expected, found = ("a section", "unset") if saved else ("unset", "a section")
            contents = "with a critic" if saved else "without a critic"
            raise UsageError(f"learner.critic: expected {expected}, found {found}; {path} is a checkpoint {contents}")
        with self._whole(), self.offload.optimizer():
            self.checkpoints.load(path)
        if self.critic is not None:
            self.critic.load_checkpoint(path)
