"""The preflight's parts: the verdict from a report, the rounds of links, one link, and the exchange of values."""

import dataclasses
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from broker.sockets import bind_router
from common.errors import SlipstreamError, UsageError
from common.process.versions import INSTALL_BRIDGE
from launch.checks.findings import warning
from launch.checks.machine import look
from launch.checks.preflight import facts as links
from launch.checks.preflight import preflight
from launch.checks.preflight.facts import Facts, Link, LinkListener, facts_of, measure
from launch.checks.preflight.preflight import judge, verdict
from launch.checks.preflight.stages import Exchange, Report, examine, pass_on, rounds
from launch.cluster.interface import Interface
from launch.up.ranks import slurm_machines
from tests.rigs.configs import config_of, living_broker, refusal, write_job
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S

LOCAL = "127.0.0.1"
AGREE = {
    "config": {"run.seed": "1", "weights.transport": "gloo"},
    "versions": {"python": "3.11.7", "slipstream": "1", "torch": "2", "nccl": ""},
    "settings": {},
    "interface": {"loopback": "False", "MTU": "1500"},
}
NAMES = ("a", "b", "c")
SPEED = 1e8


def facts(name: str, role: str = "learner", **changes: dict[str, str]) -> Facts:
    """`changes` add to what must agree, by kind."""
    agree = {kind: {**values, **changes.get(kind, {})} for kind, values in AGREE.items()}
    return Facts(role, Interface("eth0", f"10.0.0.{ord(name)}"), 1, "", 0, agree, "/runs", {"/runs": 1e9}, [])


def link(source: str, target: str, **changes: Any) -> Link:
    return replace(Link(source, target, 1e-4, SPEED), **changes)


def report(*machines: Facts, **changes: Any) -> Report:
    """All is well on a, b and c; `machines` take the places of the last ones."""
    there = dict(zip(NAMES, [*map(facts, NAMES[: 3 - len(machines)]), *machines], strict=True))
    made = Report(there, [link(a, b) for pairs in rounds(NAMES) for a, b in pairs], "/runs/canary", [])
    made.reduced = {name: [5e7] for name in NAMES}
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def with_links(*others: Link) -> Report:
    """These take the places of the good ones between the same machines."""
    made = report()
    made.links = [next((o for o in others if (o.source, o.target) == (at.source, at.target)), at) for at in made.links]
    return made


def found(of: Report, *levels: str) -> list[str]:
    return [f"{finding.check} {finding.code}" for finding in judge(of) if finding.level in levels]


def test_a_report_without_faults_is_all_well() -> None:
    assert found(report(), "problem", "warning") == []
    assert verdict(judge(report())) == "all well"


def test_a_machine_alone_has_no_rates() -> None:
    alone = report()
    alone.machines = {"a": facts("a")}
    alone.links = []
    (line,) = [finding.what for finding in judge(alone) if finding.check == "machine"]
    assert "Mbit/s" not in line and "writes" in line


@pytest.mark.parametrize(
    ("of", "named", "what"),
    [
        (report(facts("c", versions={"torch": "3"})), "versions torch", "torch: 2 on a, b; 3 on c"),
        (report(facts("c", "rollout", versions={"slipstream": "2"})), "versions slipstream", "1 on a, b; 2 on c"),
        (report(facts("c", settings={"NCCL_ALGO": "Ring"})), "settings NCCL_ALGO", "none on a, b; Ring on c"),
        (report(facts("c", config={"run.seed": "2"})), "config run.seed", "1 on a, b; 2 on c"),
        (report(facts("c", interface={"loopback": "True"})), "interface loopback", "False on a, b; True on c"),
        (report(lost={"b": "it ended"}), "machine lost", "b left early: it ended"),
        (report(blind=["c"]), "shared folder not_shared", "on c"),
        (report(canary="", blind=["a", "b", "c"]), "shared folder unwritable", ""),
        (report(reduced={"a": "timed out", "b": "timed out", "c": [5e7]}), "all-reduce failed", "a, b: timed out"),
        (with_links(link("b", "c", bytes_per_s=4e7)), "links slow", "b to c: 320 Mbit/s"),
        (with_links(link("b", "c", latency_s=0.0, error="refused")), "links broken", "b to c: refused"),
        (with_links(link("b", "c", error="late")), "links stalls", "b to c: "),
    ],
)
def test_each_fault_is_named_with_its_machines(of: Report, named: str, what: str) -> None:
    (only,) = [finding for finding in judge(of) if finding.level == "problem"]
    assert f"{only.check} {only.code}" == named and what in only.what
    assert verdict(judge(of)) == f"1 to repair; {only.check}: {only.what}"


