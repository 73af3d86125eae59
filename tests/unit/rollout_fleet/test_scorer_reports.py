"""A scorer and the broker of its run, as processes and with keys. vLLM is replaced."""

import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.contract import ServiceStatus
from broker.server.server import BrokerServer
from common.security.credentials import KeyFolder
from launch.cli import main
from launch.keys import make
from rollout_fleet.scorers import reports
from rollout_fleet.scorers.reports import Reports
from tests.rigs.brokers import new_state, run_info, serving
from tests.rigs.configs import json_of, refusal, run_cli, write_job
from tests.rigs.processes import Command, Process
from tests.rigs.redis_servers import free_port
from tests.rigs.waiting import until
from tests.unit.rollout_fleet.test_scorer_server import HEALTHY

ROLE = """
import sys
from launch.cli import run
from rollout_fleet.scorers import server
server.command = lambda scorer, host, port, **_: [sys.executable, "-c", HEALTHY, str(port)]
server.on_cpu = lambda: True
run()
"""


def write(folder: Path, **broker: object) -> Path:
    url = f"http://127.0.0.1:{free_port()}/v1"
    judge = {"url": url, "model": "m", "prompt": "{completion}", "verdict": "(.*)"}
    reward = {"environment": None, "reward": [{"scorer": "judge"}]}
    return write_job(folder, tasks=reward, scorers={"judge": judge}, broker={"durability": "memory", **broker})


def scorer(folder: Path, job: Path, *words: str) -> Process:
    command = [sys.executable, "-c", f"HEALTHY = {HEALTHY!r}{ROLE}", "scorer", str(job), "judge", *words]
    return Process(folder / "scorer.out", command)


def services(run: Path) -> list[dict[str, object]]:
    asked = run_cli("status", str(run), "--json")
    seen = json.loads(asked.stdout) if asked.returncode == 0 else None
    return seen["broker"]["services"] if seen and seen["live"] else []


def states(run: Path) -> list[object]:
    return [service["state"] for service in services(run)]


@pytest.mark.slow
def test_a_stop_ends_the_scorer_with_the_broker_and_until_then_it_is_in_status_and_logs(tmp_path: Path, capsys) -> None:
    job, run = write(tmp_path), tmp_path / "run"
    with Command(tmp_path, "broker", "broker", str(job)) as broker, scorer(tmp_path, job) as role:
        until(lambda: states(run) == ["serving"], told=lambda: role.output() + broker.output(), every_s=0.2)
        seen = json_of(capsys, "status", str(run))
        (judge,) = seen["broker"]["services"]
        assert (judge["name"], judge["pid"], judge["kind"]) == ("scorer-judge", role.process.pid, "scorer")
        assert (seen["nodes"], [stall["kind"] for stall in seen["stalls"]]) == ([], ["no_learner"])
        assert main(["status", str(run)]) == 0
        assert {"scorer-judge", "serving"} <= {*capsys.readouterr().out.split()}
        assert main(["logs", str(run), "scorer-judge"]) == 0
        assert "reports to the broker" in capsys.readouterr().out
        stopped = run_cli("stop", str(run))
        assert (stopped.returncode, role.wait(), broker.wait()) == (0, 0, 0), role.output() + broker.output()
        assert "waiting for scorer-judge" in stopped.stdout
        assert "drains: slipstream stop" in role.output()
    assert (run / "logs" / "vllm-judge.log").read_text() == "drained\n"


@pytest.mark.slow
def test_a_broker_may_start_later_be_killed_and_come_back_elsewhere(tmp_path: Path) -> None:
    job, run = write(tmp_path), tmp_path / "run"
    with scorer(tmp_path, job) as role:
        until(lambda: "is served" in role.output(), told=role.output)
        assert "no broker of this run is known" in role.output()
        for times in (2, 3):
            with Command(tmp_path, "broker", "broker", str(job)) as broker:
                until(lambda: states(run) == ["serving"], told=role.output, every_s=0.2)
                broker.signal(signal.SIGKILL)
                broker.wait()
            until(lambda: role.output().count("no broker of this run is known") == times, told=role.output)  # noqa: B023
        role.drain()
    assert role.output().count("reports to the broker") == 2


# ---------------------------------------------------------------- a broker in a thread


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    make(folder, ["a", "b"])
    return folder


@contextmanager
def reporting(server: BrokerServer, log: Path, **more: object) -> Iterator[threading.Event]:
    """The reports of a judge that serves; yields what an order to stop sets."""
    stopped = threading.Event()
    judge = Reports("judge", "http://h:1/v1", log, lambda: server.address, **more)  # type: ignore[arg-type]
    with judge.running(stopped.set):
        judge.say(state="serving")
        yield stopped


def known(server: BrokerServer) -> list[ServiceStatus]:
    return server._state.services.status(server._state.clock())


def test_with_keys_it_uses_a_nodes_and_its_name_begins_as_a_node_id_does(tmp_path: Path, keys: KeyFolder) -> None:
    with serving(credentials=str(keys.path)) as server:
        for credentials in (keys.path, keys.nodes / "b.json"):
            with reporting(server, tmp_path / "log", credentials=str(credentials)) as stopped:
                until(lambda: [service.state for service in known(server)] == ["serving"])
                assert known(server)[0].name == ("b" if credentials.is_file() else "a") + ":scorer-judge"
                assert not stopped.is_set()
            assert known(server) == [], "it has said that it leaves"


def test_a_refused_key_is_logged_once_and_tried_again(
    tmp_path: Path, keys: KeyFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(KeyFolder(tmp_path / "other"), ["a"])
    turns = list[int]()
    monkeypatch.setattr(reports, "ANSWER_S", 0.5)
    monkeypatch.setattr(reports, "REFUSED_S", 0.0)
    monkeypatch.setattr(Reports, "_disconnect", lambda self, real=Reports._disconnect: (turns.append(0), real(self)))
    caplog.set_level(logging.INFO)
    with serving(credentials=str(keys.path)) as server:
        wrong = (str(tmp_path / "other"), str(keys.learner))  # the keys of another job, those of another role
        for credentials in wrong:
            turns.clear()
            with reporting(server, tmp_path / "log", credentials=credentials):
                until(lambda: len(turns) > 3)
        assert known(server) == []
    said = [record.getMessage() for record in caplog.records if "does not take" in record.getMessage()]
    assert len(said) == len(wrong)
    assert "this key" in said[0] and "credential of a learner" in said[1]


def test_it_reports_to_no_other_run_that_has_the_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(state=new_state(run_info(name="second"))) as server:
        with reporting(server, tmp_path / "log", run="first"):
            until(lambda: "'second'" in caplog.text)
        assert known(server) == []


@pytest.mark.slow
def test_it_joins_the_broker_that_it_is_given_with_the_key_that_it_is_given(tmp_path: Path, keys: KeyFolder) -> None:
    with serving(state=new_state(run_info(name="far")), credentials=str(keys.path)) as server:
        words = ["--join", server.address, "--credentials", str(keys.nodes / "a.json")]
        with scorer(tmp_path, write(tmp_path), *words) as role:
            until(lambda: [service.name for service in known(server)] == ["a:scorer-judge"], told=role.output)
            server._state.stopping = True
            assert role.wait() == 0, role.output()
        assert known(server) == []


def test_the_command_refuses_an_address_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--join" in refusal(capsys, "scorer", str(write(tmp_path)), "judge", "--join", "h:1")
