"""The Slurm jobs of a run: RUN/slurm/jobs.json, their tasks in Slurm's queue, and how they end.

Only jobs of that file are ever signalled or cancelled. SIGTERM to a batch script says: drain, you come back. SIGUSR1
says: drain and leave for good (launch/cluster/slurm/role_job.py).
"""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from common.errors import SlipstreamError, UsageError
from common.process.run_dir import RunDir
from launch.up.supervisor import DRAIN_S

T = TypeVar("T")
ANSWER_S = 60.0  # a busy controller answers late
AGAIN_S = 5.0  # before a refused request is repeated
LONGEST_S = 600.0  # a controller that restarts, or fails over
POLL_S = 1.0
# A person's choices of what these commands show and ask: rows that are left out, or prompts.
FOR_PEOPLE = ("SQUEUE_", "SCANCEL_")


class SlurmError(SlipstreamError):
    """Slurm refused, in its own words."""


class Jobs(msgspec.Struct):
    """RUN/slurm/jobs.json: the ids of a submission; the fleet has several arrays after it has grown."""

    broker: str = ""
    learner: str = ""
    fleet: list[str] = []

    @property
    def ids(self) -> list[str]:
        return [job for job in (self.broker, self.learner, *self.fleet) if job]


class Task(NamedTuple):
    """A job, or a task of an array, that Slurm has not ended; the oldest sorts first."""

    job: int
    number: int  # in its array
    id: str  # '12', or '14_2' in an array
    state: str  # PENDING, RUNNING, COMPLETING, ...
    stays: bool  # it is not ending, or is about to be started again


def over_file(run: RunDir, task: str) -> Path:
    """This file is there when the role of a task has ended for good, and its job is about to."""
    return run.path / "slurm" / "over" / task


def read_jobs(run: RunDir) -> Jobs:
    """The jobs of the run's last submission; none when there was none."""
    return msgspec.json.decode(run.slurm_jobs.read_bytes(), type=Jobs) if run.slurm_jobs.exists() else Jobs()


def slurm(*words: str) -> str:
    """The output of one of Slurm's commands; raises SlurmError with its message, UsageError where it is missing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOR_PEOPLE)}
    env["SLURM_TIME_FORMAT"] = "standard"
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError:
        hint = "run this on a host of a Slurm cluster; `slipstream slurm CONFIG --dry-run` writes the scripts anywhere"
        raise UsageError(f"{words[0]} is not in PATH: {hint}") from None
    except subprocess.TimeoutExpired as error:
        raise SlurmError(str(error)) from None
    if done.returncode:
        raise SlurmError(" ".join((done.stderr or done.stdout or f"{words[0]} failed").split()))
    return done.stdout.strip()


def repeated(work: Callable[[], T], tell: Callable[[str], None], until: float) -> T:
    """Call `work` again after a SlurmError, until the Unix time `until` and at most for LONGEST_S; returns its answer.

    Raises the last SlurmError.
    """
    end = min(until, time.time() + LONGEST_S)
    while True:
        try:
            return work()
        except SlurmError as error:
            if (left := end - time.time()) <= 0:
                raise
            tell(f"{error}; asked again for {left:.0f} s")
            time.sleep(min(AGAIN_S, left))


def tasks_of(ids: Sequence[str]) -> list[Task]:
    """The tasks of these jobs that Slurm has not ended, the oldest first. Raises SlurmError."""
    found = []
    for line in slurm("squeue", "--me", "--noheader", "--array", "--format=%i|%T|%e").splitlines():
        id_, state, ends = line.split("|")
        job, _, index = id_.partition("_")
        if job in ids:
            found.append(Task(int(job), int(index or 0), id_, state, state != "COMPLETING" or ends == "N/A"))
    return sorted(found)


def leave(tasks: Sequence[Task]) -> None:
    """Tell tasks that run to drain and leave for good, and take the others out of the queue. Raises SlurmError."""
    if others := [task.id for task in tasks if task.state != "RUNNING"]:
        slurm("scancel", "--quiet", *others)
    if running := [task.id for task in tasks if task.state == "RUNNING"]:
        slurm("scancel", "--quiet", "--batch", "--signal=USR1", *running)


def unfinished(run: RunDir, ids: Sequence[str]) -> list[Task]:
    """The tasks of these jobs that are not over, and do not end by themselves. Raises SlurmError."""
    return [task for task in tasks_of(ids) if not over_file(run, task.id).exists()]


def end_run(run: RunDir, tell: Callable[[str], None], drain_s: float = DRAIN_S) -> None:
    """End the jobs of a run that are not over: learner and fleet drain, then the broker.

    A task that is left after `drain_s` is cancelled, and Slurm kills it. Raises SlurmError.
    """
    jobs = read_jobs(run)
    for ids in ([jobs.learner, *jobs.fleet], [jobs.broker]):
        told: set[str] = set()
        deadline = time.monotonic() + drain_s
        while tasks := unfinished(run, ids):
            if time.monotonic() >= deadline:
                tell(f"cancelling {' '.join(task.id for task in tasks)}")
                slurm("scancel", "--quiet", *(task.id for task in tasks))
                break
            # A task that Slurm requeued after it was told waits again.
            if new := [task for task in tasks if task.stays and (task.id not in told or task.state == "PENDING")]:
                tell(f"ending {' '.join(task.id for task in new)}")
                leave(new)
                told.update(task.id for task in new)
            time.sleep(POLL_S)
