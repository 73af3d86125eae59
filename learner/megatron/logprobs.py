"""Vocabulary-parallel log-probabilities and entropy from hidden states; no [tokens, vocabulary] tensor ever exists.

For hidden states h [T, H], output weights W [V, H] split over the ranks of a group along V, a temperature t and
z = h W^T / t:

    log Z = log sum_v exp(z_v)      logprob = z_target - log Z      entropy = log Z - sum_v p_v z_v
    d logprob / d z_v = 1[v = target] - p_v
    d entropy / d z_v = -p_v (log p_v + entropy)
    dh = dz W / t (this rank's part)      dW = dz^T h / t

Rows are taken in chunks: forward and backward each compute a chunk's logits, use them and drop them, so the working
set is a few times [chunk, V / ranks] whatever T and V are. When everything fits into one chunk it is kept for the
backward pass instead.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # float32 elements per chunk (64 MB); larger ones are no faster on a CPU
CUDA_CHUNK_ELEMENTS = 1 << 26  # matrix products of few rows would leave a GPU idle


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies of the distributions. Collective over `group`.

    An entropy that the loss does not use costs nothing in the backward pass.

    Args:
        hidden: [T, H], the same on every rank of the group; any floating dtype.
        weight: [V / ranks, H] this rank's slice of the output layer, in rank order; the dtype of `hidden`.
        targets: [T] int64, over the whole vocabulary.
        temperature: logits are divided by it.
        group: the ranks that share the vocabulary; None for one.
        chunk_elements: elements of a chunk of logits; None: as suits the device.

    Returns:
        ([T], [T]) float32, or float64 for float64 inputs; the same on every rank of the group. The gradient of
        `hidden` is this rank's part of the sum over the group.
    """
    return _apply(hidden, weight, targets, temperature, group, chunk_elements, True)


def logprobs_of(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int | None = None,
) -> Tensor:
    """As `logprobs_and_entropy`, without the entropy and its cost: [T]."""
    return _apply(hidden, weight, targets, temperature, group, chunk_elements, False)[0]


def _apply(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    chunk_elements: int | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    chunks = _chunks(hidden, weight, chunk_elements)
    training = torch.is_grad_enabled()  # always off inside a function of autograd
    return _LogProbs.apply(hidden, weight, targets, float(temperature), group, chunks, with_entropy, training)


def _chunks(hidden: Tensor, weight: Tensor, chunk_elements: int | None) -> list[slice]:
    elements = chunk_elements or (CUDA_CHUNK_ELEMENTS if hidden.is_cuda else CHUNK_ELEMENTS)
    rows = max(1, elements // max(1, weight.size(0)))
    return [slice(a, a + rows) for a in range(0, hidden.size(0), rows)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    z = torch.mm(hidden, weight.t()).to(dtype)
    return z.div_(temperature) if temperature != 1.0 else z


def _local(targets: Tensor, width: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """(index of each target in this rank's slice, whether it is there)."""
    index = targets - (group.rank() if group is not None else 0) * width
    return index.clamp(0, width - 1), (index >= 0) & (index < width)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunks: list[slice],
        with_entropy: bool,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        index, mine = _local(targets, weight.size(0), group)
        highest = torch.empty(hidden.size(0), dtype=dtype, device=hidden.device)
        # rows: sum of exp(z - highest), z of the target, sum of exp(z - highest) * (z - highest)
        sums = torch.zeros(3, hidden.size(0), dtype=dtype, device=hidden.device)
        keep = training and len(chunks) == 1
        shifted = None
        for rows in chunks:
            z = _logits(hidden[rows], weight, temperature, dtype)
            sums[1, rows] = z.gather(1, index[rows, None]).squeeze(1)
            highest[rows] = top = z.amax(1)
            z.sub_(top[:, None])
            shifted = z if keep else None
            p = z.exp() if with_entropy or keep else z.exp_()
            sums[0, rows] = p.sum(1)
            if with_entropy:
                sums[2, rows] = p.mul_(z).sum(1)
            del z, p
        local = highest
        if group is not None and group.size() > 1:
            highest = _share(sums, local, mine, group)
        # log Z = highest + log_sum; kept apart, since large logits would swallow the small part
        log_sum = sums[0].log()
        entropy = log_sum - sums[2] / sums[0] if with_entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(hidden, weight, index, mine, highest, log_sum, entropy, shifted, local)
        ctx.temperature, ctx.chunks = temperature, chunks
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return (sums[1] - highest) - log_sum, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, index, mine, highest, log_sum, entropy, shifted, local = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sum)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=log_sum.dtype) if ctx.needs_input_grad[1] else None
        for rows in ctx.chunks:
            if shifted is None:
                log_p = _logits(hidden[rows], weight, ctx.temperature, log_sum.dtype)
                log_p.sub_(highest[rows, None]).sub_(log_sum[rows, None])
            else:
                log_p = shifted.sub((highest - local + log_sum)[:, None])
            p = log_p.exp()
            scale = (-grad_logprobs[rows] / ctx.temperature)[:, None]
            if grad_entropy is None:
                p.mul_(scale)
            else:
                inner = log_p.add_(entropy[rows, None]).mul_((-grad_entropy[rows] / ctx.temperature)[:, None])
                p.mul_(inner.add_(scale))
                del inner
            del log_p
            p.scatter_add_(1, index[rows, None], torch.where(mine[rows, None], -scale, 0))
            dz = p.to(hidden.dtype)
            del p
            if grad_hidden is not None:
                torch.mm(dz, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, dz, hidden[rows])
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
    sums[2] = scale * (sums[2] + shift * sums[0])
    sums[0] *= scale
    sums[1] *= mine
    dist.all_reduce(sums, group=group)
    return highest


def _add_product(total: Tensor, dz: Tensor, hidden: Tensor) -> None:
    """total [V, H] += dz^T hidden, accumulated in the dtype of `total`."""
    if total.dtype == dz.dtype:
        total.addmm_(dz.t(), hidden)
    else:
        total.add_(torch.mm(dz.t(), hidden))
