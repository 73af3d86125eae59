"""Vocabulary-parallel log-probabilities and entropy, without a second [tokens, vocabulary] float32 tensor.

For logits x [T, V] split over the ranks of a group along V, a temperature t and z = x / t:

    log Z = log sum_v exp(z_v)      logprob = z_target - log Z      entropy = log Z - sum_v p_v z_v
    d logprob / d x_v = (1[v = target] - p_v) / t
    d entropy / d x_v = -p_v (log p_v + entropy) / t

Rows are taken in chunks, so the float32 working set is [chunk, V / ranks].
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22  # float32 elements of working memory per chunk (16 MB)


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies of the distributions. Collective over `group`.

    Args:
        logits: [T, V / ranks] this rank's slice of the vocabulary, in rank order; any floating dtype.
        targets: [T] int64, over the whole vocabulary.
        temperature: logits are divided by it.
        group: the ranks that share the vocabulary; None for one.
        chunk_elements: elements of the float32 working set.

    Returns:
        ([T], [T]) float32, or float64 for float64 logits; the same on every rank of the group.
    """
    return _LogProbs.apply(logits, targets, float(temperature), group, chunk_elements, True)


def logprobs_of(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """As `logprobs_and_entropy`, without the entropy and its cost: [T]."""
    return _LogProbs.apply(logits, targets, float(temperature), group, chunk_elements, False)[0]


def _chunks(logits: Tensor, chunk_elements: int) -> list[slice]:
    rows = max(1, chunk_elements // max(1, logits.size(1)))
    return [slice(a, a + rows) for a in range(0, logits.size(0), rows)]


def _local(targets: Tensor, width: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """(index of each target in this rank's slice, whether it is there)."""
    index = targets - (group.rank() if group is not None else 0) * width
    return index.clamp(0, width - 1), (index >= 0) & (index < width)


def _reduce(x: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op, group=group)
    return x


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk_elements: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens, width = logits.shape
        dtype = torch.promote_types(logits.dtype, torch.float32)
        index, mine = _local(targets, width, group)
        highest = torch.empty(tokens, dtype=dtype, device=logits.device)
        # rows: sum of exp(z - highest), z of the target, sum of exp(z - highest) * (z - highest)
        sums = torch.zeros(3, tokens, dtype=dtype, device=logits.device)
        for rows in _chunks(logits, chunk_elements):
            z = logits[rows].to(dtype, copy=True).div_(temperature)
            sums[1, rows] = z.gather(1, index[rows, None]).squeeze(1)
            highest[rows] = top = z.amax(1)
            z.sub_(top[:, None])
            if with_entropy:
                weight = z.exp()
                sums[0, rows] = weight.sum(1)
                sums[2, rows] = weight.mul_(z).sum(1)
            else:
                sums[0, rows] = z.exp_().sum(1)
        if group is not None and group.size() > 1:
            local = highest.clone()
            _reduce(highest, dist.ReduceOp.MAX, group)
            shift = local - highest
            scale = shift.exp()
            sums[2] = scale * (sums[2] + shift * sums[0])
            sums[0] *= scale
            sums[1] *= mine
            _reduce(sums, dist.ReduceOp.SUM, group)
        # log Z = highest + log_sum; kept apart, since large logits would swallow the small part
        log_sum = sums[0].log()
        entropy = log_sum - sums[2] / sums[0] if with_entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(logits, index, mine, highest, log_sum, entropy)
        ctx.options = temperature, chunk_elements
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # an entropy that the loss does not use costs nothing here
        return (sums[1] - highest) - log_sum, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, index, mine, highest, log_sum, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sum)
        temperature, chunk_elements = ctx.options
        grad = torch.empty_like(logits)
        for rows in _chunks(logits, chunk_elements):
            log_p = logits[rows].to(highest.dtype, copy=True).div_(temperature)
            log_p.sub_(highest[rows, None]).sub_(log_sum[rows, None])
            p = log_p.exp()
            scale = (-grad_logprobs[rows] / temperature)[:, None]
            if grad_entropy is not None:
                inner = log_p.add_(entropy[rows, None]).mul_((-grad_entropy[rows] / temperature)[:, None])
                p.mul_(inner.add_(scale))
            else:
                p.mul_(scale)
            p.scatter_add_(1, index[rows, None], torch.where(mine[rows, None], -scale, 0))
            grad[rows] = p
        return grad, None, None, None, None, None
