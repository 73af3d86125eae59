"""The protocol between the training loop and a model-parallel backend; learner/megatron/ is the one that exists.

All methods marked collective must be called by every rank with the same arguments, in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """Documents packed end to end, without padding between them; documents never see each other.

    A document of L tokens x[0..L-1] takes L - 1 places: inputs x[:-1], targets x[1:]; every [T] array below
    belongs to the target. T = sum(document_lengths).
    """

    tokens: Tensor  # [T] int64, inputs
    targets: Tensor  # [T] int64
    positions: Tensor  # [T] int64, position within the document
    document_lengths: tuple[int, ...]
    loss_mask: Tensor  # [T] float32, 1 where the target trains
    advantages: Tensor  # [T] float32 (zeros in supervised tuning)
    behavior_logprobs: Tensor  # [T] float32 (zeros in supervised tuning)
    staleness: Tensor | None = None  # [T] int32, step - version that sampled the target
    reference_logprobs: Tensor | None = None  # [T] float32 of the frozen reference model
    # [T, MoE layers of the model or of this rank, experts per token] uint8 or int16, of the input token; see UNKNOWN
    routed_experts: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # [T] float32, of the targets by the teacher
    teacher_top_ids: Tensor | None = None  # [T, k] int64, the teacher's most probable tokens in the targets' places
    teacher_top_logprobs: Tensor | None = None  # [T, k] float32, their log-probabilities by the teacher
    # [T, k] of the same tokens by the policy in training, differentiable, 0 outside the loss; `train_step` adds it
    top_logprobs: Tensor | None = None
    temperatures: Tensor | None = None  # [T] float32 at which the targets were sampled, 0: the step's
    numbers: tuple[int, ...] = ()  # indices of the documents in the batch; () for a filler
    kl_coefficients: Tensor | None = None  # [T] float32 with tasks.sources, in the place of the loss's coefficient
    marked: Tensor | None = None  # [T] bool, tokens that an objective over the whole batch has chosen
    # [T] float32 of the policy that began the batch; None: the forward pass that trains is that policy's
    proximal_logprobs: Tensor | None = None
    rewards: Tensor | None = None  # [T] float32 with a critic, paid for the target
    # [T] float32 with a critic: the value of the state before the target, and the return that it should have been. Both
    # are by the version that begins the batch, and 0 outside the loss.
    values: Tensor | None = None
    returns: Tensor | None = None


UNKNOWN = {"uint8": 255, "int16": -1}  # the expert of a token whose routing is not known, by dtype


@dataclass(frozen=True)
class RoutingShape:
    """The shape of one token's routing: [layers, chosen] numbers below `experts`."""

    layers: int  # those with experts
    chosen: int
    experts: int

    @property
    def dtype(self) -> str:
        """The smallest one for the numbers and for UNKNOWN."""
        return "uint8" if self.experts <= UNKNOWN["uint8"] else "int16"


@dataclass(frozen=True)
class LossOutput:
    """One microbatch's loss, as a sum; the backend divides by the global denominator."""

    loss_sum: Tensor  # scalar, differentiable
    # Scalars and vectors, added over microbatches and data-parallel ranks; the same names and sizes everywhere.
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)  # scalars, maximum over them
    denominator: Tensor | None = None  # scalar, added like sums; None: loss tokens


# (logprobs [T] float32 of the targets, entropy [T] float32 or None, microbatch) -> LossOutput. Both are 0 outside the
# loss mask, where nothing is computed. Documents arrive whole and in the microbatch's order under every layout.
LossFunction = Callable[[Tensor, Tensor | None, Microbatch], LossOutput]


@dataclass(frozen=True)
class StepResult:
    """Same on every rank."""

    loss: float  # global sum / global denominator
    loss_tokens: int
    grad_norm: float  # before clipping
    lr: float
    sums: dict[str, Any]  # float, or a list of them for a vector
    maxima: dict[str, float]


NOTHING_TRAINED = StepResult(loss=0.0, loss_tokens=0, grad_norm=0.0, lr=0.0, sums={}, maxima={})