@pytest.mark.parametrize("wrong", NAMES)
def test_a_clock_that_is_off_by_more_than_a_second_is_named(wrong: str) -> None:
    ahead = {name: 3.0 * (name == wrong) for name in NAMES}
    skewed = report()
    skewed.links = [replace(at, ahead_s=ahead[at.target] - ahead[at.source]) for at in skewed.links]
    assert found(skewed, "problem") == ["clock skewed"]
    assert f"{wrong} is" in verdict(judge(skewed)) and "+3.0 s" in verdict(judge(skewed))


SLOW_DISK = warning("fsync", "slow", "70 ms", why="it is slow", fix="another disk")


@pytest.mark.parametrize(
    ("of", "named"),
    [
        (report(facts("c", interface={"MTU": "9000"})), "interface MTU"),
        (report(facts("c", versions={"torch": ""}), reduced={}), "all-reduce no_torch"),
        (report(links=[link("a", "b")]), "links unmeasured"),
        (report(*[replace(facts(n), findings=[SLOW_DISK]) for n in "bc"]), "fsync slow"),
    ],
)
def test_what_may_be_meant_or_does_little_harm_is_a_warning(of: Report, named: str) -> None:
    assert named in found(of, "warning")


def test_roles_may_have_other_versions_unless_nccl_joins_them() -> None:
    other = {"versions": {"torch": "3", "nccl": "2.29"}}
    assert found(report(facts("c", "rollout", **other), blind=[]), "problem", "warning") == []
    nccl = {"weights.transport": "nccl"}
    machines = [facts(name, config=nccl) for name in "ab"]
    joined = report(*machines, facts("c", "rollout", config=nccl, **other))
    assert found(joined, "problem") == ["versions nccl"]
    assert found(report(*machines, facts("c", "broker", config=nccl, **other)), "problem") == []


# ---------------------------------------------------------------- rounds and links


@pytest.mark.parametrize("count", [1, 2, 3, 8, 63, 64])
def test_every_ordered_pair_meets_once_and_no_machine_is_in_two_pairs_of_a_round(count: int) -> None:
    names = [f"h{i}" for i in range(count)]
    plan = [*rounds(names)]
    met = [pair for pairs in plan for pair in pairs]
    assert sorted(met) == sorted((a, b) for a in names for b in names if a != b)
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in plan)
    assert len(plan) == 2 * (count - 1 + count % 2)


def test_a_link_has_a_latency_a_bandwidth_and_the_other_clock() -> None:
    target = LinkListener(LOCAL)
    measured = measure("a", LOCAL, "b", (LOCAL, target.port), target.token, 0.1)
    assert measured.error == ""
    assert 0 < measured.latency_s < 1
    assert measured.bytes_per_s > 1e6
    assert abs(measured.ahead_s) < 1


def test_a_link_is_refused_without_the_token_and_without_a_listener() -> None:
    target = LinkListener(LOCAL)
    assert "closed" in measure("a", LOCAL, "b", (LOCAL, target.port), "0" * 32, 0.1).error
    with socket.create_server((LOCAL, 0)) as free:
        port = free.getsockname()[1]
    assert "refused" in measure("a", LOCAL, "b", (LOCAL, port), target.token, 0.1).error


