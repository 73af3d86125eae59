"""Spans of a process: bounded, counted when they are lost, and on a clock whose distance to the broker's is known."""

import asyncio
import itertools
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection

import msgspec
import pytest

from broker.client.connection import AsyncBrokerClient
from common import span_buffer
from common.span_buffer import SPANS, SpanBuffer
from common.spans import SpanBatch
from tests.rigs.brokers import new_state, node_report, run_info, serving
from tests.rigs.telemetry import recorded
from tests.rigs.waiting import LIMIT_S

BIG = 1 << 20


@pytest.fixture
def spans() -> SpanBuffer:
    """It records, and has heard of the broker."""
    buffer = SpanBuffer()
    buffer.open()
    buffer.heard(buffer.now(), buffer.now())
    return buffer


def taken(spans: SpanBuffer, limit_bytes: int = BIG) -> SpanBatch:
    batch = spans.batch("n0", limit_bytes)
    assert batch is not None
    return batch


def test_a_span_has_the_unix_time_of_its_beginning_and_what_is_closed_records_nothing(spans: SpanBuffer) -> None:
    began, now = time.monotonic(), time.time()
    spans.add("step 3", "step", began, began + 2.5, "loop", step=3)
    spans.close()
    spans.add("late", "step", began)
    (span,) = taken(spans).spans
    assert (span.name, span.kind, span.track, span.args) == ("step 3", "step", "loop", {"step": 3})
    assert span.start_s == pytest.approx(now, abs=LIMIT_S) and span.duration_s == 2.5
    assert spans.batch("n0", BIG) is None


def test_nothing_is_recorded_before_it_is_opened_or_given_out_before_the_first_round_trip() -> None:
    spans = SpanBuffer()
    spans.add("early", "step", time.monotonic())
    spans.open()
    spans.add("step 0", "step", time.monotonic())
    assert spans.batch("n0", BIG) is None
    spans.heard(spans.now(), 0.0)
    assert spans.batch("n0", BIG) is None, "the broker records no trace"
    spans.heard(spans.now(), spans.now())
    assert [span.name for span in taken(spans).spans] == ["step 0"]


