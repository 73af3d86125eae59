"""The critic's loss: half the squared distance of values from returns, whose change within a batch may be bounded.

    loss = mean over loss tokens of 1/2 max((V - R)^2, (V_clipped - R)^2)
    V_clipped = clamp(V, V_frozen - clip, V_frozen + clip)

With turns as steps, every place of a turn learns the turn's return. The loss of a place is least at the mean of that
return given the tokens before it, whatever other places learn. Advantages and figures read the first one alone. A turn
counts once for each of its tokens, as it does in the policy's loss.

V_frozen is the value before the batch's first update. The bound is that of OpenAI's Baselines, ppo2. Engstrom et al.,
Implementation Matters in Deep Policy Gradients (arXiv 2005.12729), section 3, describe it. A value that has moved by
more than `clip` towards its return has no gradient until the next batch.
"""

from functools import partial

import torch
from torch import Tensor

from learner.backend_protocol import LossFunction, LossOutput, Microbatch
from learner.loss.ratios import within


def clipped_squares(values: Tensor, frozen: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """([T] the term of each token, differentiable in `values`; [T] bool, where the bounded value decides).

    All [T]. Without `clip` nothing is bounded.
    """
    squares = (values - returns).square() / 2
    if clip is None:
        return squares, torch.zeros_like(squares, dtype=torch.bool)
    bounded = (values.clamp(frozen - clip, frozen + clip) - returns).square() / 2
    return torch.maximum(squares, bounded), (bounded > squares).detach()


def value_loss(clip: float | None, level: str = "token") -> LossFunction:
    """The loss of values [T] in the place of log-probabilities; the microbatch has `values`, V_frozen, and `returns`.

    A filler has neither, and no loss. `value_clipped` is a sum over loss tokens. The others are over steps, which are
    loss tokens or turns (CriticConfig's `level`). They are the number `steps`, `returns`, `returns_squared`, and of
    errors = returns - V_frozen `errors` and `errors_squared`. With variances over the batch, 1 - Var(errors) /
    Var(returns) is the share of the returns' variance that the critic explained before it trained on them.
    """
    return partial(_value_loss, clip, level)


def _value_loss(
    clip: float | None, level: str, values: Tensor, entropy: Tensor | None, batch: Microbatch
) -> LossOutput:
    mask = batch.loss_mask > 0
    frozen, returns = (_column(column, mask, values) for column in (batch.values, batch.returns))
    squares, clipped = clipped_squares(within(mask, values), frozen, returns, clip)
    steps = mask if level == "token" else mask & ((batch.positions == 0) | ~mask.roll(1))
    read, errors = within(steps, returns), within(steps, returns - frozen)
    sums = {
        "value_clipped": (clipped & mask).to(values.dtype).sum(),
        "steps": steps.to(values.dtype).sum(),
        "returns": read.sum(),
        "returns_squared": read.square().sum(),
        "errors": errors.sum(),
        "errors_squared": errors.square().sum(),
    }
    return LossOutput(within(mask, squares).sum(), sums)


def _column(column: Tensor | None, mask: Tensor, like: Tensor) -> Tensor:
    """[T] the column in the dtype of `like`, 0 outside the loss."""
    return torch.zeros_like(like) if column is None else within(mask, column.to(like.dtype))
