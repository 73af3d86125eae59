"""The supervisor, on small real processes."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from common.process.lifecycle import alive
from launch.up import supervisor as module
from launch.up.devices import plan_cores
from launch.up.supervisor import RoleSpec, Supervisor, describe_exit
from tests.rigs.waiting import until

WAIT_S = 120.0
DRAINING = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], 'a').write(sys.argv[2] + '\\n'), sys.exit(0)))\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)\n"
)
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)\n"
)
PARENT = (
    "import subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "print(p.pid, flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.fixture
def events() -> list[tuple[str, dict]]:
    return []


@pytest.fixture
def supervisor(events):
    made = Supervisor(lambda kind, detail: events.append((kind, dict(detail))))
    yield made
    made.kill_all()


def spec(tmp_path: Path, name: str, code: str, *words: str, **options) -> RoleSpec:
    return RoleSpec(name, [sys.executable, "-c", code, *words], tmp_path / f"{name}.log", **options)


def printed(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def kinds(events) -> list[str]:
    return [kind for kind, _ in events]


def test_output_goes_to_the_log_and_success_is_no_crash(supervisor, tmp_path, events):
    role = supervisor.start(
        spec(tmp_path, "a", "import sys; print('out'); print('err', file=sys.stderr)", max_restarts=3)
    )
    until(lambda: not role.running, check=supervisor.poll)
    assert role.exit_code == 0
    assert sorted(printed(tmp_path / "a.log").split()) == ["err", "out"]
    assert kinds(events) == ["started", "ended"]


def test_crashed_role_is_restarted_until_it_works(supervisor, tmp_path, events, monkeypatch):
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.05)
    code = (
        "import os, sys, time; path = sys.argv[1]; n = len(open(path).read()) if os.path.exists(path) else 0\n"
        "open(path, 'a').write('x')\n"
        "if n < 2: os.kill(os.getpid(), 9)\n"
        "print('up', flush=True); time.sleep(60)"
    )
    role = supervisor.start(spec(tmp_path, "a", code, str(tmp_path / "count"), max_restarts=3))
    until(lambda: "up" in printed(tmp_path / "a.log"), check=supervisor.poll)
    assert role.restarts == 2
    assert kinds(events) == ["started", "crashed", "restarted", "crashed", "restarted"]
    assert events[1][1]["exit_code"] == -9


def test_role_that_keeps_crashing_or_would_fail_again_is_given_up(supervisor, tmp_path, events, monkeypatch):
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.02)
    role = supervisor.start(spec(tmp_path, "a", "raise SystemExit(4)", max_restarts=2))
    ended = until(supervisor.poll)
    assert ended == [role]
    assert (role.restarts, role.exit_code) == (2, 4)
    assert kinds(events).count("restarted") == 2
    assert kinds(events)[-1] == "gave_up"
    assert supervisor.poll() == []  # said once
    for code in (2, 3):  # they would fail again
        role = supervisor.start(spec(tmp_path, "b", f"raise SystemExit({code})", max_restarts=5))
        assert until(supervisor.poll) == [role]
        assert role.restarts == 0


def test_stop_lets_roles_drain_in_the_order_asked_for_and_kills_one_that_does_not(supervisor, tmp_path, events):
    record = tmp_path / "order"
    for name in ("broker", "learner", "node"):
        supervisor.start(spec(tmp_path, name, DRAINING, str(record), name))
    until(lambda: all("ready" in printed(tmp_path / f"{n}.log") for n in ("broker", "learner", "node")))
    assert supervisor.stop(["node", "learner"], WAIT_S) == []
    assert sorted(record.read_text().split()) == ["learner", "node"]
    assert supervisor.roles["broker"].running
    assert supervisor.stop(["broker"], WAIT_S) == []
    assert record.read_text().split()[-1] == "broker"
    assert [r.exit_code for r in supervisor.roles.values()] == [0, 0, 0]
    stubborn = supervisor.start(spec(tmp_path, "stubborn", STUBBORN))
    until(lambda: "ready" in printed(tmp_path / "stubborn.log"))
    assert supervisor.stop(["stubborn"], 0.2) == ["stubborn"]
    assert (stubborn.exit_code, kinds(events)[-1]) == (-signal.SIGKILL, "killed")


def test_crash_while_stopping_is_not_restarted_and_a_terminals_interrupt_reaches_no_role(supervisor, tmp_path):
    role = supervisor.start(spec(tmp_path, "a", "import time; time.sleep(60)", max_restarts=3))
    assert os.getpgid(role.pid) == role.pid != os.getpgid(0)
    supervisor.stop(["a"], WAIT_S)
    supervisor.poll()
    assert role.exit_code == -signal.SIGTERM
    assert role.restarts == 0
    assert not role.running


def test_children_die_with_a_killed_role_and_kill_all_leaves_nothing(supervisor, tmp_path):
    roles = [supervisor.start(spec(tmp_path, name, PARENT)) for name in ("a", "b", "c")]
    children = [int(until(lambda r=role: printed(tmp_path / f"{r.spec.name}.log").strip())) for role in roles]
    module.scan(roles)
    roles[1].descendants[children[1]]._ident = (children[1], 0.0)  # an earlier process had its child's pid
    module.scan(roles)
    os.kill(roles[0].pid, signal.SIGKILL)
    until(lambda: not roles[0].running, check=supervisor.poll)
    until(lambda: not alive(children[0]))
    supervisor.kill_all()
    assert not any(role.running for role in roles)
    until(lambda: not any(alive(child) for child in children))


def test_scans_of_many_processes_leave_time_for_the_roles(supervisor, monkeypatch):
    scans = []

    def slow(roles):
        scans.append(time.thread_time())
        while time.thread_time() < scans[-1] + 0.05:
            pass

    monkeypatch.setattr(module, "scan", slow)
    monkeypatch.setattr(module, "SCAN_EVERY_S", 0.01)
    ends = time.monotonic() + 0.5
    while time.monotonic() < ends:
        supervisor.poll()
        time.sleep(0.02)
    assert len(scans) == 1


def test_cores_bind_a_role_and_child_cores_its_children(supervisor, tmp_path):
    core = min(os.sched_getaffinity(0))
    bound = supervisor.start(spec(tmp_path, "a", "import time; time.sleep(60)", cores=frozenset({core})))
    assert os.sched_getaffinity(bound.pid) == {core}
    free = supervisor.start(spec(tmp_path, "b", PARENT, child_cores=frozenset({core})))
    child = int(until(lambda: printed(tmp_path / "b.log").strip()))
    module.scan([bound, free])
    assert os.sched_getaffinity(child) == {core}
    assert os.sched_getaffinity(free.pid) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("cores", "learner", "nodes", "expected"),
    [
        ([0, 1], 1, [1], [{0}, {1}]),
        ([2, 5, 7, 9], 2, [1, 1], [{2, 5}, {7}, {9}]),
        ([0, 1], 1, [1, 1], [None, None, None]),
        ([0], 1, [1], [None, None]),
        ([0, 1], 1, [], [None]),
        (list(range(64)), 1, [1], [None, None]),
    ],
)
def test_cores_are_given_out_only_when_everyone_fits(cores, learner, nodes, expected):
    assert plan_cores(cores, learner, nodes) == expected


@pytest.mark.parametrize(("code", "expected"), [(-9, "killed by SIGKILL"), (1, "exit code 1"), (None, "still running")])
def test_an_exit_is_described(code: int | None, expected: str) -> None:
    assert describe_exit(code) == expected
