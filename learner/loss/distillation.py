"""On-policy distillation: the divergence of the policy from a teacher, on what the policy sampled.

    gap = stop_gradient(logprobs - teacher_logprobs), of sampled tokens: its mean estimates KL(policy || teacher)

The policy's side is the learner's own log-probability and not the sampler's. The importance weight leads every token
to the policy in training. So the gradient is that of this policy's divergence, also for stale samples.
docs/distillation.md compares the objectives.
"""

import torch
from torch import Tensor

from common.config.loss_keys import DistillationConfig
from learner.backend_protocol import Microbatch
from learner.loss.ratios import bounded_exp, within

LEAST_TAIL = 1e-6  # float32 cannot tell smaller probabilities from 1 - sum


def reverse_kl(log_ratio: Tensor, gap: Tensor) -> Tensor:
    """[T] r * gap with r = exp(log_ratio): under the importance weight its gradient is that of KL(policy || teacher).

    The divergence of one token: d/dx E[log p - log q] = E[(log p - log q) d/dx log p]. Gu et al., MiniLLM (arXiv
    2306.08543), equation 2; Agarwal et al., On-Policy Distillation (arXiv 2306.13649), section 3.1.
    """
    return bounded_exp(log_ratio) * gap


def forward_kl(batch: Microbatch) -> tuple[Tensor, Tensor]:
    """([T] KL(teacher || policy) over the top k tokens and one class of all others, [T] the probability of that class).

    sum over the top k of q (log q - log p) + tail_q (log tail_q - log tail_p), where tail = 1 - sum over the top k.
    Classes are merged, so it is at most the divergence of the whole distributions, and 0 only where they agree on all
    classes. A tail below LEAST_TAIL is taken for rounding.
    """
    policy = batch.top_logprobs
    if policy is None or batch.teacher_top_logprobs is None:
        raise ValueError("objective: forward_kl, but the microbatch has no log-probabilities of the teacher's tokens")
    teacher = batch.teacher_top_logprobs.to(policy.dtype)
    tail = (1 - teacher.exp().sum(1)).clamp(min=0)
    tail = torch.where(tail < LEAST_TAIL, 0, tail)
    policy_tail = (1 - policy.exp().sum(1)).clamp(min=LEAST_TAIL)
    top = (teacher.exp() * (teacher - policy)).sum(1)
    return top + torch.xlogy(tail, tail) - tail * policy_tail.log(), tail


class Teaching:
    """A microbatch's teacher in the loss. A filler has no teacher, and no loss either."""

    def __init__(self, config: DistillationConfig, batch: Microbatch, current: Tensor, mask: Tensor) -> None:
        """`current`: [T] log-probabilities of the policy without gradient; `mask`: [T] bool, the loss tokens."""
        teacher = current if batch.teacher_logprobs is None else batch.teacher_logprobs.to(current.dtype)
        self._config = config
        self._batch = batch
        self._mask = mask
        self._gap = within(mask, current - teacher)
        total = self._gap.sum()
        self.sums = {"teacher_kl": total, "teacher_tail": torch.zeros_like(total)}

    def advantages(self, advantages: Tensor) -> Tensor:
        """[T] A - coefficient * gap under `objective: advantage`, else A."""
        return (
            advantages - self._config.coefficient * self._gap if self._config.objective == "advantage" else advantages
        )

    def cost(self, log_ratio: Tensor, *, weights: Tensor, worth: Tensor) -> Tensor:
        """[T] the term to be minimised; adds the teacher's tail to `sums`.

        `weights` correct sampled tokens. A forward divergence is one of distributions, so it counts by `worth`.
        """
        if self._config.objective == "reverse_kl":
            return self._config.coefficient * weights * reverse_kl(log_ratio, self._gap)
        if self._config.objective == "forward_kl" and self._batch.teacher_top_ids is not None:
            found, tail = forward_kl(self._batch)
            self.sums["teacher_tail"] = within(self._mask, tail).sum()
            return self._config.coefficient * worth * found
        return torch.zeros_like(weights)
