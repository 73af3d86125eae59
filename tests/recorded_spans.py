"""The spans that code under test records in this process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from common.span_buffer import BATCH_BYTES, SPANS
from common.spans import Span, SpanBatch


@contextmanager
def recorded() -> Iterator[Callable[[], list[Span]]]:
    """Record while the context is active; yields a function that returns the spans so far.

    They include what the code under test has taken meanwhile, for instance a heartbeat.
    """
    spans: list[Span] = []
    lock = threading.Lock()
    take = SPANS.batch

    def batch(who: str, limit_bytes: int | None = None) -> SpanBatch | None:
        with lock:
            found = take(who, limit_bytes)
            spans.extend(found.spans if found is not None else ())
            return found

    def so_far() -> list[Span]:
        while batch("test", BATCH_BYTES) is not None:
            pass
        return spans

    SPANS.open(reference=True)
    so_far()
    spans.clear()
    try:
        with patch.object(SPANS, "batch", batch):
            yield so_far
    finally:
        SPANS.close()
        so_far()
