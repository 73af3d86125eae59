"""Limits of the broker that follow from others, and what it says when Redis lost the store."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq
from redis.exceptions import NoPermissionError

from broker.contract import BrokerEvent
from broker.delivery.logs import RING_EVENTS
from broker.delivery.task_table import History, StoredPayload
from broker.journal import recovery, redis_server, redis_store, run_folder
from broker.journal.file_store import open_file_store
from broker.journal.recovery import open_state
from broker.journal.store import Record, StoreCorrupt
from broker.server import flood_guard, request_guard
from broker.server.request_guard import RejectionLog, RequestGuard
from broker.wire import WireError
from common.config.schema import TelemetryConfig
from common.errors import UsageError
from common.process.run_dir import RunDir
from tests.rigs.brokers import job, new_state, run_info
from tests.rigs.refusals import refused


@pytest.mark.parametrize(("message", "allowed"), [(1 << 20, flood_guard.UNEXPLAINED_BYTES), (1 << 30, 2 << 30)])
def test_memory_may_grow_by_two_messages_without_an_explanation(
    monkeypatch: pytest.MonkeyPatch, message: int, allowed: int
) -> None:
    ticks = list[int]()
    guards = list[tuple[int, int]]()

    def guard(router: object, allowed_bytes: int, max_message_bytes: int) -> object:
        guards.append((allowed_bytes, max_message_bytes))
        return SimpleNamespace(tick=ticks.append, close=lambda: None, alert=False)

    monkeypatch.setattr(request_guard, "FloodGuard", guard)
    with zmq.Context[Any]() as context:
        state = new_state()
        gate = RequestGuard(context, state, None, None)
        gate.tick()
        gate.watch(cast(Any, None), message)
        state.tasks.bytes_in_memory = 5
        monkeypatch.setattr(History, "memory_bytes", 7)  # finished tasks explain memory as groups do
        gate.tick()
        gate.close()
    assert (guards, ticks) == ([(allowed, message)], [5 + 7])


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


@pytest.mark.parametrize(("enabled", "found"), [("1", ""), ("0", "appendonly no")])
def test_without_the_right_to_read_its_settings_redis_is_judged_by_what_it_says_of_itself(
    enabled: str, found: str
) -> None:
    def denied(setting: str) -> dict[str, str]:
        raise NoPermissionError("config")

    info = {"redis_version": "7.2.0", "role": "master", "maxmemory_policy": "noeviction", "aof_enabled": enabled}
    client = SimpleNamespace(info=lambda *sections: info, config_get=denied)
    doubts = list[str]()
    if found:
        with refused(UsageError, found):
            redis_server.check_server(client, "redis://h", "fsync", doubts.append)
    else:
        redis_server.check_server(client, "redis://h", "fsync", doubts.append)
    assert "CONFIG" in doubts[0]


def test_a_history_in_redis_is_read_whole_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "CHUNK", 2)
    for length in range(6):
        bodies = [b"%d" % i for i in range(length)]

        def run(commands: Any, bodies: list[bytes] = bodies) -> list[list[bytes]]:
            ((name, key, first, last),) = commands
            assert (name, key[-7:]) == ("LRANGE", "history")
            return [bodies[first:] if last == -1 else bodies[first : last + 1]]

        term: Any = SimpleNamespace(name="r", prefix="p:", run_dir="/run", about=lambda: (None, 0), run=run)
        assert list(redis_store.RedisStore(term).history(length)) == bodies


def test_a_store_in_redis_is_as_large_as_its_log_and_its_payloads() -> None:
    term: Any = SimpleNamespace(name="r", prefix="p:", run_dir="/run", number=1, about=lambda: (None, 0))
    term.write = lambda *told: None
    store = redis_store.RedisStore(term)
    sizes = [store.size_bytes()]
    for seq, payload in enumerate((None, b"x" * 1000), start=1):
        stored = StoredPayload(lambda location: b"") if payload else None
        store.append([Record(seq, b"body", payload, stored)], synced=0, sync=True)
        sizes.append(store.size_bytes())
    log = sizes[1] - sizes[0]
    assert sizes[0] == 0 < log < 100 and sizes[2] == pytest.approx(2 * log + 1000, abs=8)


@pytest.mark.parametrize("lost", ["", "why"])
def test_a_store_that_redis_lost_is_an_event_of_the_broker_that_begins_anew(tmp_path: Path, lost: str) -> None:
    leading: Any = SimpleNamespace(open=lambda: open_file_store(tmp_path / "lies elsewhere", "test"), lost=lost)
    events = list[BrokerEvent]()
    memory = open_state(job(tmp_path), run_info(), events.append, leading)
    memory.close()
    assert [event.detail for event in events if event.kind == "store_lost"] == [{"reason": lost}] * bool(lost)


def test_a_broker_goes_on_with_the_newest_events_of_its_run_folder(tmp_path: Path) -> None:
    kept = [BrokerEvent(index, 0.0, "join") for index in range(RING_EVENTS + 2)]
    lines = [msgspec.json.encode(event) for event in kept] + [b'{"kind": "role_started"}', b'{"ind']
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines))
    leading: Any = SimpleNamespace(open=lambda: open_file_store(tmp_path / "lies elsewhere", "test"), lost="")
    memory = open_state(job(tmp_path), run_info(), lambda event: None, leading)
    memory.close()
    assert list(memory.state.event_log.after(-1)) == kept[-RING_EVENTS:]


@pytest.mark.parametrize("damaged", [True, False])
def test_while_the_broker_reads_its_store_a_file_of_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """`slipstream up` waits for as long as it exists."""
    mark, seen = RunDir(tmp_path).recovering, list[bool]()
    recover = recovery.recover

    def looking(*args: Any) -> Any:
        seen.append(mark.exists())
        if damaged:
            raise StoreCorrupt("a place", "damaged")
        return recover(*args)

    monkeypatch.setattr(recovery, "recover", looking)
    with suppress(StoreCorrupt):
        open_state(job(tmp_path), run_info(), lambda event: None).close()
    assert (seen, mark.exists()) == ([True], False)
