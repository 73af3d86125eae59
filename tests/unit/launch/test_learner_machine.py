"""The loop of one machine of the learner, on a clock and with a broker that the tests set; its ranks are a process."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from broker.client.calls import LearnerBroker
from broker.contract import MachineReport, Member, RendezvousOrder
from broker.delivery.learner_machines import FENCE_S
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.process.run_dir import RunDir
from launch.cluster import interface
from launch.cluster.interface import NCCL, Interface, use_for_weights
from launch.up import learner_machine as module
from launch.up.learner_machine import ANSWER_S, REPORT_S, Launcher, SharedFolder
from learner.loop.run_files import write_record
from tests.rigs.brokers import job
from tests.rigs.refusals import refused

TRAIN = RendezvousOrder(1, [Member("m1", "h1", "a", "a:1")], active=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]

    def rest(launcher: Launcher, flag: object) -> None:
        now[0] += REPORT_S

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Launcher, "_rest", rest)
    monkeypatch.setattr(module, "rank_command", lambda *_: ["sleep", "600"])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield now
    for number, handler in before.items():
        signal.signal(number, handler)


def run(tmp_path: Path, gather: Callable[..., RendezvousOrder]) -> int:
    """The exit code of a launcher whose reports `gather` answers."""
    report = MachineReport("m1", "h1", "a", "a:1", {})
    client = cast(LearnerBroker, SimpleNamespace(gather=gather))
    with SharedFolder(tmp_path / "checkpoints", "m1") as shared:
        return Launcher(job(tmp_path), RunDir(tmp_path), client, shared, report).run("tcp://127.0.0.1:1")


def test_ranks_are_killed_a_fence_after_the_broker_last_heard_of_them_however_late_its_answer_was(
    tmp_path: Path, clock: list[float]
) -> None:
    heard: list[float] = []

    def gather(report: MachineReport, *_: object) -> RendezvousOrder:
        if heard and not report.running:
            return RendezvousOrder(exit_code=0)
        if len(heard) == 2:
            clock[0] += ANSWER_S
            raise BrokerUnreachable("cut")
        heard.append(clock[0])
        clock[0] += 0.9 * ANSWER_S
        return TRAIN

    assert run(tmp_path, gather) == 0
    assert clock[0] - heard[-1] <= FENCE_S + ANSWER_S + 2 * REPORT_S


def test_the_end_of_a_ranks_log_is_sent_when_a_rank_of_this_round_has_written_it(
    tmp_path: Path, clock: list[float]
) -> None:
    sent: list[tuple[str | None, int]] = []
    logs = RunDir(tmp_path).logs
    logs.mkdir()
    for rank in (3, 4):
        (logs / f"learner-{rank}.log").write_text("of an earlier round\n")

    def gather(report: MachineReport, log: str | None, rank: int) -> RendezvousOrder:
        sent.append((log, rank))
        if report.running and len(sent) == 2:
            with (logs / "learner-3.log").open("a") as file:
                file.write("resumed\n")
        return RendezvousOrder(exit_code=0) if len(sent) == 5 else msgspec.structs.replace(TRAIN, log_rank=len(sent))

    assert run(tmp_path, gather) == 0
    assert sent[:5] == [(None, -1), (None, 1), (None, 2), ("of an earlier round\nresumed", 3), (None, 4)]


def test_a_launcher_that_ends_says_that_its_ranks_have_ended(tmp_path: Path, clock: list[float]) -> None:
    reports: list[Any] = []

    def gather(report: MachineReport, *_: object) -> RendezvousOrder:
        reports.append(report)
        if len(reports) == 2:
            raise BrokerError("revoked")
        return TRAIN

    with refused(UsageError, "revoked"):
        run(tmp_path, gather)
    assert [(r.running, r.leaving, r.exit_code) for r in reports[1:]] == [(True, False, 0), (False, True, 1)]


@pytest.mark.parametrize(("fresh", "state"), [(True, "done"), (False, "")])
def test_a_launcher_says_how_the_learner_of_this_round_has_ended(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, fresh: bool, state: str
) -> None:
    folder, reports = RunDir(tmp_path), list[MachineReport]()
    write_record(folder, 0, "done", 7)  # by an earlier run

    def end(launcher: Launcher, flag: object) -> None:
        if fresh:
            write_record(folder, 1, "done", 9)
        launcher._ended(0)

    monkeypatch.setattr(Launcher, "_rest", end)

    def gather(report: MachineReport, *_: object) -> RendezvousOrder:
        reports.append(report)
        return TRAIN if len(reports) < 3 else RendezvousOrder(exit_code=0)

    assert run(tmp_path, gather) == 0
    assert reports[1].state == state


def test_collectives_keep_to_one_interface_by_its_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name is a prefix for NCCL: eth1 would be eth10, too. A choice of the caller stays, a key comes first."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv(NCCL, raising=False)
    eth1, chosen = Interface("eth1", "10.0.0.1"), list[str]()
    for named in (False, False, True):
        eth1.use(named)
        chosen.append(os.environ[NCCL])
        monkeypatch.setenv(NCCL, "bond0")
    assert chosen == ["=eth1", "bond0", "=eth1"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


@pytest.mark.parametrize(
    ("transport", "network", "host", "found"),
    [
        ("nccl", "trusted", "10.0.0.1", "=ib7"),
        ("nccl", "untrusted", "::1", "=ib7"),
        ("nccl", "trusted", "::1", None),
        ("nccl", "trusted", "", None),
        ("relay", "untrusted", "10.0.0.1", None),
    ],
)
def test_weights_over_nccl_keep_to_the_interface_that_leads_to_the_other_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, network: str, host: str, found: str | None
) -> None:
    monkeypatch.delenv(NCCL, raising=False)
    monkeypatch.setattr(interface, "routed", lambda host: Interface("ib7", host))
    config = job(tmp_path)
    weights = msgspec.structs.replace(config.weights, transport=transport, network=network)
    use_for_weights(msgspec.structs.replace(config, weights=weights), host)
    assert os.environ.get(NCCL) == found


def test_machines_compare_how_versions_travel_and_the_layout(tmp_path: Path) -> None:
    """Each rank gathers what its own config asks for, so ranks that disagree would wait for each other."""
    config = job(tmp_path)
    parallel = msgspec.structs.replace(config.learner.parallel, tensor=2)
    other = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, verify=not config.model.verify),
        weights=msgspec.structs.replace(config.weights, encoding="adapter"),
        learner=msgspec.structs.replace(config.learner, parallel=parallel, timeout_s=900.0),
    )
    here, there = (module.facts(one, Interface("lo", "127.0.0.1")) for one in (config, other))
    differing = {key for key in here if here[key] != there[key]}
    assert differing == {"weights.encoding", "learner.parallel", "learner.timeout_s", "model.verify"}
    assert here["weights.transport"] == config.weights.transport
