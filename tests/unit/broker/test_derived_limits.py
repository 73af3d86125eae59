"""Limits of the broker that follow from others, and what it says when Redis lost the store."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from broker.contract import BrokerEvent
from broker.journal import run_folder
from broker.journal.file_store import open_file_store
from broker.journal.recovery import open_state
from broker.server import flood_guard, request_guard
from broker.server.request_guard import RejectionLog, RequestGuard
from broker.wire import WireError
from common.config.schema import TelemetryConfig
from tests.broker_rig import job, new_state, run_info


@pytest.mark.parametrize(("message", "allowed"), [(1 << 20, flood_guard.UNEXPLAINED_BYTES), (1 << 30, 2 << 30)])
def test_memory_may_grow_by_two_messages_without_an_explanation(
    monkeypatch: pytest.MonkeyPatch, message: int, allowed: int
) -> None:
    ticks = list[int]()
    guards = list[int]()

    def guard(router: object, allowed_bytes: int) -> object:
        guards.append(allowed_bytes)
        return SimpleNamespace(tick=ticks.append, close=lambda: None, alert=False)

    monkeypatch.setattr(request_guard, "FloodGuard", guard)
    with zmq.Context[Any]() as context:
        state = new_state()
        gate = RequestGuard(context, state, None, None)
        gate.tick()
        gate.watch(cast(Any, None), message)
        state.tasks.bytes_held = 5
        gate.tick()
        gate.close()
    assert (guards, ticks) == ([allowed], [5])


def test_transcripts_of_failed_groups_take_a_quarter_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[int]()
    monkeypatch.setattr(run_folder, "SegmentWriter", lambda folder, prefix, limit: limits.append(limit))
    assert run_folder.failed_transcripts(tmp_path, TelemetryConfig(transcripts="none")) is None
    made = run_folder.failed_transcripts(tmp_path, TelemetryConfig(transcripts=0.5, transcripts_mib=8))
    assert made is not None and limits[-1] == 2 << 20


def test_a_long_reason_is_cut_in_events() -> None:
    state = new_state()
    RejectionLog(state).note(b"client", WireError("x" * 1000), b"", 0)
    (event,) = state.event_log.after(-1)
    assert (event.detail["reason"], event.detail["count"]) == ("x" * 500, 1)


@pytest.mark.parametrize("lost", ["", "why"])
def test_a_store_that_redis_lost_is_an_event_of_the_broker_that_begins_anew(tmp_path: Path, lost: str) -> None:
    leading: Any = SimpleNamespace(open=lambda: open_file_store(tmp_path / "lies elsewhere", "test"), lost=lost)
    events = list[BrokerEvent]()
    memory = open_state(job(tmp_path), run_info(), events.append, leading)
    memory.close()
    assert [event.detail for event in events if event.kind == "store_lost"] == [{"reason": lost}] * bool(lost)
