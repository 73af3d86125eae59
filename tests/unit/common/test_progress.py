"""Progress of long work: lines in a log, a bar on a terminal, nothing beside JSON."""

import contextlib
import io
import logging
import os
import pty
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.process import progress
from common.process.progress import MIB, bar, counted, growing
from tests.rigs.waiting import until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))  # others keep their clock
    yield now


def test_a_log_gets_a_line_every_ten_seconds_with_the_time_left(clock: list[float]) -> None:
    out = io.StringIO()
    with bar("export", 40, "tensors", out=out) as show:
        for done in range(41):
            clock[0] = 2.0 * done
            show(done)
    lines = out.getvalue().splitlines()
    assert lines[0] == "export: 5 of 40 tensors, 12%, 70 s left"
    assert lines[-1] == "export: 40 of 40 tensors, 100%, 0 s left" and len(lines) == 8


def test_work_that_is_quick_or_printed_as_json_says_nothing(clock: list[float]) -> None:
    out = io.StringIO()
    with bar("eval", 4, "episodes", out=out) as show:
        clock[0] = 9.9
        show(4)
    with bar("eval", 4, "episodes", quiet=True, out=out) as show:
        clock[0] = 99.0
        show(4)
    assert out.getvalue() == ""


def test_a_thing_counts_when_the_next_is_asked_for(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    def things() -> Iterator[int]:
        for n in range(3):
            clock[0] += 10.0
            yield n

    assert list(counted(things(), 2, "export", "tensors")) == [0, 1, 2]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == "export: 1 of 2 tensors, 50%, 10 s left"
    assert captured.err.splitlines()[-1].startswith("export: 2 of 2 "), "never more than all"


def test_a_folder_that_grows_is_looked_at_until_the_work_ends(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOOK_EVERY_S", 0.001)
    said: list[str] = []

    def line() -> str:
        said.extend(capsys.readouterr().err.splitlines())
        return said[-1] if said else ""

    def holds(name: str, mib: int, now_s: float) -> None:
        with (tmp_path / "later" / name).open("wb") as file:
            file.truncate(mib * MIB)
        clock[0] = now_s

    with growing(tmp_path / "later", 40 * MIB, "convert"):
        (tmp_path / "later").mkdir()
        holds("one", 10, now_s=10.0)
        until(lambda: line() == "convert: 10 of 40 MiB written, 25%, 30 s left")
        holds("two", 60, now_s=20.0)
        until(lambda: line() == "convert: 40 of 40 MiB written, 100%, 0 s left")
        (tmp_path / "later").rename(tmp_path / "made")
    assert len(said) == 2 and all(thread.name != "progress" for thread in threading.enumerate())


def test_a_terminal_shows_a_bar_and_log_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        handler = logging.StreamHandler(terminal)
        logging.getLogger().addHandler(handler)
        try:
            with bar("sft", 8, "steps") as show:
                show(3)
                assert handler.stream is not terminal, "a record would break the bar"
                logging.getLogger("test").warning("a record")
            assert handler.stream is terminal
        finally:
            logging.getLogger().removeHandler(handler)
    frames: list[bytes] = []
    with contextlib.suppress(OSError):  # EIO: all is read, and no process has the terminal open
        while frame := os.read(mine, 1 << 16):
            frames.append(frame)
    os.close(mine)
    said = b"".join(frames).decode()
    assert "3/8" in said and "steps" in said and "a record" in said
