"""Folders of JSON lines stay bounded. The caller of their thread never waits, and lost lines are counted."""

import errno
import io
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from common.segments import MOST_WAITING, SEGMENTS, LineThread, SegmentWriter, number_of, segments
from tests.rigs.waiting import LIMIT_S

LIMIT = 16_000


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_oldest_segments_make_room_and_the_newest_lines_stay(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "a", "steps", LIMIT)
    for number in range(1000):
        writer.write(b"%099d\n" % number)
        assert sizes(tmp_path / "a") <= LIMIT
    found = [int(line) for path in segments(tmp_path / "a", "steps") for line in path.read_bytes().splitlines()]
    assert found == list(range(found[0], 1000))
    assert len(found) > 0.8 * LIMIT / 100
    assert len(segments(tmp_path / "a", "steps")) <= SEGMENTS


def test_a_new_writer_begins_a_new_segment_and_other_prefixes_are_left_alone(tmp_path: Path) -> None:
    SegmentWriter(tmp_path, "failed", LIMIT).write(b"other\n")
    for text in (b"torn", b"whole\n"):
        SegmentWriter(tmp_path, "steps", LIMIT).write(text)
    assert [(number_of(path), path.read_bytes()) for path in segments(tmp_path, "steps")] == [
        (0, b"torn"),
        (1, b"whole\n"),
    ]
    assert len(segments(tmp_path, "failed")) == 1


def test_a_line_that_was_cut_by_a_full_disk_does_not_spoil_the_next(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SegmentWriter(tmp_path, "steps", LIMIT)
    writer.write(b'{"a":1}\n')
    real = Path.open

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            with real(segments(tmp_path, "steps")[0], "ab") as file:
                file.write(data[:4])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda *_: Full())
    for _ in range(2):
        with pytest.raises(OSError) as failed:
            writer.write(b'{"a":2}\n')
        assert failed.value.errno == errno.ENOSPC
    monkeypatch.undo()
    writer.write(b'{"a":3}\n')
    (only,) = segments(tmp_path, "steps")
    found = only.read_bytes().splitlines()
    assert found[0] == b'{"a":1}' and found[-1] == b'{"a":3}'


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "a", "steps", LIMIT)
    writer.write(b"before\n")
    shutil.rmtree(tmp_path / "a")
    for _ in range(2):
        writer.write(b"after\n")
    (only,) = segments(tmp_path / "a", "steps")
    assert only.read_bytes() == b"after\n" * 2


# ---------------------------------------------------------------- the thread


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
    (record,) = caplog.records
    assert record.getMessage().startswith("transcripts ") and "ValueError('odd')" in record.getMessage()


def test_a_full_queue_drops_and_counts_at_once(tmp_path: Path) -> None:
    gate, began = threading.Event(), threading.Event()

    def slow(number: int) -> bytes:
        began.set()
        gate.wait(LIMIT_S)
        return line_of(number)

    lost: list[int] = []
    thread = LineThread("transcripts", SegmentWriter(tmp_path, "a", 1 << 20), lambda: slow, lost.append)
    thread.put(0)
    assert began.wait(LIMIT_S)
    for number in range(1, MOST_WAITING + 11):
        thread.put(number)
    assert thread.dropped == 10 and lost == list(range(MOST_WAITING + 1, MOST_WAITING + 11))
    gate.set()
    thread.close(LIMIT_S)
    assert len(lines(tmp_path)) == MOST_WAITING + 1


def test_without_a_tokenizer_everything_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> None:
        raise OSError("no tokenizer.json")

    thread = LineThread("transcripts", SegmentWriter(tmp_path, "a", 1 << 20), build)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        thread.put(1)
        thread.put(2)
        thread.close(LIMIT_S)
    assert thread.dropped == 2 and not lines(tmp_path)
    assert "no tokenizer.json" in caplog.text and len(caplog.records) == 1


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
