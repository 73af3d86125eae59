"""Transcripts from the run folder, whatever is in it, and in the terminal, whatever a model wrote."""

import json
import re
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from common.errors import EXIT_USAGE
from common.process.logs import visible
from common.process.run_dir import RunDir
from common.segments import SegmentWriter, segments
from common.transcripts import Transcript, Turn
from launch.cli import main
from launch.observe.transcripts import LONGEST_LINE, page, read

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1m\r\u202e[bold]no[/bold]\x00\x7f\u2028\t end"


def turn(author: str, *pieces: str, **changes: Any) -> Turn:
    made: dict[str, Any] = {"tokens": list(range(len(pieces))), "pieces": list(pieces)}
    if author == "policy":
        made |= {"logprobs": [-1.0] * len(pieces), "trained": [1] * len(pieces), "version_runs": [(0, 1)]}
    return Turn(author=author, text="".join(pieces), **made | changes)  # type: ignore[arg-type]


def transcript(serial: int, sample: int = 0, step: int | None = 0, **changes: Any) -> Transcript:
    turns = [turn("prompt", "1+", "1?"), turn("policy", "it", " is 2", ratios=[1.0, 3.0])]
    facts = {
        "node_id": "n0",
        "time_s": float(serial),
        "why": ["share"],
        "turns": turns,
        "reward": 0.5,
        "advantage": 1.0,
    }
    return Transcript(serial=serial, sample=sample, step=step, **facts | changes)  # type: ignore[arg-type]


def write(run: RunDir, *found: Transcript, prefix: str = "steps", limit: int = 1 << 20) -> SegmentWriter:
    writer = SegmentWriter(run.transcripts, prefix, limit)
    for item in found:
        writer.write(msgspec.json.encode(item) + b"\n")
    return writer


def serials(run: RunDir, **options: Any) -> list[int]:
    return [found.serial for found in read(run, **options)]


def shown(run: RunDir, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["transcripts", str(run.path), *words]) == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------- the files


def test_learner_and_broker_are_read_as_one_the_newest_first(run: RunDir) -> None:
    write(run, *(transcript(n) for n in (1, 4, 5)))
    write(run, *(transcript(n, step=None) for n in (2, 3, 6)), prefix="failed")
    write(run, transcript(7))
    assert serials(run) == [7, 6, 5, 4, 3, 2, 1]


