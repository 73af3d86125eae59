"""The broker process: what it leaves in the run directory, and how it ends."""

import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker import main
from broker.contract import BrokerStatus, LearnerReport, LedgerEntry, NodeReport
from broker.journal.run_folder import StatusFiles, keep_former_ledger
from broker.messaging.sync_client import BrokerClient
from broker.server import bind
from broker.server.server import BrokerServer
from common.errors import UsageError
from common.process.run_dir import BrokerFile
from common.rollouts import GroupMeta, Task
from common.security.credentials import KeyFolder
from launch.keys import make
from tests.broker_rig import job, new_state


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[BrokerServer]:
    """The servers that run_broker makes, so that a test can stop them without a signal."""
    made: list[BrokerServer] = []

    class Remembered(BrokerServer):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr(bind, "BrokerServer", Remembered)
    return made


def address_of(run_dir: Path) -> str:
    end = time.monotonic() + 10
    while not (run_dir / "broker.json").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return json.loads((run_dir / "broker.json").read_text())["address"]


def test_a_run_directory_tells_where_the_broker_is_and_what_it_saw(tmp_path: Path, servers: list[BrokerServer]) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main.run_broker(job(tmp_path), b'{"k": 1}')))
    thread.start()
    with BrokerClient(address_of(tmp_path), deadline_s=60) as learner:
        assert json.loads((tmp_path / "broker.json").read_text())["pid"] == os.getpid()
        learner.attach(LearnerReport(7, 1, "starting", 0))
        learner.offer([Task(0, b"{}", 0, 4)])
        assert learner.status().run.config == b'{"k": 1}'
        with pytest.raises(UsageError, match="already has a broker"):
            main.run_broker(job(tmp_path), b"")
        with pytest.raises(UsageError, match="is in use"):
            main.run_broker(job(tmp_path / "other", address=learner.status().address), b"")
    servers[0].stop()
    thread.join(60)
    assert codes == [0]
    assert not (tmp_path / "broker.json").exists()
    ledger = msgspec.json.decode((tmp_path / "ledger.json").read_bytes(), type=list[LedgerEntry])
    assert [(e.serial, e.state) for e in ledger] == [(0, "pending")]
    status = msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=BrokerStatus)
    assert status.learner == LearnerReport(7, 1, "starting", 0)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["kind"] for e in events] == ["learner_attached"]


def test_what_was_committed_is_on_disk_at_once(tmp_path: Path) -> None:
    run = main.run_info(job(tmp_path), b"")
    state = new_state(run)
    snapshots = StatusFiles(tmp_path, state)
    state.offer([Task(serial, b"{}", 0, 4) for serial in range(run.groups_per_step)])
    state.register(NodeReport("n0", 1, "host", "generating", 0))
    for lease in state.lease("n0", 0, run.groups_per_step):
        state.complete("n0", lease.token, GroupMeta(0, 0, 0.5, 4), b"group", 5)
    state.take(0, run.groups_per_step)
    snapshots.tick()
    state.commit(0)
    snapshots.tick()  # much sooner than the next snapshot is due
    ledger = msgspec.json.decode((tmp_path / "ledger.json").read_bytes(), type=list[LedgerEntry])
    assert {entry.state for entry in ledger} == {"committed"}


def test_the_cost_of_snapshots_does_not_grow_with_the_number_of_commits(tmp_path: Path) -> None:
    now_s, written_at = 0.0, list[float]()

    class Slow(StatusFiles):
        def go_on(self, until: float, sync: bool = False) -> bool:
            nonlocal now_s
            written_at.append(now_s)
            now_s += 0.01
            return True

    state = new_state(main.run_info(job(tmp_path), b""))
    snapshots = Slow(tmp_path, state, lambda: now_s)
    for step in range(10_000):
        state.committed_step = step
        snapshots.tick()
        now_s += 0.01
    assert 0.01 * len(written_at) < 0.015 * now_s
    assert max(later - sooner for sooner, later in itertools.pairwise(written_at)) < 6


def test_the_server_looks_after_every_turn_whether_something_was_committed(tmp_path: Path) -> None:
    state = new_state(main.run_info(job(tmp_path), b""))
    turns: list[float] = []
    server = BrokerServer(state, "tcp://127.0.0.1:0", 1 << 20, lambda: turns.append(time.monotonic()))
    thread = threading.Thread(target=server.run)
    thread.start()
    with BrokerClient(server.address, deadline_s=60) as client:
        client.status()
        before, started = len(turns), time.monotonic()
        for _ in range(20):
            client.status()
        took_s = time.monotonic() - started
    server.stop()
    thread.join(60)
    assert len(turns) - before > 5 + 2 * took_s


def test_the_ledger_of_an_earlier_broker_is_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "ledger.json").write_text(f"[{number}]")
        keep_former_ledger(tmp_path)
        assert (tmp_path / f"ledger-{number}.json").read_text() == f"[{number}]"
    (tmp_path / "ledger.json").write_text("[]")
    keep_former_ledger(tmp_path)
    assert not (tmp_path / "ledger-3.json").exists()


def test_a_stale_broker_file_is_no_obstacle(tmp_path: Path) -> None:
    for content in (b"not json", msgspec.json.encode(BrokerFile(2**22 + 1, "tcp://127.0.0.1:9", 0.0))):
        (tmp_path / "broker.json").write_bytes(content)
        main.refuse_second_broker(tmp_path)


def test_the_broker_file_of_a_reused_process_id_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "ALIVE_CHECK_S", 0.2)
    file = BrokerFile(os.getpid(), "tcp://127.0.0.1:9", 0.0)
    (tmp_path / "broker.json").write_bytes(msgspec.json.encode(file))
    main.refuse_second_broker(tmp_path)


@pytest.mark.parametrize("mine", ["other keys", "no keys"])
def test_a_living_broker_with_other_keys_keeps_a_second_one_out(tmp_path: Path, mine: str) -> None:
    for name in ("keys", "other"):
        make(KeyFolder(tmp_path / name), ["a"])
    state = new_state(main.run_info(job(tmp_path), b""))
    server = BrokerServer(state, "tcp://127.0.0.1:0", 1 << 20, credentials=str(tmp_path / "keys"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        file = BrokerFile(os.getpid(), server.address, 0.0)
        (tmp_path / "broker.json").write_bytes(msgspec.json.encode(file))
        with pytest.raises(UsageError, match=r"already has a broker \(process \d+, tcp://.*does not talk to this one"):
            main.refuse_second_broker(tmp_path, str(tmp_path / "other") if mine == "other keys" else None)
    finally:
        server.stop()
        thread.join(60)
