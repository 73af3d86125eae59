"""The engine as a WeightClient uses it, and the state of its weights as the node sees it. Needs no torch."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from common.weights.receive.receiver import StagingStatus

Watch = Callable[["StagingStatus"], Awaitable[None]]


class Flip(msgspec.Struct, frozen=True):
    """A flip that was proven."""

    stall_s: float  # that generation stood still
    checksum: str  # the engine's weights have it


class CanaryRead(msgspec.Struct, frozen=True):
    """Log-probabilities of the canary's tokens by prefill, and decoding minus prefill of tokens that it decoded.

    `rounded`: the engine's weights have 8 bits, so that some tokens differ by much without a fault.
    """

    logprobs: list[float]
    decoding_differs: list[float]
    rounded: bool = False


class WeightTarget(Protocol):
    """An engine whose weights a WeightClient replaces."""

    async def tell(self, message: bytes, node_id: str) -> bytes:
        """Hand an encoded message to the engine's receiver; returns its encoded answer, b'' if it has none.

        Raises SlipstreamError when the engine does not run, ProofFailed when it hangs.
        """
        ...

    async def stage(self, publish: bytes, watch: Watch) -> float:
        """Receive an encoded Publish while generation continues; returns its seconds.

        Raises StagingFailed, and ProofFailed when the engine hangs. `watch` gets every status that is seen meanwhile.
        """
        ...

    async def flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        """Use the staged version from the next token on, then prove it. Raises ProofFailed."""
        ...

    async def canary(self, tokens: list[int]) -> CanaryRead:
        """Read the canary `tokens` at temperature 1. Raises ProofFailed when the engine hangs."""
        ...

    async def exclude(self, reason: str) -> None:
        """Generate nothing any more."""


@dataclass(frozen=True)
class WeightsState:
    version: int = -1  # the engine's, -1 before the first; so is `incarnation`
    incarnation: int = -1
    flipping: bool = False
    refused: str = ""  # why the learner does not let the node join
    excluded: str | None = None  # why this node must not generate any more (a proof failed)
    flips: int = 0
    stall_s: float = 0.0  # that generation stood still for all flips
    canary_max_difference: float = 0.0  # largest |log-probability difference| of the last canary
