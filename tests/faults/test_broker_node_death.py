"""Real broker, node and learner processes; nodes and learners are killed with SIGKILL at bad moments."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.client import BrokerClient

PROGRAM = Path(__file__).with_name("broker_processes.py")
LEASE_S = 1.0


class Processes:
    """Starts the roles of one run and kills what is left at the end."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        with (self.run_dir / f"{arguments[0]}-{len(self.running)}.log").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
            command = [sys.executable, str(PROGRAM), *arguments]
            self.running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return self.running[-1]

    def broker(self) -> tuple["subprocess.Popen[bytes]", str]:
        process = self.start("broker", str(self.run_dir), str(LEASE_S))
        path = self.run_dir / "broker.json"
        eventually(path.exists)
        return process, json.loads(path.read_text())["address"]

    def kill_all(self) -> None:
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait(10)


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)
    return value


def leases_of(observer: BrokerClient, name: str) -> int:
    return sum(n.leases for n in observer.status().nodes if n.report.node_id == name)


def trained(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "learner.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{"step": x["step"], "groups": [json.loads(p) for p in x["payloads"]]} for x in map(json.loads, lines)]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.kill_all()


def test_nodes_killed_in_the_middle_of_leases_lose_no_task(processes: Processes) -> None:
    steps = 39
    broker, address = processes.broker()
    learner = processes.start("learner", address, str(processes.run_dir), str(steps))
    names = ["n0", "n1", "n2"]
    nodes = {name: processes.start("node", address, name, "0.4") for name in names}
    rng = random.Random(0)
    with BrokerClient(address, deadline_s=10) as observer:
        for kill in range(4):
            victim = names[kill % 2]
            eventually(lambda name=victim: leases_of(observer, name) > 0)
            nodes[victim].send_signal(signal.SIGKILL)
            nodes[victim].wait(10)
            if kill < 2:  # under the old name, whose leases go back at once; later under a new one
                nodes[victim] = processes.start("node", address, victim, "0.4")
            else:
                nodes[f"later{kill}"] = processes.start("node", address, f"later{kill}", "0.4")
            time.sleep(rng.uniform(0, 0.3))
        assert learner.wait(60) == 0
        status, ledger = observer.status(), observer.ledger()
    assert status.lease_expiries > 0, "a kill must have hit a lease"
    assert (status.groups_dead, status.groups_committed) == (0, steps * 4)
    records = trained(processes.run_dir)
    assert [r["step"] for r in records] == list(range(steps))
    serials = [serial for r in records for serial, _ in r["groups"]]
    assert len(set(serials)) == len(serials) == steps * 4, "each group in exactly one step"
    assert [e.serial for e in ledger] == list(range((steps + 3) * 4)), "no task lost"
    in_steps = {serial: r["step"] for r in records for serial, _ in r["groups"]}
    assert {e.serial: e.step for e in ledger if e.state == "committed"} == in_steps
    assert any(e.attempts > 1 and e.state == "committed" for e in ledger)
    broker.send_signal(signal.SIGTERM)
    assert broker.wait(10) == 0
    final = json.loads((processes.run_dir / "ledger.json").read_text())
    assert sum(e["state"] == "committed" for e in final) == steps * 4


def test_a_learner_killed_between_take_and_commit_gets_the_same_groups_again(processes: Processes) -> None:
    steps = 12
    _, address = processes.broker()
    processes.start("node", address, "n0", "0.02")
    learner = processes.start("learner", address, str(processes.run_dir), str(steps))
    for stop_after in (2, 6, 9):
        eventually(lambda n=stop_after: len(trained(processes.run_dir)) >= n)
        assert learner.poll() is None
        learner.send_signal(signal.SIGKILL)
        learner.wait(10)
        learner = processes.start("learner", address, str(processes.run_dir), str(steps))
    assert learner.wait(60) == 0
    records = trained(processes.run_dir)
    assert len(records) > steps, "some steps were replayed"
    by_step: dict[int, list[list[Any]]] = {}
    for record in records:
        assert by_step.setdefault(record["step"], record["groups"]) == record["groups"], "same groups, same order"
    serials = [serial for groups in by_step.values() for serial, _ in groups]
    assert sorted(by_step) == list(range(steps))
    assert len(set(serials)) == len(serials) == steps * 4


def test_sigkilled_broker_leaves_a_readable_ledger_and_a_new_one_may_start(processes: Processes) -> None:
    broker, address = processes.broker()
    with BrokerClient(address, deadline_s=10) as observer:
        assert observer.status().groups_ready == 0
    eventually((processes.run_dir / "ledger.json").exists)
    broker.send_signal(signal.SIGKILL)
    broker.wait(10)
    assert json.loads((processes.run_dir / "ledger.json").read_text()) == []
    assert (processes.run_dir / "broker.json").exists()
    again = processes.start("broker", str(processes.run_dir), str(LEASE_S))
    eventually(lambda: json.loads((processes.run_dir / "broker.json").read_text())["pid"] == again.pid)


def test_a_second_broker_for_the_same_run_is_refused(processes: Processes) -> None:
    _, address = processes.broker()
    second = processes.start("broker", str(processes.run_dir), str(LEASE_S))
    assert second.wait(30) != 0
    assert "already has a broker" in (processes.run_dir / "broker-1.log").read_text()
    with BrokerClient(address, deadline_s=10) as observer:
        assert observer.status().address == address
