"""Progress of long work: lines in a log, a bar on a terminal, nothing beside JSON."""

import io
import logging
import os
import pty
from collections.abc import Iterator

import pytest

from common.process import progress
from common.process.progress import bar, counted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
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
        said = os.read(mine, 1 << 16).decode()
    os.close(mine)
    assert "3/8" in said and "steps" in said and "a record" in said
