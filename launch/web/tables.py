"""The tables of the page, filtered and cut into pages by the server, and a transcript of bounded size."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from common.errors import SlipstreamError
from common.transcripts import Transcript
from launch.observe.transcripts import read
from launch.web.files import inside
from launch.web.run_view import RunView

ROWS = 200  # A page has at most so many.
TOKENS, CHARACTERS = 20_000, 400_000  # A transcript is cut to both.
PER_TOKEN = ("tokens", "pieces", "logprobs", "ratios", "trained")


def nodes(view: RunView, text: str, offset: int, limit: int) -> dict[str, Any]:
    """Nodes whose id, host, state or reason contains `text`."""
    keys = ("id", "host", "state", "waiting_on")
    found = [node for node in view.nodes if any(text in str(node[key]) for key in keys)]
    return {"total": len(found), "rows": found[offset : offset + limit]}


def tasks(view: RunView, text: str, state: str, offset: int, limit: int) -> dict[str, Any]:
    """Tasks of the ledger, the newest first: of this serial, or whose nodes or reason contain `text`; `step:N`."""
    entries = view.ledger()
    if state:
        entries = [e for e in entries if e.state == state or (state == "filtered" and e.filtered)]
    if text.startswith("step:"):
        entries = [e for e in entries if str(e.step) == text[5:]]
    elif text.isdecimal():
        entries = [e for e in entries if str(e.serial) == text]
    elif text:
        entries = [e for e in entries if text in e.reason or any(text in node for node in e.nodes)]
    newest: Sequence[Any] = entries[::-1][offset : offset + limit]
    return {"total": len(entries), "rows": msgspec.to_builtins(newest)}


def transcripts(view: RunView, step: int | None, task: int | None, limit: int) -> dict[str, Any]:
    """One line for each transcript, the newest first."""
    names = ("serial", "sample", "step", "node_id", "time_s", "why", "reward", "advantage", "stop_reason", "error")
    found = _transcripts(view, step, task, limit)
    rows = [{name: getattr(t, name) for name in names} | {"sampled_tokens": t.sampled_tokens} for t in found]
    return {"total": len(rows), "rows": rows}


def transcript(view: RunView, task: int, sample: int, step: int | None) -> dict[str, Any]:
    """The newest transcript of an episode, cut to a size that a browser shows; `cut` says how much is left out."""
    found = next((t for t in _transcripts(view, step, task, ROWS) if t.sample == sample), None)
    if found is None:
        raise SlipstreamError(f"no transcript of task {task}, sample {sample} is kept")
    return bounded(found)


def bounded(found: Transcript) -> dict[str, Any]:
    """A transcript with its first TOKENS tokens and CHARACTERS characters."""
    tokens, characters, cut, turns = TOKENS, CHARACTERS, 0, list[dict[str, Any]]()
    for turn in found.turns:
        kept, length = 0, 0
        for piece in islice(turn.pieces, tokens):
            if (length := length + len(piece)) > characters:
                break
            kept += 1
        shown = msgspec.to_builtins(turn) | {name: getattr(turn, name)[:kept] for name in PER_TOKEN}
        shown["text"] = turn.text[:characters] if not turn.pieces else ""
        cut += max(len(turn.tokens), len(turn.pieces)) - kept
        tokens, characters = tokens - kept, max(0, characters - max(length, len(shown["text"])))
        turns.append(shown)
    return msgspec.to_builtins(found) | {"turns": turns, "cut": cut + found.cut_tokens}


def _transcripts(view: RunView, step: int | None, task: int | None, limit: int) -> list[Transcript]:
    folder = view.run.transcripts
    if not all(inside(view.run, path) for path in (folder, *folder.glob("*.jsonl"))):
        raise SlipstreamError("transcripts lead out of the run's folder and are not read")
    return list(islice(read(view.run, step, task), limit))
