"""RUN/trace is written by a thread, within its share; lost spans are counted, and no process waits."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import span_buffer
from common.process.run_dir import RunDir
from common.run_reader import read_batches
from common.segments import MOST_WAITING, SegmentWriter, segments
from common.span_buffer import SpanBuffer, SpanFile
from common.spans import Span, SpanBatch
from tests.rigs.waiting import LIMIT_S, until


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanBuffer]:
    """This process's spans, and a writer that does not wait between two looks."""
    buffer = SpanBuffer()
    monkeypatch.setattr(span_buffer, "SPANS", buffer)
    monkeypatch.setattr(span_buffer, "INTERVAL_S", 0.01)
    buffer.open(reference=True)
    yield buffer


def batch_of(who: str, name: str = "s", count: int = 1) -> SpanBatch:
    return SpanBatch(who=who, host="h", spans=[Span(name, "flip", 10.0 + i, 1.0) for i in range(count)])


def test_own_spans_and_those_of_others_are_written_soon_and_the_last_ones_at_the_end(
    tmp_path: Path, spans: SpanBuffer
) -> None:
    run = RunDir(tmp_path)
    file = SpanFile(run.trace, "nodes", 1, "broker")
    file.put(batch_of("n0"))
    until(lambda: [batch.who for batch in read_batches(run.trace)] == ["n0"])
    spans.state("leading")
    file.close()
    assert [(batch.who, batch.spans[0].name) for batch in read_batches(run.trace)] == [
        ("n0", "s"),
        ("broker", "leading"),
    ]


def test_the_folder_stays_within_its_share_and_loses_the_oldest_lines(tmp_path: Path, spans: SpanBuffer) -> None:
    run = RunDir(tmp_path)
    for number in range(40):
        file = SpanFile(run.trace, "learner", 1, "learner")
        file.put(batch_of("learner", f"{number} " + 20_000 * "x"))
        file.close()
    size = sum(path.stat().st_size for path in segments(run.trace, "learner"))
    assert 200_000 < size < 300_000, "a quarter of a MiB"
    assert [batch.spans[0].name.split()[0] for batch in read_batches(run.trace)][-1] == "39"


def test_lines_that_cannot_be_written_are_counted_and_the_reason_is_logged_once(
    tmp_path: Path, spans: SpanBuffer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_buffer, "INTERVAL_S", 3600.0)  # the count is told at the end, when it can be written
    run = RunDir(tmp_path)
    run.trace.write_text("a file where the folder should be")
    file = SpanFile(run.trace, "nodes", 1, "broker")
    with caplog.at_level(logging.WARNING):
        for count in (1, 2, 3):
            file.put(batch_of("n0", count=count))
        until(lambda: spans._dropped == 6)
    assert len(caplog.records) == 1 and "RUN/trace" in caplog.text
    run.trace.unlink()
    file.put(batch_of("n1"))
    file.close()
    found = list(read_batches(run.trace))
    assert {batch.who: batch.dropped for batch in found} == {"n1": 0, "broker": 6}


def test_more_than_may_wait_is_lost_and_counted(
    tmp_path: Path, spans: SpanBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_buffer, "INTERVAL_S", 1e6)
    gate, began, write = threading.Event(), threading.Event(), SegmentWriter.write

    def slow(writer: SegmentWriter, lines: bytes) -> None:
        began.set()
        gate.wait(LIMIT_S)
        write(writer, lines)

    monkeypatch.setattr(SegmentWriter, "write", slow)
    file = SpanFile(RunDir(tmp_path).trace, "nodes", 64, "broker")
    file.put(batch_of("n0", count=6))
    assert began.wait(LIMIT_S)
    for _ in range(MOST_WAITING + 4):
        file.put(batch_of("n0", count=6))
    assert spans._dropped == 24
    gate.set()
    until(file._lines._queue.empty)
    file.close()
    found = list(read_batches(RunDir(tmp_path).trace))
    assert sum(len(batch.spans) for batch in found) == 6 * (MOST_WAITING + 1)
    assert found[-1].dropped == 24
