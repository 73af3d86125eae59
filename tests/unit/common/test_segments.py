"""Folders of JSON lines: their size stays bounded, and a write that failed spoils no later line."""

import io
from pathlib import Path
from typing import Any

import pytest

from common.segments import SEGMENTS, SegmentWriter, number_of, segments

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
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda *_: Full())
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            writer.write(b'{"a":2}\n')
    monkeypatch.undo()
    writer.write(b'{"a":3}\n')
    (only,) = segments(tmp_path, "steps")
    found = only.read_bytes().splitlines()
    assert found[0] == b'{"a":1}' and found[-1] == b'{"a":3}'
