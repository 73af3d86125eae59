"""Waste: tokens and time that were spent and never trained on, by the reasons of docs/waste.md."""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from common.wire_types import SECONDS_MAX, TALLY_MAX, Name, Seconds, Tally

WASTE_REASONS = ("lost", "failed", "filtered", "regenerated", "masked", "cancelled", "stalled", "waiting")


class Waste(msgspec.Struct, frozen=True):
    tokens: Tally = 0  # sampled
    seconds: Seconds = 0.0


WasteByReason = Annotated[dict[Name, Waste], Meta(max_length=64)]


def learner_waste(wasted: int, masked: int) -> dict[str, Waste]:
    """The learner's own tokens since step 0: `masked` in training, and the others of `wasted` in failed samples."""
    return {"failed": Waste(wasted - masked), "masked": Waste(masked)}


def add_waste(counts: dict[str, Waste], reason: str, tokens: int = 0, seconds: float = 0.0) -> None:
    """Count what nodes report under `reason`, clipped to the limits of the wire, so that a status always decodes."""
    before = counts.get(reason, Waste())
    counts[reason] = Waste(
        tokens=min(before.tokens + max(0, tokens), TALLY_MAX),
        seconds=min(before.seconds + max(0.0, seconds), SECONDS_MAX),
    )


def merged_waste(parts: Iterable[Mapping[str, Waste]]) -> dict[str, Waste]:
    total: dict[str, Waste] = {}
    for part in parts:
        for reason, waste in part.items():
            add_waste(total, reason, waste.tokens, waste.seconds)
    return total


def wasted_tokens(counts: Mapping[str, Waste]) -> int:
    return sum(waste.tokens for waste in counts.values())
