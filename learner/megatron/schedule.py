"""Microbatches of packed documents through Megatron's forward-backward schedule."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from common.config.schema import ParallelConfig
from common.span_buffer import SPANS
from learner.backend_protocol import NOTHING_TRAINED, LossFunction, LossOutput, Microbatch, StepResult
from learner.megatron import parallel
from learner.megatron.logprobs import logprobs_and_entropy
from learner.megatron.moe import Experts
from learner.megatron.pack_layout import LossRows, PackPart
from learner.megatron.parallel import mpu


@dataclass(frozen=True)
class _Packed:
    batch: Microbatch  # whole, on the device
    part: PackPart
    rows: LossRows
    tokens: Tensor  # [T padded / context] int64, this context rank's
    positions: Tensor
    params: PackedSeqParams

    def temperatures(self, step: float) -> float | Tensor:
        """[n] float32 of the targets of this rank's rows where they differ, else `step` for all."""
        if self.batch.temperatures is None:
            return step
        own = self.rows.of_pack(self.batch.temperatures)
        return torch.where(own > 0, own, step)


def _pack(batch: Microbatch, parallel: ParallelConfig, rank: int, device: torch.device) -> _Packed:
    """`batch`, which is on the CPU, and the part of it that context rank `rank` computes."""
    part = PackPart.of(batch.document_lengths, parallel, rank)
    rows = LossRows.of(part, batch.loss_mask).to(device)
    part = part.to(device)
    if device.type != "cpu":
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        moved = {n: x.to(device, non_blocking=True) for n, x in values.items() if isinstance(x, Tensor)}
        batch = replace(batch, **moved)
    lengths = torch.tensor(part.lengths)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)]).to(device)
    longest = max(part.lengths)
    # Pads count as tokens at the end of documents, where a causal mask hides them. Otherwise Transformer Engine would
    # leave the outputs between documents uninitialised. It asks for the padded bounds under context parallelism.
    padded: Any = bounds if parallel.context > 1 else None
    params = PackedSeqParams("thd", bounds, bounds, padded, padded, longest, longest)
    return _Packed(
        batch=batch,
        part=part,
        rows=rows,
        tokens=part.local(batch.tokens),
        positions=part.local(batch.positions),
        params=params,
    )


def filler(like: Microbatch) -> Microbatch:
    """A document of one token that trains nothing; it fills the rounds of ranks with fewer microbatches.

    The loss has the same sums of it as of `like`, so that both can be added. A reference makes one more, and so does a
    frozen policy.
    """
    one = torch.ones(1, dtype=torch.int64)
    zero = torch.zeros(1)
    reference = None if like.reference_logprobs is None else zero
    marked = None if like.marked is None else one < 0
    proximal = None if like.proximal_logprobs is None else zero
    given = (zero, zero, zero, zero.int(), reference)
    return Microbatch(one, one, one - 1, (1,), *given, marked=marked, proximal_logprobs=proximal)


