"""The tables of the page, filtered and cut into pages by the server, and a transcript of bounded size."""

from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.errors import SlipstreamError
from common.transcripts import Transcript
from launch.observe.transcripts import read
from launch.web.run_view import RunView

ROWS = 200  # A page has at most so many.
SEARCHED = 2000  # newest transcripts, when a word is to be found in them
TOKENS = 20_000  # A transcript is cut to so many.
PER_TOKEN = ("tokens", "pieces", "logprobs", "ratios", "trained")
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Query(msgspec.Struct, frozen=True):
    """The words after the question mark."""

    filter: str = ""
    state: str = ""
    offset: Number = 0
    limit: Number = 50
    seconds: Number = 600
    step: Number | None = None
    task: Number | None = None
    sample: Number = 0

    @property
    def page(self) -> slice:
        return slice(self.offset, self.offset + min(self.limit, ROWS))


def nodes(view: RunView, query: Query) -> dict[str, Any]:
    """Nodes whose id, host, state or reason contains the filter."""
    keys = ("id", "host", "state", "waiting_on")
    found = [node for node in view.nodes if any(query.filter in str(node[key]) for key in keys)]
    return {"total": len(found), "rows": found[query.page]}


def lanes(view: RunView, query: Query) -> dict[str, Any]:
    """The lanes of the processes whose names contain the filter."""
    return view.lanes.page(query.filter, query.page, query.seconds)


def tasks(view: RunView, query: Query) -> dict[str, Any]:
    """Tasks of the ledger, the newest first: of this serial, or whose nodes or reason contain the filter; `step:N`."""
    entries = view.ledger()
    text = query.filter
    state = query.state
    if state:
        entries = [e for e in entries if e.state == state or (state == "filtered" and e.filtered)]
    if text.startswith("step:"):
        entries = [e for e in entries if str(e.step) == text[5:]]
    elif text.isdecimal():
        entries = [e for e in entries if str(e.serial) == text]
    elif text:
        entries = [e for e in entries if text in e.reason or any(text in node for node in e.nodes)]
    return {"total": len(entries), "rows": entries[::-1][query.page]}


def transcripts(view: RunView, query: Query) -> dict[str, Any]:
    """One line for each transcript, the newest first, and whether there are `more`; `filter` is a reason to keep it."""
    found = read(view.run, query.step, query.task)
    if query.filter:
        found = (transcript for transcript in islice(found, SEARCHED) if query.filter in " ".join(transcript.why))
    shown = query.page
    lines = [msgspec.structs.replace(transcript, turns=[]) for transcript in islice(found, shown.start, shown.stop + 1)]
    rows = msgspec.to_builtins(lines[: shown.stop - shown.start])
    return {"total": shown.start + len(rows), "more": len(lines) > len(rows), "rows": rows}


def transcript(view: RunView, query: Query) -> dict[str, Any]:
    """The newest transcript of an episode, cut to a size that a browser shows; `cut` says how much is left out."""
    for found in islice(read(view.run, query.step, query.task), ROWS):
        if found.sample == query.sample:
            return bounded(found)
    raise SlipstreamError(f"no transcript of task {query.task}, sample {query.sample} is kept")


def bounded(found: Transcript) -> dict[str, Any]:
    """A transcript with its first TOKENS tokens."""
    room = TOKENS
    cut = found.cut_tokens
    turns = list[dict[str, Any]]()
    for turn in found.turns:
        kept = {name: getattr(turn, name)[:room] for name in PER_TOKEN}
        turns.append(msgspec.to_builtins(turn) | kept | {"text": "" if turn.pieces else turn.text})
        cut += max(0, len(turn.tokens) - room)
        room = max(0, room - len(turn.tokens))
    return msgspec.to_builtins(found) | {"turns": turns, "cut": cut}


TABLES = {table.__name__: table for table in (nodes, lanes, tasks, transcripts, transcript)}
