"""Vocabulary-parallel log-probabilities and entropy from hidden states; no [tokens, vocabulary] tensor ever exists.

With hidden states h [T, H], a temperature t, and output weights W [V, H] split along V over a group's ranks:

    z = h W^T / t

    log Z = log sum_v exp(z_v)      logprob = z_target - log Z      entropy = log Z - sum_v p_v z_v
    d logprob / d z_v = 1[v = target] - p_v             the same for any other token of a row
    d entropy / d z_v = -p_v (log p_v + entropy)
    dh = dz W / t (this rank's part)      dW = dz^T h / t

Every row may have a temperature of its own.

Logits exist for a chunk of rows at a time. The exponentials of the first chunks, up to a fixed budget, are kept for the
backward pass. So the working set is bounded, and a batch that fits the budget costs no second matrix product.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # float32 elements per chunk (64 MB); larger ones are no faster on a CPU
CUDA_CHUNK_ELEMENTS = 1 << 28  # on an H100 products of four times fewer rows take a quarter longer
KEPT_ELEMENTS = 1 << 26  # float32 elements kept from forward to backward (256 MB); a GPU computes them again as fast


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int | None = None,
    kept_elements: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies of the distributions. Collective over `group`.

    An entropy that the loss does not use costs nothing in the backward pass.

    Args:
        hidden: [T, H], the same on every rank of the group; any floating dtype.
        weight: [V / ranks, H] this rank's slice of the output layer, in rank order; the dtype of `hidden`.
        targets: [T] int64, over the whole vocabulary, or [T, n] for several tokens in each place.
        temperature: logits are divided by it; one for all, or [T] float of each token's own.
        group: the ranks that share the vocabulary; None for one.
        chunk_elements, kept_elements: sizes of a chunk of logits and of what is kept; None: as suits the device.
        with_entropy: False saves the cost of the entropies, and returns zeros for them.

    Returns:
        (as `targets`, [T]) float32, or float64 for float64 inputs; the same on every rank of the group. The gradient of
        `hidden` is this rank's part of the sum over the group.
    """
    elements = chunk_elements or (CUDA_CHUNK_ELEMENTS if hidden.is_cuda else CHUNK_ELEMENTS)
    rows = max(1, elements // weight.size(0))
    chunks = [slice(a, a + rows) for a in range(0, hidden.size(0), rows)]
    if kept_elements is None:
        kept_elements = 0 if hidden.is_cuda else KEPT_ELEMENTS
    budget = kept_elements if torch.is_grad_enabled() else 0  # inside a function of autograd it is always off
    ids = targets if targets.dim() == 2 else targets[:, None]
    logprobs, entropy = _LogProbs.apply(hidden, weight, ids, temperature, group, chunks, with_entropy, budget)
    return logprobs.view(targets.shape), entropy


def _logits(hidden: Tensor, weight: Tensor, temperature: float | Tensor, dtype: torch.dtype) -> Tensor:
    z = torch.mm(hidden, weight.t()).to(dtype)
    if isinstance(temperature, Tensor):
        return z.div_(temperature[:, None])
    return z.div_(temperature) if temperature != 1.0 else z


def _of(rows: slice, temperature: float | Tensor) -> float | Tensor:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float | Tensor,
        group: dist.ProcessGroup | None,
        chunks: list[slice],
        with_entropy: bool,
        budget: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        width = weight.size(0)
        index = ids - (group.rank() if group is not None else 0) * width
        index, mine = index.clamp(0, width - 1), (index >= 0) & (index < width)
        highest = torch.empty(hidden.size(0), dtype=dtype, device=hidden.device)
        # rows: sum of exp(z - highest), sum of exp(z - highest) * (z - highest), z of each token asked for
        sums = torch.zeros(2 + ids.size(1), hidden.size(0), dtype=dtype, device=hidden.device)
        kept: list[Tensor | None] = []  # exp(z - highest of this slice), by chunk
        for rows in chunks:
            z = _logits(hidden[rows], weight, _of(rows, temperature), dtype)
            sums[2:, rows] = z.gather(1, index[rows]).t()
            highest[rows] = top = z.amax(1)
            z.sub_(top[:, None])
            p = z.exp() if with_entropy else z.exp_()
            sums[0, rows] = p.sum(1)
            if with_entropy:
                sums[1, rows] = z.mul_(p).sum(1)
            budget -= p.numel()
            kept.append(p if budget >= 0 else None)
            del z, p
        local = highest
        if group is not None and group.size() > 1:
            highest = _share(sums, local, mine, group)
        # log Z = highest + log_sum; kept apart, since large logits would swallow the small part
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0] if with_entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(hidden, weight, index, mine, highest, log_sum, entropy, local)
        ctx.temperature = temperature
        ctx.chunks = chunks
        ctx.kept = kept
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return ((sums[2:] - highest) - log_sum).t(), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (torch types it for one tensor)
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, index, mine, highest, log_sum, entropy, local = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(index, dtype=log_sum.dtype)
        total = grad_logprobs.sum(1)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=log_sum.dtype) if ctx.needs_input_grad[1] else None
        for i, rows in enumerate(ctx.chunks):
            p = ctx.kept[i]  # used up: a second backward pass computes it again
            ctx.kept[i] = None
            temperature = _of(rows, ctx.temperature)
            scale = (-total[rows] / temperature)[:, None]
            if grad_entropy is not None:  # needs log p, which p that has underflowed cannot give
                p = _logits(hidden[rows], weight, temperature, log_sum.dtype)
                p.sub_(highest[rows, None]).sub_(log_sum[rows, None])
                inner = p.add(entropy[rows, None]).mul_((-grad_entropy[rows] / temperature)[:, None])
                p.exp_().mul_(inner.add_(scale))
                del inner
            elif p is not None:
                p.mul_(scale * (local - highest - log_sum)[rows].exp_()[:, None])
            else:
                p = _logits(hidden[rows], weight, temperature, log_sum.dtype)
                p.sub_(highest[rows, None]).sub_(log_sum[rows, None]).exp_().mul_(scale)
            p.scatter_add_(1, index[rows], torch.where(mine[rows], (grad_logprobs[rows].t() / temperature).t(), 0))
            dz = p.to(hidden.dtype)
            del p
            if grad_hidden is not None:
                torch.mm(dz, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                if grad_weight.dtype == dz.dtype:
                    grad_weight.addmm_(dz.t(), hidden[rows])
                else:
                    grad_weight.add_(torch.mm(dz.t(), hidden[rows]))
            del dz
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _share(sums: Tensor, local: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Make `sums`, which are relative to a slice's highest logits, those of the whole; returns its highest."""
    highest = local.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = local - highest
    scale = shift.exp()
    sums[1] = scale * (sums[1] + shift * sums[0])
    sums[0] *= scale
    sums[2:] *= mine.t()
    dist.all_reduce(sums, group=group)
    return highest
