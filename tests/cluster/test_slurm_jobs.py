"""Jobs on a real Slurm with shell commands as roles: restarts, ends, requeues, leaves and refusals."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.process.run_dir import RunDir, write_json
from launch.cluster.slurm.jobs import Jobs
from tests.rigs.configs import job_of, prepared, write_job
from tests.rigs.hosts import Slurm, slurm, slurm_missing
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S, until

pytestmark = pytest.mark.skipif(slurm_missing() != "", reason=slurm_missing())
# Slurm signals one process after another: `sleep` may end before its shell knows of the signal.
DRAINS = "trap 'echo emptied; exit 0' TERM; echo begun; while :; do sleep 1000 & wait; done"
PYTHONPATH = {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm"), 2) as made:
        yield made


class Roles:
    """The jobs of a run whose roles are shell commands."""

    def __init__(self, cluster: Slurm, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.run: RunDir = prepared(job_of(folder, run={"max_restarts": 1}))

    def submit(self, role: str, body: str, *options: str, step: bool = False) -> str:
        """Submit a role that waits until it is released, under srun as a `step`; returns its id."""
        file = self.run.slurm_jobs.with_name(f"{role}.sbatch")
        file.parent.mkdir(exist_ok=True)
        log = self.folder / f"{role}.log"
        words = [
            sys.executable,
            "-m",
            "launch.cluster.slurm.role_job",
            str(self.run.path),
            role,
            "--",
            *["srun"] * step,
            "sh",
            "-c",
            f"exec >> {shlex.quote(str(log))}; {body}",  # srun, when it is cancelled, may lose the last words
        ]
        header = f"#SBATCH --requeue --open-mode=append --output={log}"
        file.write_text(f"#!/bin/sh\n{header}\nexec {shlex.join(words)}\n")
        done = self.cluster.command("sbatch", "--parsable", "--hold", *options, str(file), **PYTHONPATH)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(self, learner: str, nodes: int = 0, step: bool = False) -> Jobs:
        """A broker and nodes that drain, and this learner; learner and nodes under srun as a `step`."""
        jobs = Jobs(self.submit("broker", DRAINS), self.submit("learner", learner, step=step))
        jobs.fleet = [self.submit("fleet", DRAINS, f"--array=1-{nodes}", step=step)] if nodes else []
        write_json(self.run.slurm_jobs, jobs)
        for job, role in ((jobs.broker, "broker"), *((fleet, "fleet") for fleet in jobs.fleet)):
            self.release(job)
            self.until_said(role, "begun", nodes if role == "fleet" else 1)
        self.release(jobs.learner)
        return jobs

    def release(self, job: str) -> None:
        self.cluster.said("scontrol", "release", job)

    def log(self, role: str) -> str:
        file = self.folder / f"{role}.log"
        return file.read_text() if file.exists() else ""

    def until_said(self, role: str, word: str, times: int) -> None:
        until(lambda: self.log(role).count(word) >= times, f"{role} says {word} {times} times", told=self.told)

    def until_ended(self) -> None:
        until(lambda: not self.cluster.said("squeue", "--noheader"), "no job is left", told=self.told, every_s=0.3)

    def told(self) -> str:
        logs = "".join(f"== {file.name}\n{file.read_text()}" for file in self.folder.glob("*.log"))
        return f"{logs}{self.cluster.said('squeue')}"


@pytest.fixture
def roles(cluster: Slurm, tmp_path: Path) -> Iterator[Roles]:
    made = Roles(cluster, tmp_path)
    yield made
    cluster.said("scancel", "--me")
    made.until_ended()


@pytest.mark.parametrize(("code", "lives", "step"), [(1, 2, False), (3, 1, False), (1, 2, True)])
def test_a_learner_that_ended_for_good_ends_the_run(roles: Roles, code: int, lives: int, step: bool) -> None:
    jobs = roles.start(f"echo begun; exit {code}", nodes=2, step=step)
    roles.until_ended()
    assert roles.log("learner").count("begun") == lives
    assert roles.log("fleet").count("emptied") == 2
    assert roles.log("broker").count("emptied") == 1
    assert f"ExitCode={code}:0" in roles.cluster.said("scontrol", "show", "job", "--oneliner", jobs.learner)


def test_a_requeue_drains_a_role_and_brings_it_back_and_scancel_ends_the_run(roles: Roles) -> None:
    jobs = roles.start(DRAINS)
    roles.until_said("learner", "begun", 1)
    roles.cluster.said("scontrol", "requeue", jobs.learner)
    roles.until_said("learner", "begun", 2)
    assert roles.log("learner").count("emptied") == 1
    roles.cluster.said("scancel", jobs.learner)
    roles.until_ended()
    assert "cancelled" in roles.log("learner")


@pytest.mark.parametrize("step", [False, True])
def test_the_signal_ahead_of_a_limit_drains_a_role_and_brings_it_back(roles: Roles, step: bool) -> None:
    jobs = roles.start(DRAINS, nodes=1, step=step)
    (task,) = jobs.fleet
    roles.cluster.said("scancel", "--batch", "--signal=TERM", task)  # as Slurm sends it ahead of the limit
    roles.until_said("fleet", "begun", 2)
    assert roles.log("fleet").count("emptied") == 1
    roles.cluster.said("scancel", "--batch", "--signal=USR1", task)
    roles.until_said("fleet", "has left", 1)
    assert roles.log("fleet").count("emptied") == 2


def test_the_run_goes_on_while_one_node_is_left_and_ends_with_the_last(roles: Roles) -> None:
    jobs = roles.start(DRAINS)
    jobs.fleet = [roles.submit("fleet", "echo begun; exit 2", "--array=1"), roles.submit("other", DRAINS)]
    write_json(roles.run.slurm_jobs, jobs)
    roles.release(jobs.fleet[0])
    roles.until_said("fleet", "exit code 2", 1)
    gone = f"--jobs={jobs.fleet[0]}"
    until(lambda: not roles.cluster.said("squeue", "--noheader", gone), "it has left")
    assert roles.log("learner").count("emptied") == 0
    roles.cluster.said("scancel", jobs.fleet[1])
    jobs.fleet = [roles.submit("fleet", "echo begun; exit 2", "--array=1-3")]
    write_json(roles.run.slurm_jobs, jobs)
    roles.release(jobs.fleet[0])
    roles.until_ended()
    assert roles.log("learner").count("emptied") == 1


def test_the_advisor_sizes_the_fleet_until_the_learner_has_ended(roles: Roles) -> None:
    jobs = roles.start(DRAINS, nodes=1)
    line = {"nodes_live": 1, "step_s": 1.0, "learner_idle_s": 0.9}  # the learner waits for the only node
    roles.run.metrics.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in range(10)))
    words = [sys.executable, "-m", "launch.cli", "scale", str(roles.run.path), "--follow-advice", "1..2"]
    follower = roles.cluster.head.start(words, roles.folder / "follower.log", {**roles.cluster.env, **PYTHONPATH})
    roles.until_said("follower", "1 -> 2 nodes", 1)
    roles.until_said("fleet", "begun", 2)
    roles.cluster.said("scancel", jobs.learner)
    assert follower.wait(LIMIT_S) == 0
    assert roles.log("follower").count("nodes") == 1


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("learner:partition=nowhere", "Invalid partition name specified"),
        ("learner:nodes=99", "Requested node configuration is not available"),
        ("fleet:time=never", "Invalid --time specification"),
    ],
)
def test_a_slurm_that_refuses_is_passed_on_and_leaves_nothing(
    cluster: Slurm, tmp_path: Path, option: str, reason: str
) -> None:
    job = str(write_job(tmp_path, weights={"transport": "relay"}))
    words = [sys.executable, "-m", "launch.cli", "slurm", job, "--sbatch", "gpus-per-node=", "--sbatch", option]
    done = cluster.command(*words, **PYTHONPATH)
    assert done.returncode == 2, done.stdout + done.stderr
    assert reason in done.stderr
    assert not cluster.said("squeue", "--noheader")
