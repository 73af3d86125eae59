"""Counts tokens and seconds that were spent and never trained on, by reason; docs/waste.md has the rules."""

from collections.abc import Iterable, Mapping

from broker.contract import Waste
from common.wire_types import SECONDS_MAX, TALLY_MAX


def add(counts: dict[str, Waste], reason: str, tokens: int = 0, seconds: float = 0.0) -> None:
    """Count `tokens` and `seconds` under `reason`.

    Nodes report the amounts. They are clipped to the limits of the wire, so that a status or a store always decodes.
    """
    before = counts.get(reason, Waste())
    counts[reason] = Waste(
        min(before.tokens + max(0, tokens), TALLY_MAX), min(before.seconds + max(0.0, seconds), SECONDS_MAX)
    )


def merged(parts: Iterable[Mapping[str, Waste]]) -> dict[str, Waste]:
    """Sum several counts, by reason."""
    total: dict[str, Waste] = {}
    for part in parts:
        for reason, waste in part.items():
            add(total, reason, waste.tokens, waste.seconds)
    return total


def tokens(counts: Mapping[str, Waste]) -> int:
    """Tokens over all reasons."""
    return sum(waste.tokens for waste in counts.values())
