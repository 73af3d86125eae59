"""The reductions of the loss: the divisor of a sum over tokens.

A reduction gives every token a share of the sum, and the microbatch's part of the denominator. The backend adds both
over all microbatches of all data-parallel ranks and then divides. So the result does not depend on packing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from learner.loss.ratios import Documents


@dataclass(frozen=True)
class Count:
    """The tokens as a reduction sees them."""

    documents: Documents
    counted: Tensor  # [T] float, 1 for tokens that means are taken over, else 0
    worth: Tensor  # [T] float, a token's part of the denominator: `counted`, or under `correction_normalize` its weight
    max_tokens: int  # rollout.max_tokens
    normalized: bool  # whether `worth` are weights


# -> ([T] factor of each token's term in the sum, None for 1; scalar denominator)
Reduction = Callable[[Count], tuple[Tensor | None, Tensor]]


def token_mean(count: Count) -> tuple[Tensor | None, Tensor]:
    """Every token of the global batch weighs the same: DAPO (arXiv 2503.14476), section 3.3."""
    return None, count.worth.sum()


def sequence_mean(count: Count) -> tuple[Tensor | None, Tensor]:
    """Every document with a counted token weighs the same: GRPO (arXiv 2402.03300), equation 3."""
    share = _share_of_document(count)
    return share, (share * count.worth).sum()


def fixed_length(count: Count) -> tuple[Tensor | None, Tensor]:
    """The sum over tokens, divided by documents x rollout.max_tokens: a token's weight depends on no length.

    Dr. GRPO (arXiv 2503.20783), section 3.2 and its listing. Documents without any loss token are left out. Under
    `correction_normalize` a document counts with the mean weight of its tokens.
    """
    if count.normalized:
        return None, count.max_tokens * (_share_of_document(count) * count.worth).sum()
    return None, count.max_tokens * (count.documents.counts > 0).sum().to(count.worth.dtype)


def _share_of_document(count: Count) -> Tensor:
    """[T] 1 / counted tokens of the token's document, 0 for tokens that do not count."""
    tokens = count.documents.sums(count.counted)
    return count.counted / count.documents.spread(tokens).clamp(min=1)


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "fixed_length": fixed_length,
}