def test_a_link_that_swallows_large_packets_stalls_with_a_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STALL_S", 0.3)
    with socket.create_server((LOCAL, 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer_pings_only() -> socket.socket:
            connection, _ = listener.accept()
            connection.recv(links.HEAD.size, socket.MSG_WAITALL)
            for _ in range(links.PINGS):
                connection.recv(len(links.PING), socket.MSG_WAITALL)
                connection.sendall(links.FIGURE.pack(0.0))
            return connection

        other = pool.submit(answer_pings_only)
        measured = measure("a", LOCAL, "b", (LOCAL, listener.getsockname()[1]), "0" * 32, 0.1)
        other.result().close()
    assert measured.latency_s > 0
    assert "timed out" in measured.error


# ---------------------------------------------------------------- the exchange


@contextmanager
def meeting(machines: int, wait_s: float = LIMIT_S) -> Iterator[Any]:
    """A meeting host; gives a function from a name to that machine's connection."""
    stop, sockets = threading.Event(), list[Any]()
    with zmq.Context[Any]() as context:
        router = bind_router(context, [f"tcp://{LOCAL}:0"], 1 << 20)
        router.setsockopt(zmq.ROUTER_HANDOVER, 0)
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        hub = threading.Thread(target=pass_on, args=(router, machines, wait_s, stop))
        hub.start()

        def join(name: str) -> Any:
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, os.fsencode(name))
            dealer.connect(address)
            sockets.append(dealer)
            return dealer

        try:
            yield join
        finally:
            stop.set()
            hub.join()
            for dealer in sockets:
                dealer.close(linger=0)


def test_everybody_gets_all_values_and_a_silent_machine_is_lost() -> None:
    with meeting(3) as join, ThreadPoolExecutor(3) as pool:
        a, b, c = (Exchange(join(name)) for name in NAMES)
        results = [pool.submit(one, i, int, LIMIT_S) for i, one in enumerate((a, b, c))]
        assert [result.result() for result in results] == [{"a": 0, "b": 1, "c": 2}] * 3
        results = [pool.submit(one, "here", str, 0.3) for one in (a, b)]
        assert [result.result() for result in results] == [{"a": "here", "b": "here"}] * 2
        assert [*a.lost] == [*b.lost] == ["c"]
        assert a.elapsed_s == b.elapsed_s > 0
        with refused(SlipstreamError, "c takes"):
            c("late", str, LIMIT_S)
        with refused(UsageError, "d takes", "3 machines"):
            Exchange(join("d"))(0, int, LIMIT_S)


def test_a_stray_message_harms_nobody() -> None:
    with meeting(1) as join:
        for name in ("a", "\udcff"):
            join(name).send(b"what a node of another job says")
        assert Exchange(join("b"))(1, int, LIMIT_S) == {"b": 1}


def test_the_broker_of_a_job_is_told_from_a_preflight(tmp_path: Path) -> None:
    with (
        living_broker(config_of(tmp_path / "run")) as server,
        zmq.Context[Any]() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.connect(server.address)
        with refused(UsageError, "job's broker", "--meet"):
            Exchange(dealer)(0, int, LIMIT_S)


def test_too_few_machines_are_named_after_the_wait() -> None:
    with meeting(3, wait_s=0.5) as join, ThreadPoolExecutor(2) as pool:
        results = [pool.submit(Exchange(join(name)), 0, int, LIMIT_S) for name in "ab"]
        for result in results:
            with refused(UsageError, "2 of 3", "0.5 s: a, b"):
                result.result()


@pytest.mark.slow
def test_machines_examine_each_other_to_the_same_report(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    with meeting(2) as join, ThreadPoolExecutor(2) as pool:

        def take_part(name: str) -> Report:
            own = facts_of(config, "learner", f"tcp://{LOCAL}:1")
            own.agree["versions"]["torch"] = ""  # the all-reduce is for tests with processes
            return examine(name, own, Exchange(join(name)), LIMIT_S)

        running: list[Future[Report]] = [pool.submit(take_part, name) for name in "ab"]
        one, two = (each.result() for each in running)
    assert judge(one) == judge(two)
    assert len(one.links) == 2
    assert one.canary.startswith(f"{tmp_path}/.preflight-")
    assert one.blind == []
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_learner_machine_with_the_extra_alone_is_told_to_install_the_bridge(tmp_path: Path, monkeypatch) -> None:
    machine = look()
    alone = {name: version for name, version in machine.packages.items() if name != "megatron-bridge"}
    monkeypatch.setattr("launch.checks.preflight.facts.look", lambda: dataclasses.replace(machine, packages=alone))
    config = config_of(tmp_path / "run")
    found = {role: facts_of(config, role, f"tcp://{LOCAL}:1").findings for role in ("learner", "rollout")}
    assert [one.fix for one in found["learner"] if one.check == "packages"] == [INSTALL_BRIDGE]
    assert not [one for one in found["rollout"] if one.check == "packages"]


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "tcp://0.0.0.0:5555", "ipc:///run/socket"])
def test_an_address_that_others_cannot_connect_to_is_refused(address: str) -> None:
    with refused(UsageError, "broker.address: expected", "all of 2", "--meet"):
        preflight.meeting_address(address, 2)


def test_a_number_that_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "preflight", str(write_job(tmp_path)), "--machines", "-1")
    assert "--machines -1" in said


def test_a_step_of_slurm_says_how_many_machines_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for tasks, machines in (("3", 3), ("1", 0), ("", 0)):
        monkeypatch.setenv("SLURM_STEP_NUM_NODES", "3")
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
        assert slurm_machines() == machines


@pytest.mark.slow
def test_a_port_in_use_is_a_job_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((LOCAL, 0)) as job:
        config = write_job(tmp_path, broker={"address": f"tcp://{LOCAL}:{job.getsockname()[1]}"})
        assert "preflight?)" in refusal(capsys, "preflight", str(config))
