"""The thread that writes lines: its caller never waits, and whatever goes wrong is counted and logged once."""

import logging
import threading
from pathlib import Path

import pytest

from common.line_thread import MOST_WAITING, LineThread
from common.segments import SegmentWriter
from tests.waiting import LIMIT_S


def lines(folder: Path) -> list[bytes]:
    return [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def line_of(number: int) -> bytes:
    if number < 0:
        raise ValueError("odd")
    return b"%d\n" % number


def test_lines_are_written_in_order_and_an_odd_item_is_counted_and_logged_once(tmp_path, caplog) -> None:
    thread = LineThread("transcripts", SegmentWriter(tmp_path, "a", 1 << 20), lambda: line_of)
    for number in (1, -1, 2, -2, 3):
        thread.put(number)
    thread.close(LIMIT_S)
    assert lines(tmp_path) == [b"1", b"2", b"3"]
    assert thread.dropped == 2
    assert [r.getMessage() for r in caplog.records] == [
        "transcripts are dropped; later ones are counted and not logged: ValueError('odd')"
    ]


def test_a_full_queue_drops_and_counts_at_once(tmp_path: Path) -> None:
    gate, began = threading.Event(), threading.Event()

    def slow(number: int) -> bytes:
        began.set()
        gate.wait(LIMIT_S)
        return line_of(number)

    thread = LineThread("transcripts", SegmentWriter(tmp_path, "a", 1 << 20), lambda: slow)
    thread.put(0)
    assert began.wait(LIMIT_S)
    for number in range(1, MOST_WAITING + 11):
        thread.put(number)
    assert thread.dropped == 10
    gate.set()
    thread.close(LIMIT_S)
    assert len(lines(tmp_path)) == MOST_WAITING + 1


def test_without_a_tokenizer_everything_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> None:
        raise OSError("no tokenizer in model")

    thread = LineThread("transcripts", SegmentWriter(tmp_path, "a", 1 << 20), build)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        thread.put(1)
        thread.put(2)
        thread.close(LIMIT_S)
    assert thread.dropped == 2 and not lines(tmp_path)
    assert "no tokenizer in model" in caplog.text and len(caplog.records) == 1


def test_a_disk_that_cannot_be_written_costs_lines_until_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "transcripts"
    folder.write_text("a file where the folder belongs")
    written = threading.Event()

    def then(number: int) -> bytes:
        if number == 2:
            written.wait(LIMIT_S)
        return line_of(number)

    thread = LineThread("transcripts", SegmentWriter(folder, "a", 1 << 20), lambda: then)
    thread.put(1)
    thread.put(2)
    while not thread.dropped:
        pass
    folder.unlink()
    written.set()
    thread.close(LIMIT_S)
    assert (lines(folder), thread.dropped) == ([b"2"], 1)


def test_an_end_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    gate = threading.Event()
    thread = LineThread("transcripts", SegmentWriter(tmp_path, "a", 1 << 20), lambda: lambda _: gate.wait() and b"\n")
    thread.put(1)
    thread.close(0.01)
    gate.set()


def test_what_a_thread_needs_is_built_by_its_caller(tmp_path: Path) -> None:
    """Imports of a thread beside Megatron's have ended a learner: dictionary changed size during iteration."""
    built: list[threading.Thread] = []
    thread = LineThread("a", SegmentWriter(tmp_path, "a", 1 << 20), lambda: built.append(threading.current_thread()))
    thread.start()
    assert built == [threading.current_thread()]
    thread.close(LIMIT_S)
