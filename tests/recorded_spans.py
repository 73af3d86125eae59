"""The spans that code under test records in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.span_buffer import BATCH_BYTES, SPANS
from common.spans import Span


@contextmanager
def recorded() -> Iterator[Callable[[], list[Span]]]:
    """Record while the context is active; yields a function that returns the spans so far."""
    spans: list[Span] = []

    def so_far() -> list[Span]:
        while (batch := SPANS.batch("test", BATCH_BYTES)) is not None:
            spans.extend(batch.spans)
        return spans

    SPANS.open(reference=True)
    so_far()
    spans.clear()
    try:
        yield so_far
    finally:
        SPANS.close()
        so_far()