class ValueModel(Protocol):
    """A critic beside the policy, with the same layout and its own optimizer. Checkpoints of the backend have it too.

    All methods are collective.
    """

    def values(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """[T] float32 values of the states before the targets in the loss mask, 0 elsewhere; as Backend.logprobs."""
        ...

    def train_step(self, microbatches: list[Microbatch], loss: LossFunction) -> StepResult:
        """As Backend.train_step; `loss` gets values in the place of log-probabilities, and None for entropies."""
        ...

    def save_hf(self, path: Path) -> None:
        """Replace the folder `path` by a Hugging Face model with one label, the value."""
        ...


class Backend(Protocol):
    """A model with its optimizer, spread over the ranks of torch.distributed's world."""

    rank: int
    world_size: int
    data_parallel_rank: int  # which replica's share of the batch this rank computes
    data_parallel_size: int  # replicas
    vocab_size: int
    hidden_size: int  # packing weighs attention by it
    routing_shape: RoutingShape | None  # shape of Microbatch.routed_experts; None: nothing is replayed
    routing_layers: tuple[int, ...]  # those with experts on this rank, counted among them all; () without replay
    document_multiple: int  # document lengths are padded to a multiple of this; packing counts the padding

    @property
    def critic(self) -> ValueModel | None: ...  # with learner.critic

    def train_step(
        self,
        microbatches: list[Microbatch],
        loss: LossFunction,
        temperature: float = 1.0,
        entropy: bool = False,
        accept: Callable[[StepResult], bool] | None = None,
    ) -> StepResult:
        """Forward, backward, clip, optimizer step over this data-parallel rank's microbatches. Collective.

        Every data-parallel rank passes the same number of microbatches. Logits are divided by `temperature`, or by
        Microbatch.temperatures, before the log-softmax. Gradients are those of (sum of loss_sum over all microbatches
        of all ranks) / (sum of denominator over the same). `accept` is asked between the backward pass and the
        optimizer step, with a result without gradient norm and rate. Where it says no, which it must on every rank, the
        weights stay.
        """
        ...

    def on_device(self) -> AbstractContextManager[None]:
        """Within, the parameters stay on the device between the calls of these methods."""
        ...

    def logprobs(self, microbatches: list[Microbatch], temperature: float = 1.0) -> list[Tensor]:
        """[T] float32 log-probabilities of the targets in the loss mask, 0 elsewhere, on every rank of the replica.

        No gradient. Collective.
        """
        ...

    def reference_logprobs(self, microbatches: list[Microbatch], temperature: float = 1.0) -> list[Tensor]:
        """As `logprobs`, of the frozen reference model. Collective."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter, in a fixed order. Collective; yields on every rank."""
        ...

    def export_frozen(self) -> Iterator[tuple[str, Tensor]]:
        """As `export`, of the model as it was before adapters trained. Collective."""
        ...

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """(name in Hugging Face's peft, full tensor) of every A and B, in a fixed order. Collective, as `export`."""
        ...

    def export_part(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of the parameters that this rank sends, in the order of `part_layout`.

        Over all ranks these are the tensors of `export`, each of them once; a rank may have none. No rank gathers the
        whole model. Collective: every rank consumes it to its end.
        """
        ...

    def part_layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """(Hugging Face name, shape) of this rank's part, always the same; [] on a rank that sends nothing."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum of every rank's [n] float32 on the CPU, in place, on every rank. Collective."""
        ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Collective."""
        ...

    def save_hf(self, path: Path) -> None:
        """Replace the folder `path` by a complete Hugging Face model, with config and tokenizer. Collective."""

    def start_checkpoint(self, path: Path) -> None:
        """Begin to write model, optimizer, schedule and RNG, as they are now, into the new folder `path`. Collective.

        The next steps may follow at once; one checkpoint at a time. A killed process leaves an incomplete folder.
        """

    def checkpoint_done(self, wait: bool) -> bool:
        """Whether the started checkpoint is complete and durable; with `wait` it returns only then. Collective.

        Raises SlipstreamError when it could not be written; nothing of it is left.
        """
        ...

    def load_checkpoint(self, path: Path) -> None:
        """Load what `start_checkpoint` wrote, also under another parallel layout. Collective."""

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes to every rank. Collective."""
        ...

    def deliver(self, make: Callable[[int], np.ndarray] | None, groups: Sequence[Sequence[int]]) -> np.ndarray:
        """[n] uint8 `make(i)` of rank 0 to the ranks in `groups[i]`. Collective.

        Every rank is in one of the groups; the first one of each passes the bytes on to the others. Rank 0 makes none
        if it is alone in its group.
        """
        ...

    def close(self) -> None:
        """Leave torch.distributed; the backend is unusable afterwards. Collective."""
