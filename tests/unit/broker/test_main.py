"""The broker process: what it leaves in the run directory, and how it ends."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import cast

import msgspec
import pytest

from broker import main
from broker.contract import BrokerStatus, LearnerReport, LedgerEntry
from broker.journal.recovery import OpenedState
from broker.journal.run_folder import RunFolder
from broker.server.server import BrokerServer
from common import json_lines
from common.errors import UsageError
from common.process.run_dir import BrokerFile, RunDir
from common.security.credentials import KeyFolder
from launch.keys import make
from learner.loop.run_files import RunFiles
from tests.rigs.brokers import job, new_state, serving, tasks
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S
from tests.unit.broker.conftest import Running


def test_a_run_directory_tells_where_the_broker_is_and_what_it_saw(tmp_path: Path, running: Running) -> None:
    with running(job(tmp_path)) as broker, broker.client() as learner:
        assert json.loads((tmp_path / "broker.json").read_text())["pid"] == os.getpid()
        learner.attach(LearnerReport(7, 1, "starting", 0))
        learner.offer(tasks(1))
        assert learner.status().run.config == b'{"k": 1}'
        with refused(UsageError, "run.dir", f"process {os.getpid()}", broker.address):
            main.run_broker(job(tmp_path), b"")
        with refused(UsageError, "broker.address", broker.address):
            main.run_broker(job(tmp_path / "other", address=broker.address), b"")
    assert not (tmp_path / "broker.json").exists()
    ledger = msgspec.json.decode((tmp_path / "ledger.json").read_bytes(), type=list[LedgerEntry])
    assert [(e.serial, e.state) for e in ledger] == [(0, "pending")]
    status = msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=BrokerStatus)
    assert status.learner == LearnerReport(7, 1, "starting", 0)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["kind"] for e in events] == ["learner_attached"]


@pytest.mark.parametrize("durability", ["memory", "fsync"])
def test_a_run_keeps_its_id_over_restarts_of_its_broker_and_one_that_starts_over_gets_another(
    tmp_path: Path, running: Running, durability: str
) -> None:
    def served() -> str:
        with running(job(tmp_path / "run", durability=durability)) as broker, broker.client() as client:
            return client.status().run.run_id

    first = served()
    assert served() == first != ""
    shutil.rmtree(tmp_path / "run")
    assert served() not in ("", first)


def test_a_closed_terminal_stops_the_broker_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # also where pytest has nohup's
    server = Stopped()
    with main.stopping_on_signals(cast("BrokerServer", server)):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
    assert server.times == 2


class Stopped:
    times = 0

    def stop(self) -> None:
        self.times += 1


def test_the_ledger_of_an_earlier_broker_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, None)
    for ledger in ("[1]", "[2]", "[]"):
        (tmp_path / "ledger.json").write_text(ledger)
        folder.begin(OpenedState(new_state()), "tcp://127.0.0.1:9")
    folder.close()
    assert [path.read_text() for path in sorted(tmp_path.glob("ledger-*"))] == ["[1]", "[2]"]


def write_broker_file(folder: Path, pid: int, address: str = "tcp://127.0.0.1:9") -> None:
    (folder / "broker.json").write_bytes(msgspec.json.encode(BrokerFile(pid, address, 0.0)))


def test_events_of_another_user_are_refused_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(json_lines.os, "open", denied)
    for opened in (lambda: RunFolder(tmp_path, None), lambda: RunFiles(job(tmp_path), RunDir(tmp_path))):
        with refused(UsageError, "run.dir", str(tmp_path), "Permission denied"):
            opened()


def test_a_stale_broker_file_and_one_of_a_reused_process_id_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broker.json").write_bytes(b"not json")
    main.refuse_second_broker(tmp_path)
    write_broker_file(tmp_path, 2**22 + 1)
    main.refuse_second_broker(tmp_path)
    monkeypatch.setattr(main, "ALIVE_CHECK_S", 0.2)
    write_broker_file(tmp_path, os.getpid())
    main.refuse_second_broker(tmp_path)


@pytest.mark.parametrize("mine", ["other keys", "no keys"])
def test_a_living_broker_with_other_keys_keeps_a_second_one_out(
    tmp_path: Path, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "ALIVE_CHECK_S", LIMIT_S)  # on a busy machine the refusal may take long
    for name in ("keys", "other"):
        make(KeyFolder(tmp_path / name), ["a"])
    with serving(credentials=str(tmp_path / "keys")) as server, refused(UsageError, "run.dir", "broker.json") as caught:
        write_broker_file(tmp_path, os.getpid(), server.address)
        main.refuse_second_broker(tmp_path, str(tmp_path / "other") if mine == "other keys" else None)
    assert f"process {os.getpid()}, {server.address}" in str(caught.value)
