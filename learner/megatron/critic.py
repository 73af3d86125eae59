"""A critic beside the policy: a model of the same shape and layout with one value for each place, not a vocabulary.

    hidden states h [n, H] of the rows, head w [1, H]:    value = h w^T, in float32

The head stands in the place of the output layer, whole on every rank of the last stage. So each tensor-parallel rank
has all values and the whole loss, and no backward pass adds up its ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from safetensors import safe_open
from torch import Tensor

from common.config.critic import CriticConfig
from common.config.critic_checks import CRITIC_SUFFIX, SCORE, is_critic
from common.config.schema import ModelConfig, ParallelConfig, RanksConfig
from learner.backend_protocol import LossFunction, Microbatch, StepResult
from learner.megatron import parallel, start_weights
from learner.megatron.checkpoint import CheckpointWriter
from learner.megatron.conversion import hf_folder
from learner.megatron.conversion.export import EXPORT_OPTIONS, write_folder
from learner.megatron.conversion.model import DTYPES, Model, build_trained
from learner.megatron.memory import Offload
from learner.megatron.moe import Experts
from learner.megatron.optimizer import Optimizer, wrap_chunks
from learner.megatron.pack_layout import LossRows
from learner.megatron.parallel import mpu
from learner.megatron.schedule import Schedule

FOLDER = "critic"  # in a checkpoint
_OUTPUT = ("output_layer.", "lm_head.")  # layers that a critic lacks, in Megatron's names and in Hugging Face's


class ValueHead(MegatronModule):
    """Returns the hidden states as they are; `Values` makes values of those that are asked for."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        row = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=parallel.device())
        self.weight = torch.nn.Parameter(row)

    def forward(self, hidden: Tensor, weight: None = None, runtime_gather_output: None = None) -> tuple[Tensor, None]:
        return hidden, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        groups = {"tp_group": mpu.get_tensor_model_parallel_group(), "dp_cp_group": (metadata or {})["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {}, sharded_offsets, **groups)


class Values:
    """The schedule's head of a critic."""

    def __init__(self, chunks: list[Any], sequence_parallel: bool) -> None:
        """`chunks` are bare."""
        self._sequence_parallel = sequence_parallel
        self._group = mpu.get_tensor_model_parallel_group()
        self._head: Any = chunks[-1].output_layer if chunks[-1].post_process else None

    def logprobs(
        self, hidden: Tensor, rows: LossRows, ids: Tensor, temperature: float | Tensor, entropy: bool = False
    ) -> tuple[Tensor, None]:
        """([n, 1] float32 values of the n rows, None). Collective over the tensor-parallel ranks.

        `hidden`: as in schedule.Head.logprobs. Neither `ids` nor `temperature` says anything about a value.
        """
        found = hidden.squeeze(0)
        if self._sequence_parallel:
            found = gather_from_sequence_parallel_region(found, tensor_parallel_output_grad=False, group=self._group)
        return rows.of_part(found).float() @ self._head.weight.float().t(), None


class Critic:
    """See learner.backend_protocol.ValueModel."""

    def __init__(
        self, model: ModelConfig, learner: RanksConfig, config: CriticConfig, total_steps: int, resumes: bool
    ) -> None:
        """Build it in the policy's world. Collective; the arguments are those of the policy.

        Raises UsageError for a folder that does not have the policy's shape.
        """
        self._source = Path(model.path)
        hf_config = hf_folder.read_config(self._source)
        dtype = DTYPES[model.dtype]
        layout = learner.parallel
        built = build_trained(self._source, hf_config, dtype, learner)
        start = Path(config.path or model.path)
        if config.path is not None:
            hf_folder.check_shape("learner.critic.path", start, hf_config)
        if not resumes:
            _load(start, built, learner.parallel)
        give_heads(built)
        last: Any = built.chunks[-1]
        if not resumes and last.post_process:
            _load_head(start, last.output_layer)
        self._model = built
        self.chunks = wrap_chunks(built, learner)
        own = msgspec.structs.replace(learner, optimizer=config.optimizer)
        self.optimizer = Optimizer(self.chunks, own, dtype, total_steps)
        experts = Experts(built.chunks, built.config, learner.moe)
        head = Values(built.chunks, built.config.sequence_parallel)
        self.schedule = Schedule(self.chunks, built.config, parallel.device(), experts, head)
        self.checkpoints = CheckpointWriter(self.chunks, self.optimizer, layout)
        self.offload = Offload(learner.memory, self.chunks, self.optimizer)

    def values(self, microbatches: list[Microbatch]) -> list[Tensor]:
        with self.offload.parameters():
            return self.schedule.logprobs(microbatches, 1.0)

    def train_step(
        self, microbatches: list[Microbatch], loss: LossFunction, accept: Callable[[StepResult], bool] | None = None
    ) -> StepResult:
        """Raises SlipstreamError when the gradient norm is not finite; the weights are unchanged."""
        with self.offload.parameters(), self.offload.gradients():
            self.optimizer.zero_grad()
            result = self.schedule.train(microbatches, loss, 1.0, entropy=False)
            if accept is not None and not accept(result):
                return result
            with self.offload.optimizer():
                norm, rate = self.optimizer.step()
        return replace(result, grad_norm=norm, lr=rate)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter, the head last. Collective; yields on every rank."""
        with self.offload.whole():
            yield from tensors_of(self._model)

    def save_hf(self, path: Path) -> None:
        with self.offload.whole():
            save(self._model, self._source, path)

    def start_checkpoint(self, path: Path) -> None:
        with self.offload.whole(), self.offload.optimizer():
            self.checkpoints.start(path / FOLDER)

    def load_checkpoint(self, path: Path) -> None:
        with self.offload.whole(), self.offload.optimizer():
            self.checkpoints.load(path / FOLDER)


def give_heads(model: Model) -> None:
    """Make a critic of a model, with a head of zeros, before its chunks are wrapped."""
    chunks: list[Any] = model.chunks
    for chunk in chunks:
        chunk.share_embeddings_and_output_weights = False
        if chunk.post_process:
            chunk.output_layer = ValueHead(model.config)


@torch.no_grad()
def tensors_of(model: Model) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of a critic's parameters, which must be gathered, the head last. Collective."""
    tasks: Any = [task for task in model.tasks if task is None or not task.global_param_name.startswith(_OUTPUT)]
    for name, tensor in model.bridge.export_hf_weights(model.chunks, conversion_tasks=tasks, **EXPORT_OPTIONS):
        if not name.startswith(_OUTPUT):
            yield name, tensor
    last: Any = model.chunks[-1]
    blank = torch.empty(1, model.config.hidden_size, dtype=model.config.params_dtype, device=parallel.device())
    here = last.output_layer.weight.detach().clone() if last.post_process else blank
    yield SCORE, parallel.broadcast_tensor_from_last_stage(here)


def save(model: Model, source: Path, path: Path) -> None:
    """A folder of transformers' model for sequence classification with one label, complete or absent. Collective.

    `source` is the policy's folder, whose tokenizer and configuration it gets.
    """
    named = model.hf_config.architectures[0].removesuffix("ForCausalLM") + CRITIC_SUFFIX
    changed = {"architectures": [named], "id2label": {"0": "value"}, "label2id": {"value": 0}}
    write_folder(source, path, tensors_of(model), changed)


def _load(path: Path, model: Model, layout: ParallelConfig) -> None:
    """Give the chunks the weights of a model, or those of a critic, which has no output layer. Collective.

    Raises UsageError on every rank if machines found different kinds: each kind has its own collectives.
    """
    critic = is_critic(path)
    start_weights.agree(path, critic, "of a critic", "of a model")
    if critic:
        model.bridge.load_hf_weights(model.chunks, hf_path=path)
    else:
        start_weights.load(path, model, layout)


@torch.no_grad()
def _load_head(path: Path, head: ValueHead) -> None:
    """Give the head the values that a critic's folder has; it stays zero with a folder of another model."""
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if SCORE in opened.keys():  # noqa: SIM118  (it is no mapping)
                head.weight.copy_(opened.get_tensor(SCORE))
