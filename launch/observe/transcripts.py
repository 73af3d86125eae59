"""slipstream transcripts RUN [--step N] [--task S] [--worst] [--json]: episodes that the learner trained on, as text.

The text is a model's, so nothing in it reaches the terminal but printable characters and line breaks. RUN/transcripts
may be written and pruned meanwhile; lines that are torn, foreign or too long are passed over.
"""

import argparse
import heapq
import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from common.errors import UsageError
from common.process.logs import visible
from common.process.run_dir import RunDir
from common.segments import segments
from common.transcripts import Transcript, Turn
from launch.resolve_target import find_run

LONGEST_LINE = 4 << 20  # a writer's are shorter
NEWEST = 20  # are listed without --step and --task
BY_VERSION = ("on blue", "on dark_green", "on dark_magenta", "on dark_cyan", "on dark_goldenrod", "on dark_red")
BY_RATIO = ((0.5, "on blue"), (0.8, "on dark_blue"), (1.25, ""), (2.0, "on dark_orange3"), (float("inf"), "on red"))


def command(args: argparse.Namespace) -> int:
    """Print whole transcripts, or without --step and --task a line for each of the newest."""
    run = find_run(args.run)
    for option, number in (("step", args.step), ("task", args.task)):
        if number is not None and number < 0:
            raise UsageError(f"--{option}: expected a number of at least 0, found {number}")
    found = read(run, args.step, args.task)
    if args.worst:
        found = (transcript for transcript in found if {"worst", "failed"} & set(transcript.why))
    whole = args.step is not None or args.task is not None
    console = Console(highlight=False, soft_wrap=True)
    shown = args.json
    for transcript in found if whole else islice(found, NEWEST):
        shown = True
        if args.json:
            sys.stdout.write(msgspec.json.encode(transcript).decode() + "\n")
        else:
            console.print(page(transcript, args.color) if whole else Text(heading(transcript)))
    if not shown:
        print(f"no such transcript in {run.transcripts}; telemetry.transcripts says which are kept")
    return 0


def read(run: RunDir, step: int | None = None, task: int | None = None) -> Iterator[Transcript]:
    """The transcripts of a step, of a task (its serial), or all of them, the newest first.

    A step that was trained again after a crash shows once.
    """
    found = (_written(run.transcripts, writer, step, task) for writer in ("steps", "failed"))
    seen: set[tuple[int, int, int | None]] = set()
    for transcript in heapq.merge(*found, key=lambda transcript: transcript.time_s, reverse=True):
        key = transcript.serial, transcript.sample, transcript.step
        if transcript.step is None or key not in seen:
            seen.add(key)
            yield transcript


def _written(folder: Path, writer: str, step: int | None, task: int | None) -> Iterator[Transcript]:
    marks = [b'"%s":%d,' % pair for pair in ((b"step", step), (b"serial", task)) if pair[1] is not None]
    decoder = msgspec.json.Decoder(Transcript)
    for path in reversed(segments(folder, writer)):
        for line in _lines(path, marks):
            try:
                transcript = decoder.decode(line)
            except (ValueError, RecursionError):
                continue
            if step in (None, transcript.step) and task in (None, transcript.serial):
                yield transcript


def _lines(path: Path, marks: list[bytes]) -> Iterator[bytes]:
    """The newest first, one in memory at a time, and only those with all `marks`: decoding takes much longer."""
    places = list[int]()
    start = 0
    try:
        file = path.open("rb")
    except FileNotFoundError:  # pruned
        return
    with file:
        while line := file.readline(LONGEST_LINE):
            if all(mark in line for mark in marks):
                places.append(start)
            start += len(line)
        for place in reversed(places):
            file.seek(place)
            yield file.readline(LONGEST_LINE)


def heading(t: Transcript) -> str:
    step = "trained no step" if t.step is None else f"step {t.step}"
    facts = [f"task {t.serial} sample {t.sample}", step, f"reward {t.reward:g}", f"node {t.node_id}", t.stop_reason]
    facts[2:2] = [f"advantage {t.advantage:.4g}"] if t.advantage is not None else []
    facts += [f"{name} {value:g}" for name, value in t.metrics.items()] + [f"kept as {' '.join(t.why)}"]
    return visible(" · ".join(facts)).replace("\n", " ")


def page(transcript: Transcript, color: str) -> Text:
    """The whole transcript; the background of the policy's tokens says their version or their ratio."""
    out = Text().append(heading(transcript) + "\n", "bold")
    if transcript.error is not None:
        out.append(f"failed: {visible(transcript.error)}\n", "bold red")
    for name, text in transcript.notes.items():
        out.append(visible(f"{name}: {text}").replace("\n", " ") + "\n", "italic")
    for turn in transcript.turns:
        if turn.cut_before:
            out.append(f"[{turn.cut_before} tokens are left out]\n", "bold yellow")
        out.append(_turn_heading(turn) + "\n", "bold cyan")
        styles = _token_styles(turn, color)
        parts = zip(styles, turn.pieces, strict=True) if len(styles) == len(turn.pieces) else [("", turn.text)]
        for style, group in groupby(parts, key=lambda pair: pair[0]):  # neighbours of one style are one span
            out.append(visible("".join(piece for _, piece in group)), style or None)
        out.append("\n")
    return out


def _token_styles(turn: Turn, color: str) -> list[str]:
    """The style of each token: plain for prompt and environment, dim for tokens that were not in the loss."""
    count = len(turn.pieces)
    if turn.author != "policy":
        return [""] * count
    if color == "ratio":
        ratios = turn.ratios or [1.0] * count
        styles = [next(style for bound, style in BY_RATIO if ratio <= bound) for ratio in ratios]
    else:
        starts = [start for start, _ in turn.version_runs]
        of_run = ["", *(BY_VERSION[version % len(BY_VERSION)] for _, version in turn.version_runs)]
        styles = [of_run[bisect_right(starts, index)] for index in range(count)]
    trained = turn.trained or [1] * count
    return [style if loss else f"dim {style}".strip() for style, loss in zip(styles, trained, strict=False)]


def _turn_heading(turn: Turn) -> str:
    words = [f"branch {turn.path}"] * (turn.path > 0) + [visible(turn.name)] * bool(turn.name)
    words += [turn.author, f"{len(turn.tokens)} tokens"]
    if turn.version_runs:
        words.append("version " + ", ".join(dict.fromkeys(str(version) for _, version in turn.version_runs)))
    words += [f"reward {turn.reward:g}"] if turn.reward is not None else []
    words += ["not in the loss"] if turn.trained and not any(turn.trained) else []
    return "── " + " · ".join(words)