def test_a_step_and_a_task_are_found(run: RunDir) -> None:
    bait = turn("policy", '"step":3,"serial":5,')
    write(run, *(transcript(n, n % 2, step=n // 2) for n in range(12)), transcript(12, 0, 9, turns=[bait]))
    write(run, transcript(4, 1, None), prefix="failed")
    assert serials(run, step=3) == [7, 6]
    assert [(t.step, t.sample) for t in read(run, task=4)] == [(2, 0), (None, 1)]
    assert serials(run, step=2, task=5) == [5]
    assert serials(run, step=99) == []


def test_a_step_that_was_trained_again_shows_once_with_what_came_last(run: RunDir) -> None:
    write(run, transcript(1, reward=0.0), transcript(2), transcript(1, reward=1.0, time_s=9.0))
    assert [(t.serial, t.reward) for t in read(run)] == [(1, 1.0), (2, 0.5)]
    write(run, transcript(3, step=None), transcript(3, step=None), prefix="failed")
    assert serials(run, task=3) == [3, 3], "attempts that failed are different ones"


@pytest.mark.slow
def test_lines_that_are_torn_foreign_or_far_too_long_are_passed_over(run: RunDir) -> None:
    write(run, transcript(1))
    (path,) = segments(run.transcripts, "steps")
    later = msgspec.to_builtins(transcript(2)) | {"mood": "good", "why": ["share"]}
    other = msgspec.to_builtins(transcript(3)) | {"why": ["because"]}
    lines = [b"", b"{", b"\xff\xfe", b'"text"', json.dumps(later).encode(), json.dumps(other).encode()]
    huge = msgspec.json.encode(transcript(4, turns=[turn("prompt", "a" * (100 << 20))]))
    with path.open("ab") as file:
        file.write(b"\n".join([*lines, huge, msgspec.json.encode(transcript(5)), b""]))
        file.write(msgspec.json.encode(transcript(6))[:-9])
    assert len(huge) > LONGEST_LINE
    assert serials(run) == [5, 2, 1]
    with path.open("ab") as file:
        file.write(b"\n")
    write(run, transcript(7), limit=1 << 40)
    assert serials(run) == [7, 5, 2, 1], "the line that was torn stays out"


def test_a_run_may_be_pruned_and_written_while_it_is_read(run: RunDir) -> None:
    writer = write(run, *(transcript(n) for n in range(400)), limit=1 << 16)
    first = serials(run)
    found = read(run)
    seen = [next(found).serial for _ in range(3)]
    for path in segments(run.transcripts, "steps")[:-4]:
        path.unlink()
    writer.write(msgspec.json.encode(transcript(400)) + b"\n")
    seen += [t.serial for t in found]
    assert seen == first[: len(seen)] and 3 < len(seen) < len(first)
    assert serials(run)[0] == 400


# ---------------------------------------------------------------- the terminal


def rendered(found: Transcript, color: str = "version") -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=True, color_system="256", width=500, soft_wrap=True, highlight=False)
    console.print(page(found, color))
    return out.getvalue()


def test_nothing_that_a_model_writes_reaches_the_terminal_as_a_command(run: RunDir, capsys) -> None:
    turns = [turn("prompt", HOSTILE), turn("policy", HOSTILE[:9], HOSTILE[9:]), turn("environment", HOSTILE)]
    hostile = {"node_id": HOSTILE, "stop_reason": HOSTILE, "error": HOSTILE, "metrics": {HOSTILE: 1.0}}
    found = transcript(1, turns=turns, **hostile)
    only_colors = re.sub(r"\x1b\[[0-9;]*m", "", rendered(found))
    assert [c for c in only_colors if not c.isprintable() and c != "\n"] == []
    assert only_colors.count("[bold]no[/bold]") == 7, "no markup is obeyed"
    assert "\\x1b]0;owned\\x07" in only_colors and "\\u202e" in only_colors
    assert visible("a\tb\r\nc\u00ad") == "a\\tb\\r\nc\\xad"
    write(run, found)
    for words in ([], ["--step", "0"], ["--task", "1", "--color", "ratio"]):
        plain = shown(run, capsys, *words)
        assert [c for c in plain if not c.isprintable() and c != "\n"] == []


def styles_of(found: Transcript, color: str) -> dict[str, str]:
    text = page(found, color)
    return {text.plain[span.start : span.end]: str(span.style) for span in text.spans}


def test_tokens_have_the_colour_of_their_version_or_ratio_and_untrained_ones_are_dim() -> None:
    said = turn(
        "policy", "one", " two", " three", " four",
        version_runs=[(0, 6), (3, 7)], trained=[1, 1, 0, 1], ratios=[0.3, 0.3, 1.0, 4.0],
    )  # fmt: skip
    found = transcript(1, turns=[turn("prompt", "ask"), said, turn("environment", "answer")])
    by_version, by_ratio = styles_of(found, "version"), styles_of(found, "ratio")
    assert by_version["one two"] == "on blue"
    assert by_version[" three"] == "dim on blue"
    assert by_version[" four"] == "on dark_green"
    assert by_ratio["one two"] == "on blue" and by_ratio[" four"] == "on red" and by_ratio[" three"] == "dim"
    assert not {"ask", "answer"} & {*by_version, *by_ratio}, "what others said is plain"
    assert "one two three four" in re.sub(r"\x1b\[[0-9;]*m", "", rendered(found, "ratio"))


def test_a_cut_and_a_broken_turn_are_shown_as_such() -> None:
    broken = turn("policy", "a", "b", trained=[1], version_runs=[(5, 1)])
    text = page(transcript(1, turns=[broken, turn("environment", "x", cut_before=1234)], error="no\x1bway"), "version")
    assert "[1234 tokens are left out]" in text.plain
    assert "ab" in text.plain and "failed: no\\x1bway" in text.plain


def test_without_a_step_or_task_the_newest_are_listed(run: RunDir, capsys) -> None:
    write(run, *(transcript(n, why=["worst"] if n == 3 else ["share"]) for n in range(30)))
    lines = shown(run, capsys).splitlines()
    assert len(lines) == 20
    assert lines[0] == "task 29 sample 0 · step 0 · advantage 1 · reward 0.5 · node n0 ·  · kept as share"
    assert [line.split()[1] for line in shown(run, capsys, "--worst").splitlines()] == ["3"]


def test_json_has_one_whole_transcript_per_line(run: RunDir, capsys) -> None:
    written = [transcript(n, step=n) for n in range(3)]
    write(run, *written)
    lines = shown(run, capsys, "--json").splitlines()
    assert [msgspec.json.decode(line, type=Transcript) for line in lines] == written[::-1]
    (only,) = shown(run, capsys, "--json", "--step", "1").splitlines()
    assert msgspec.json.decode(only, type=Transcript) == written[1]


def test_a_run_without_any_says_so_and_a_number_that_is_none_is_refused(run: RunDir, capsys) -> None:
    assert "no such transcript" in shown(run, capsys)
    assert shown(run, capsys, "--json") == ""
    assert main(["transcripts", str(run.path), "--step", "-1"]) == EXIT_USAGE
    assert "--step: expected" in capsys.readouterr().err
    assert main(["transcripts", str(run.path / "nowhere")]) == EXIT_USAGE
