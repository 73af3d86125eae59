"""The optimizer of the policy, and of a critic beside it."""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from common.config.types import Fraction, Natural, NonNegative, PositiveFloat, Strict
from common.errors import Problem

Decay = Annotated[float, Meta(ge=0, lt=1)]


class OptimizerConfig(Strict, frozen=True, kw_only=True):
    lr: PositiveFloat = 1e-6  # Highest learning rate of Adam.
    beta1: Decay = 0.9  # Adam's decay of the mean gradient.
    beta2: Decay = 0.95  # Adam's decay of the mean squared gradient.
    eps: PositiveFloat = 1e-8  # Adam adds it to the root of the mean squared gradient.
    weight_decay: NonNegative = 0.0  # Decoupled weight decay. Norms and biases have none.
    grad_clip: NonNegative = 1.0  # Largest norm of all gradients together; 0 turns clipping off.
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # Shape of the learning rate after the warm-up.
    warmup_steps: Natural = 0  # Updates over which the learning rate rises linearly from 0.
    # Update at which the schedule ends; 0 means run.steps, times the updates of each.
    decay_steps: Natural = 0
    min_lr_fraction: Fraction = 0.0  # Fraction of lr that is left where the schedule ends.


def schedule_problems(at: str, optimizer: OptimizerConfig, updates: int) -> Iterator[Problem]:
    """A schedule at the path `at` that ends in the warm-up, or has a rate of 0 before the run's last update."""
    if optimizer.schedule == "constant":
        return
    if 0 < optimizer.decay_steps <= optimizer.warmup_steps:
        hint = "the schedule begins after the warm-up"
        yield Problem(f"{at}.decay_steps", f"0, or more than {at}.warmup_steps ({optimizer.warmup_steps})", hint=hint)
    elif 0 < optimizer.decay_steps < updates and not optimizer.min_lr_fraction:
        hint = "later ones would have a learning rate of 0, unless min_lr_fraction is more"
        yield Problem(f"{at}.decay_steps", f"0, or at least {updates}, the updates of the run", hint=hint)
