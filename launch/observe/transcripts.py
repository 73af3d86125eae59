"""slipstream transcripts RUN [--step N] [--task S] [--worst] [--json]: episodes that the learner trained on, as text.

The text is a model's, so nothing in it reaches the terminal but printable characters and line breaks.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby, islice, pairwise

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import UsageError
from common.transcripts import Transcript, Turn
from launch.observe.transcript_files import read
from launch.resolve_target import find_run

NEWEST = 20  # in the table without --step and --task
BEGINNING = 60  # characters of an answer in that table
BY_VERSION = ("on blue", "on dark_green", "on dark_magenta", "on dark_cyan", "on dark_goldenrod", "on dark_red")
BY_RATIO = ((0.5, "on blue"), (0.8, "on dark_blue"), (1.25, ""), (2.0, "on dark_orange3"), (float("inf"), "on red"))
RATIO_KEY = ((0.4, "under 0.5"), (0.7, "under 0.8"), (1.5, "over 1.25"), (2.5, "over 2"))


def command(args: argparse.Namespace) -> int:
    """Print whole transcripts, or without --step and --task a table of the newest."""
    run = find_run(args.run)
    for option in ("step", "task"):
        if (number := getattr(args, option)) is not None and number < 0:
            raise UsageError(f"--{option}: expected a number of at least 0, found {number}")
    some = args.step is not None or args.task is not None
    found = read(run, args.step, args.task, newest=not some)
    if args.worst:
        found = (transcript for transcript in found if {"worst", "failed"} & set(transcript.why))
    console, count = Console(highlight=False, soft_wrap=True), 0
    if not some:
        found = islice(found, NEWEST)
    if args.json:
        for transcript in found:
            sys.stdout.write(msgspec.json.encode(transcript).decode() + "\n")
        return 0
    if not some:
        found = list(found)
        console.print(*([table(found)] if found else []))
        count = len(found)
    else:
        for transcript in found:
            console.print(page(transcript, args.color))
            count += 1
    if not count:
        print(f"no such transcript in {run.transcripts}; telemetry.transcripts says which are kept")
    return 0


def visible(text: str) -> str:
    """`text` with everything escaped that a terminal could obey: control characters, and those that turn text round."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def table(found: Iterable[Transcript]) -> Table:
    """One row per transcript."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("task", "sample", "step", "why", "reward", "advantage", "tokens", "stop", "answer"):
        left = name in ("why", "stop", "answer")
        grid.add_column(name, no_wrap=True, min_width=len(name), justify="left" if left else "right")
    for t in found:
        said = next((turn.text for turn in reversed(t.turns) if turn.author == "policy"), "")
        where = f"{t.serial}", f"{t.sample}", "-" if t.step is None else f"{t.step}", " ".join(t.why)
        worth = f"{t.reward:g}", "-" if t.advantage is None else f"{t.advantage:.3g}", f"{t.sampled_tokens}"
        ends = visible(t.stop_reason), visible(said[:BEGINNING].replace("\n", " "))
        grid.add_row(*(Text(cell) for cell in (*where, *worth, *ends)))
    return grid


def page(transcript: Transcript, color: str) -> Text:
    """The whole transcript; the background of the policy's tokens says their version or their ratio."""
    t, out = transcript, Text()
    step = "trained no step" if t.step is None else f"step {t.step}"
    facts = [f"task {t.serial} sample {t.sample}", step, f"reward {t.reward:g}", f"node {t.node_id}", t.stop_reason]
    facts[2:2] = [f"advantage {t.advantage:.4g}"] if t.advantage is not None else []
    facts += [f"{name} {value:g}" for name, value in t.metrics.items()] + [f"kept as {' '.join(t.why)}"]
    out.append(visible(" · ".join(facts)) + "\n", "bold")
    if t.error is not None:
        out.append(f"failed: {visible(t.error)}\n", "bold red")
    if color == "ratio":
        out.append("ratio: ").append(Text(" ").join(Text(name, ratio_style(value)) for value, name in RATIO_KEY))
        out.append("\n")
    for turn in t.turns:
        if turn.cut_before:
            out.append(f"[{turn.cut_before} tokens are left out]\n", "bold yellow")
        out.append(visible(_heading(turn)) + "\n", "bold cyan")
        out.append_text(said(turn, color)).append("\n")
    return out


def said(turn: Turn, color: str) -> Text:
    """A turn's text; neighbouring tokens of one style are one span."""
    styles = token_styles(turn, color)
    if len(styles) != len(turn.pieces):
        return Text(visible(turn.text))
    out = Text()
    for style, group in groupby(zip(styles, turn.pieces, strict=True), key=lambda pair: pair[0]):
        out.append(visible("".join(piece for _, piece in group)), style)
    return out


def token_styles(turn: Turn, color: str) -> Sequence[str]:
    """The style of each token: plain for prompt and environment, dim for tokens that were not in the loss."""
    if turn.author != "policy":
        return [""] * len(turn.pieces)
    if color == "ratio":
        styles = [ratio_style(ratio) for ratio in turn.ratios] or [""] * len(turn.tokens)
    else:
        runs = [*turn.version_runs, (len(turn.tokens), 0)] if turn.version_runs else [(len(turn.tokens), 0)]
        styles = [""] * runs[0][0]
        for (start, version), (end, _) in pairwise(runs):
            styles += [BY_VERSION[version % len(BY_VERSION)]] * (end - start)
    trained = turn.trained or [1] * len(styles)
    return [style if loss else f"dim {style}".strip() for style, loss in zip(styles, trained, strict=False)]


def ratio_style(ratio: float) -> str:
    """The background of a token with this importance ratio; none near 1."""
    return next(style for bound, style in BY_RATIO if ratio <= bound)


def _heading(turn: Turn) -> str:
    words = [turn.author, f"{len(turn.tokens)} tokens"]
    if turn.version_runs:
        versions = list(dict.fromkeys(version for _, version in turn.version_runs))
        words.append(f"version{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}")
    words += [f"reward {turn.reward:g}"] if turn.reward is not None else []
    words += ["not in the loss"] if turn.trained and not any(turn.trained) else []
    return "── " + " · ".join(words)