def test_states_become_spans_when_they_end_or_last_long(spans: SpanBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    spans.state("waiting")
    spans.state("waiting")
    spans.state("training")
    monkeypatch.setattr(span_buffer, "PIECE_S", 0.0)
    pieces = taken(spans).spans + taken(spans).spans
    assert [(piece.name, piece.kind) for piece in pieces] == [("waiting", "state")] + [("training", "state")] * 2
    for before, after in itertools.pairwise(pieces):
        assert after.start_s == pytest.approx(before.start_s + before.duration_s, abs=1e-5), "without a gap"


def test_a_full_buffer_forgets_the_oldest_spans_and_counts_them(
    spans: SpanBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = span_buffer.MOST_SPANS
    threads = [
        threading.Thread(target=lambda: [spans.add("s", "engine", 0.0, 1.0) for _ in range(most)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    spans.lost(7)
    batch, count = taken(spans), 0
    while batch.spans:
        count += len(batch.spans)
        assert batch.dropped == 2 * most + 7
        batch = spans.batch("n0", BIG) or SpanBatch(who="n0", host="")
    assert count == most


def test_a_batch_has_at_most_the_allowed_bytes_and_a_span_more_and_rare_spans_first(spans: SpanBuffer) -> None:
    for number in range(100):
        spans.add(f"engine {number:03d}", "engine", 0.0, 1.0)
    spans.add("flip", "flip", 0.0, 1.0)
    assert spans.batch("n0") is None, "the broker has allowed nothing yet"
    spans.heard(spans.now(), spans.now(), 1000)
    batch = spans.batch("n0")
    assert batch is not None and batch.spans[0].kind == "flip"
    sizes = [len(msgspec.json.encode(span)) for span in batch.spans]
    assert sum(sizes[:-1]) < 1000 <= sum(sizes)
    assert spans.batch("n0") is None, "the allowance is used up"
    spans.heard(spans.now(), spans.now(), sum(sizes) - 1000)
    assert spans.batch("n0") is None, "more than was allowed is paid back"


def test_a_span_that_a_broker_would_refuse_is_left_out_and_counted(spans: SpanBuffer) -> None:
    spans.add("nan", "flip", 0.0, 1.0, stall_s=float("nan"))
    spans.add("object", "flip", 0.0, 1.0, stall_s=object())  # type: ignore[arg-type]
    spans.add("long" * 99999, "flip", 0.0, 1.0)
    spans.add("good", "flip", 0.0, 1.0)
    batch = taken(spans)
    assert [span.name for span in batch.spans] == ["good"] and batch.dropped == 3


# ---------------------------------------------------------------- clocks


def test_the_shortest_round_trip_counts_until_its_age_makes_it_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    spans = SpanBuffer(lambda: now[0])
    spans.open()

    def heard(ahead_s: float, took_s: float) -> tuple[float, float]:
        """A round trip with a broker whose clock is `ahead_s`, and that answered at once; the offset, its error."""
        sent, now[0] = now[0], now[0] + took_s
        spans.heard(sent, sent + ahead_s)
        spans.add("s", "step", now[0])
        batch = taken(spans)
        return batch.offset_s, batch.error_s

    assert heard(5.0, 0.2) == (pytest.approx(4.9), pytest.approx(0.1))
    assert heard(5.0, 8.0) == (pytest.approx(4.9), pytest.approx(0.1 + 8 * span_buffer.DRIFT)), "it waited for the disk"
    assert heard(5.0, 0.02) == (pytest.approx(4.99), pytest.approx(0.01))
    now[0] += 0.02 / span_buffer.DRIFT
    offset, error = heard(5.2, 0.04)
    assert (offset, error) == (pytest.approx(5.18), pytest.approx(0.02)), "clocks drift: the old one is no longer good"


def measure(address: str, ahead_s: float, pipe: Connection) -> None:
    """A node whose clock is `ahead_s` before the system's, which it and the broker share here."""
    spans = SpanBuffer(lambda: time.time() + ahead_s)
    spans.open()

    async def beat() -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        async with AsyncBrokerClient(address, deadline_s=LIMIT_S) as node:
            for _ in range(20):
                sent = spans.now()
                reply = await node.heartbeat(node_report(f"n{ahead_s}"), [])
                spans.heard(sent, reply.time_s, reply.span_bytes)
                spans.add("s", "step", time.monotonic())
                if (batch := spans.batch("n0")) is not None:
                    found.append((batch.offset_s, batch.error_s))
        return found

    pipe.send(asyncio.run(beat()))


@pytest.mark.slow
def test_the_true_distance_of_two_clocks_lies_within_the_stated_error() -> None:
    context = multiprocessing.get_context("spawn")
    base = SpanBuffer()  # as the broker's, made in another moment
    with serving(state=new_state(run_info(trace=True))) as server:
        for ahead_s in (-86400.0, 0.0, 1234.5):
            mine, theirs = context.Pipe()
            process = context.Process(target=measure, args=(server.address, ahead_s, theirs))
            process.start()
            assert mine.poll(LIMIT_S)
            found = mine.recv()
            process.join(LIMIT_S)
            assert len(found) >= 19
            slack_s = 2e-3 + abs(base.now() - time.time())  # between two readings of time.time and time.monotonic
            for offset, error in found:
                assert abs(offset + ahead_s) <= error + slack_s
            assert found[-1][1] <= found[0][1] + 20 * LIMIT_S * span_buffer.DRIFT


def test_a_test_also_sees_the_spans_that_a_heartbeat_took_first() -> None:
    with recorded() as spans:
        SPANS.add("a", "lease", 0.0)
        assert SPANS.batch("n0", BIG) is not None
        assert [span.kind for span in spans()] == ["lease"]
