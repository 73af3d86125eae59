"""Spans: what a process did from when to when. RUN/trace has one SpanBatch per JSON line; docs/trace.md."""

from typing import Annotated

import msgspec
from msgspec import Meta

from common.wire_types import Finite, Name, Seconds, Tally, Text

Value = Text | int | Finite
MOST_BYTES = 256 << 10  # a batch of another process as JSON; honest ones are shorter
FAR_S = 1e9  # Clocks may be wrong, but not by more.


class Span(msgspec.Struct, frozen=True, gc=False):
    """Something that lasted. Times are Unix seconds of the process's own clock."""

    name: Text
    kind: Text  # state | step | phase | microbatch | publish | stage | flip | lease | episode | environment | engine
    start_s: Finite
    duration_s: Seconds
    track: Text = ""  # ROW, or ROW/WHICH where several things happen at once in a row; spans of one track nest
    args: Annotated[dict[Name, Value], Meta(max_length=32)] = {}  # for example serial, step, version


class SpanBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of one process. Its clock plus `offset_s` is the broker's clock, within `error_s`."""

    who: Name  # learner, learner-RANK, broker, or a node id
    host: Text
    offset_s: Finite = 0.0
    error_s: Seconds = 0.0
    dropped: Tally = 0  # spans of this process lost so far, because nothing may wait for them
    spans: Annotated[list[Span], Meta(max_length=1 << 13)] = []


def credible(batch: SpanBatch, now_s: float) -> bool:
    """Whether a batch that another process sent has a bounded size, and is of about `now_s`, Unix seconds.

    Large ones would fill the memory of a writer that is behind, and one odd time makes a whole timeline unreadable.
    """
    near = (abs(s.start_s + batch.offset_s - now_s) < FAR_S > s.duration_s for s in batch.spans)
    return batch.error_s < FAR_S and all(near) and len(msgspec.json.encode(batch)) <= MOST_BYTES
