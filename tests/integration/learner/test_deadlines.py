"""No rank waits for another one for ever: a stopped rank, a cut cable, and a fleet that is merely absent."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.contract import BrokerStatus
from common.process.lifecycle import alive
from common.waits import WaitKind
from launch.up.supervisor import RoleSpec, Supervisor
from tests.rigs.hosts import Host, hosts, missing
from tests.rigs.jobs import GROUPS, STEPS, Job, assert_delivered_once
from tests.rigs.processes import Process
from tests.rigs.processes import until as until_commands
from tests.rigs.waiting import until


def two_ranks(timeout_s: int) -> dict[str, Any]:
    return {"world_size": 2, "timeout_s": timeout_s}


def rank_process(parent: int, rank: int) -> psutil.Process:
    """The child of torchrun that is this rank."""
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.Error):
            if child.environ().get("RANK") == str(rank):
                return child
    raise AssertionError(f"no rank {rank} below {parent}")


def log_of(job: Job, rank: int) -> str:
    return (job.run.logs / f"learner-{rank}.log").read_text()


def assert_waits_for_rank_1(status: BrokerStatus) -> None:
    wait = status.learner.wait
    assert wait.kind == WaitKind.RANKS and wait.cause.startswith("rank 1 ")


def test_a_stopped_rank_is_named_and_killed_and_the_job_resumes(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path / "job", model, two_ranks(20), {"every": 1})
    events: list[tuple[str, object]] = []
    supervisor = Supervisor(lambda kind, detail: events.append((kind, detail.get("exit_code"))))
    with job.served() as client:
        spec = RoleSpec("learner", job.words(2), tmp_path / "torchrun.log", dict(os.environ), max_restarts=0)

        def seen(event: tuple[str, object]) -> bool:
            supervisor.poll()
            return event in events

        try:
            learner = supervisor.start(spec)
            until(lambda: len(job.lines()) >= 2, "two steps")
            stopped = rank_process(learner.pid, 1)
            stopped.send_signal(signal.SIGSTOP)
            until(lambda: client.status().learner.state == "stalled", "the status to mention the silence")
            assert_waits_for_rank_1(client.status())
            until(lambda: seen(("gave_up", 1)), "the end of the learner")
            assert not alive(stopped.pid)
            assert "rank 1 silent for " in log_of(job, 0), (
                "from the watch over ranks, or from the collective that timed out"
            )
        finally:
            supervisor.kill_all()
        job.finish(ranks=2)
        assert client.status().learner.incarnation == 1
        assert_delivered_once(client.ledger())
    job.assert_every_step_once()


@contextlib.contextmanager
def ranks_on(machines: list[Host], job: Job) -> Iterator[list[Process]]:
    """Both ranks, each on its host."""
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": machines[0].address, "MASTER_PORT": "29517"}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Process(
                    job.folder / f"rank-{rank}.log",
                    [*machines[rank].inside, *job.words(1)],
                    **{"RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0", **world},
                )
            )
            for rank in range(2)
        ]


@pytest.mark.skipif(missing() != "", reason=missing())
def test_ranks_with_a_cut_cable_between_them_end_and_resume(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path / "job", model, two_ranks(20), {"every": 1}, {"address": f"ipc://{tmp_path}/broker"})
    with hosts(tmp_path, 2) as machines, job.served() as client:
        with ranks_on(machines, job) as ranks:
            until_commands("two steps", lambda: len(job.lines()) >= 2, *ranks)
            machines[1].cut()
            until(lambda: client.status().learner.state == "stalled", "the status to mention the silence")
            assert_waits_for_rank_1(client.status())
            assert [rank.wait() for rank in ranks] == [1, 1]
        for rank in range(2):
            assert f"rank {1 - rank} silent for " in log_of(job, rank)
        assert client.status().learner.state == "failed"
        job.finish(ranks=2)
        assert_delivered_once(client.ledger())
    job.assert_every_step_once()


def test_waiting_for_an_absent_fleet_ends_no_rank(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path / "job", model, two_ranks(10))
    with job.broker(), job.client() as client:
        job.start(ranks=2)
        until(lambda: client.status().learner is not None, "the learner's first report")
        until(lambda: client.status().learner.state == "waiting", "the learner to wait for groups")
        until(lambda: client.status().learner.since_s > 25, "more than twice the limit to pass")
        with job.node():
            assert job.ended() == 0
        assert client.status().learner.incarnation == 0
        assert client.status().groups_committed == STEPS * GROUPS
    job.assert_every_step_once()