class Head:
    """In the place of the output layer: the last stage returns hidden states, and all logits never exist at once."""

    def __init__(self, chunks: list[Any], sequence_parallel: bool) -> None:
        """`chunks` are GPTModels, in their data-parallel wrappers or bare."""
        self._sequence_parallel = sequence_parallel
        self._group: dist.ProcessGroup = mpu.get_tensor_model_parallel_group()
        last: Any = chunks[-1].module if isinstance(chunks[-1], DistributedDataParallel) else chunks[-1]
        self._model = last if last.post_process else None
        if self._model is not None:
            # (hidden states, no bias)
            self._model.output_layer.forward = lambda hidden, weight=None, runtime_gather_output=None: (hidden, None)

    def logprobs(
        self, hidden: Tensor, rows: LossRows, ids: Tensor, temperature: float | Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[n, k] log-probabilities of the tokens `ids` [n, k] in the places of the n rows, and [n] entropies or None.

        Collective over the tensor-parallel ranks, also where there are no rows.

        `hidden`: [1, T / (tensor ranks under sequence parallelism), H], as the last stage returns it.
        """
        assert self._model is not None  # only the last stage has hidden states to ask about
        found = hidden.squeeze(0)
        # The backward passes sum the ranks' parts of the gradient; that of the copy needs no other rows.
        if self._sequence_parallel:
            found = rows.of_part(gather_from_sequence_parallel_region(found, group=self._group))
        else:
            found = copy_to_tensor_model_parallel_region(rows.of_part(found), group=self._group)
        if self._model.share_embeddings_and_output_weights:
            weight = self._model.shared_embedding_or_output_weight()
        else:
            weight = self._model.output_layer.weight
        logprobs, entropies = logprobs_and_entropy(
            found, weight, ids, temperature=temperature, group=self._group, with_entropy=entropy
        )
        return logprobs, entropies if entropy else None


class AnyHead(Protocol):
    """Turns the last stage's hidden states into numbers of tokens."""

    def logprobs(
        self, hidden: Tensor, rows: LossRows, ids: Tensor, temperature: float | Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See Head.logprobs; a critic's head gives [n, 1] values of the n rows instead."""
        ...


class Schedule:
    """Runs a model's chunks over microbatches, forward and backward or forward only."""

    def __init__(
        self, chunks: list[Any], config: Any, device: torch.device, experts: Experts, head: AnyHead | None = None
    ) -> None:
        """`head`: None for the policy's."""
        self.chunks = chunks
        self.device = device
        self.experts = experts
        config.finalize_model_grads_func = finalize_model_grads
        self._run = get_forward_backward_func()
        self._head = head or Head(chunks, config.sequence_parallel)
        self._context_group = mpu.get_context_parallel_group()
        self._parallel = ParallelConfig(
            tensor=config.tensor_model_parallel_size,
            context=config.context_parallel_size,
            sequence=config.sequence_parallel,
        )

    def train(
        self, microbatches: list[Microbatch], loss: LossFunction, temperature: float, entropy: bool
    ) -> StepResult:
        """Forward and backward; leaves gradients of (sum of losses / sum of denominators) in the chunks. Collective.

        `microbatches` are this data-parallel rank's, equally many on every one. The result has neither gradient norm
        nor learning rate, which the optimizer knows.
        """

        def loss_of(hidden: Tensor, item: _Packed) -> tuple[Tensor, LossOutput]:
            asked = item.batch.teacher_top_ids
            top = [] if asked is None else [asked]
            ids = item.rows.of_pack(torch.cat([item.batch.targets[:, None], *top], 1))
            logprobs, entropies = self._head.logprobs(hidden, item.rows, ids, item.temperatures(temperature), entropy)
            # Gathered one by one, because one of them may have no gradient.
            whole = None if entropies is None else self._whole(entropies, item)
            found = self._whole(logprobs, item)
            batch = item.batch if asked is None else replace(item.batch, top_logprobs=found[:, 1:])
            output = loss(found[:, 0], whole, batch)
            # detached: a pipelined schedule takes the loss's own storage away after the forward pass
            return output.loss_sum, replace(output, loss_sum=output.loss_sum.detach())

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.experts.start(microbatches, loss)
        reports = self._forward_backward(microbatches, loss_of, forward_only=False)
        encoded: bytes | None = None
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            encoded = msgspec.msgpack.encode(self._reduce(reports))  # JSON has neither NaN nor inf
        told = parallel.broadcast_from_last_stage(encoded)
        result, denominator = msgspec.msgpack.decode(told, type=tuple[StepResult, float])
        if denominator != result.loss_tokens and denominator > 0:
            for chunk in self.chunks:  # Megatron has divided by the tokens
                chunk.scale_gradients(result.loss_tokens / denominator)
        return replace(result, sums=result.sums | self.experts.figures())

    @torch.no_grad()
    def logprobs(self, microbatches: list[Microbatch], temperature: float) -> list[Tensor]:
        """[T] float32 log-probabilities of each microbatch's targets, 0 outside the loss, on all stages. Collective."""

        def loss_of(hidden: Tensor, item: _Packed) -> tuple[Tensor, Tensor]:
            ids = item.rows.of_pack(item.batch.targets[:, None])
            logprobs, _ = self._head.logprobs(hidden, item.rows, ids, item.temperatures(temperature))
            return logprobs.new_zeros(()), self._whole(logprobs.squeeze(1), item)

        self.experts.start()
        outputs = self._forward_backward(microbatches, loss_of, forward_only=True)
        sizes = [len(batch.targets) for batch in microbatches]
        if outputs:  # only the last stage has them
            flat = torch.cat([logprobs[:n] for (logprobs, _), n in zip(outputs, sizes, strict=False)])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
        return list(parallel.broadcast_tensor_from_last_stage(flat).cpu().split(sizes))

    def _whole(self, values: Tensor, item: _Packed) -> Tensor:
        """[n, ...] of this context rank's rows to the pack's [T, ...], 0 outside the loss.

        Every context rank computes the same loss of whole documents, so each keeps its own gradient.
        """
        gathered = gather_from_sequence_parallel_region(
            item.rows.spread(values), tensor_parallel_output_grad=False, group=self._context_group
        )
        return item.part.whole(gathered)

    def _forward_backward(
        self,
        microbatches: list[Microbatch],
        loss_of: Callable[[Tensor, _Packed], tuple[Tensor, Any]],
        forward_only: bool,
    ) -> list[tuple[Any, Tensor]]:
        """(second result of `loss_of`, loss tokens) per microbatch on the last stage, [] elsewhere.

        Under a virtual pipeline empty microbatches may follow, to fill the last round.
        """
        stages = mpu.get_pipeline_model_parallel_world_size()
        # The interleaved schedule refuses a last round with fewer microbatches than stages.
        fill = -len(microbatches) % stages if len(self.chunks) > 1 else 0
        context_rank = self._context_group.rank()
        filled = [*microbatches, *(filler(microbatches[0]) for _ in range(fill))]
        packed = [_pack(batch, self._parallel, context_rank, self.device) for batch in filled]
        begins = list[float]()

        def forward_step(iterator: Iterator[_Packed], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            item = next(iterator)
            begins.append(time.monotonic())

            def loss_func(output: Tensor) -> tuple[Tensor, Tensor, tuple[Any, Tensor]]:
                loss_sum, result = loss_of(output, item)
                tokens = item.batch.loss_mask.sum()
                # Every context rank has the loss of whole documents, so only one lets Megatron count their tokens.
                counted = tokens.round().int() if context_rank == 0 else tokens.new_zeros((), dtype=torch.int32)
                return loss_sum, counted, (result, tokens)

            self.experts.enter(item.batch, item.part)
            output = model(item.tokens[None], item.positions[None], None, packed_seq_params=item.params)
            return output, loss_func

        iterators = [iter(packed) for _ in self.chunks]
        one = len(self.chunks) == 1
        results = self._run(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if one else iterators,
            model=self.chunks[0] if one else self.chunks,
            num_microbatches=len(packed),
            seq_length=max(sum(item.part.lengths) for item in packed),  # activations bring their own shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
        self._trace("logprobs" if forward_only else "microbatch", [*begins, time.monotonic()], packed)
        return results

    def _trace(self, name: str, times: list[float], packed: list[_Packed]) -> None:
        """A span per forward pass, until the next one begins; a device may still compute what the host has queued."""
        for number, (began, ended) in enumerate(itertools.pairwise(times)):
            tokens = sum(packed[number % len(packed)].part.lengths)
            SPANS.add(f"{name} {number}", "microbatch", began, ended, "loop", tokens=tokens)

    def _reduce(self, reports: list[tuple[LossOutput, Tensor]]) -> tuple[StepResult, float]:
        """(result, denominator) of all microbatches of all data-parallel ranks."""

        def joined(values: Iterable[Tensor]) -> Tensor:
            return torch.cat([x.detach().double().reshape(-1) for x in values])

        first = reports[0][0]
        maxima = None
        divisors = [tokens if output.denominator is None else output.denominator for output, tokens in reports]
        rows = [
            joined((output.loss_sum, tokens, divisor, *output.sums.values()))
            for (output, tokens), divisor in zip(reports, divisors, strict=True)
        ]
        sums = torch.stack(rows).sum(0)
        if first.maxima:
            maxima = torch.stack([joined(output.maxima.values()) for output, _ in reports]).amax(0)
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        if self._context_group.rank() > 0:
            sums.zero_()  # the same as context rank 0's
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
            if maxima is not None:
                dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        loss_sum, tokens, denominator = sums[:3].tolist()
        parts = sums[3:].split([value.numel() for value in first.sums.values()])
        named = zip(first.sums.items(), parts, strict=True)
        result = replace(
            NOTHING_TRAINED,
            loss=loss_sum / denominator if denominator > 0 else 0.0,
            loss_tokens=round(tokens),
            sums={name: part.tolist() if value.dim() else part.item() for (name, value), part in named},
            maxima=dict(zip(first.maxima, [] if maxima is None else maxima.tolist(), strict=True)),
        )
        return result, denominator
