"""Which policy is proximal: the one that the trust region surrounds and that importance weights lead to.

A batch is exactly one optimizer step, so during step s there is one policy, version s. The forward pass that trains it
also evaluates it. A token of staleness d was sampled by version s - d.

- `recompute`: version s. r is 1 in value and w = pi_s / behavior carries the whole way.
- `behavior`: version s - d as the sampler computed it. w is 1 and r = pi_s / behavior carries the whole way.
- `loglinear`: version s - 1, estimated. r is the change of the last version, w the way up to it.
"""

from collections.abc import Callable

from torch import Tensor

# (current policy's logprobs [T] without gradient, behavior_logprobs [T], staleness [T] or None) -> [T]
Proximal = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def recompute(current: Tensor, behavior: Tensor, staleness: Tensor | None) -> Tensor:
    """Decoupled PPO (arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298, section 5.2), one update per batch."""
    return current


def behavior(current: Tensor, behavior: Tensor, staleness: Tensor | None) -> Tensor:
    """The policy that sampled the token: the plain objective, as PPO has it."""
    return behavior


def loglinear(current: Tensor, behavior: Tensor, staleness: Tensor | None) -> Tensor:
    """AReaL's interpolation: log p_prox = log p_behavior + a (log p - log p_behavior).

    a = (v_prox - v_behavior) / (v - v_behavior) with v = s and v_prox = s - 1, so a = (d - 1) / d, and a = 0
    for tokens of this very version. (AReaL, docs/algorithms/prox_approx.md and areal/trainer/ppo/actor.py.)
    It assumes that the policy moved evenly over the last d versions.
    """
    if staleness is None:
        raise ValueError("proximal: loglinear needs the staleness of every token")
    age = staleness.clamp(min=1).to(current.dtype)
    return behavior + (age - 1) / age * (current - behavior)


PROXIMALS: dict[str, Proximal] = {"recompute": recompute, "behavior": behavior, "loglinear": loglinear}
