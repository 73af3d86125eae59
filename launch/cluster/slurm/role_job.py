"""A role inside its Slurm job: `python -m launch.cluster.slurm.role_job RUN ROLE -- COMMAND` ends a batch script.

- The role starts again after a crash, up to run.max_restarts times.
- SIGTERM, ahead of the time limit, drains the role, and the job is requeued. SIGUSR1 drains it for good.
- Slurm itself signals every process of a job that it requeues, preempts or cancels.
- When the learner or the broker has ended for good, or the last node has failed, the run's other jobs are ended.

In COMMAND {host} stands for the address of this host, and {broker} for that of the run's broker.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Literal

from broker.client.connect import ask_status
from common.config.loading import load_either
from common.config.network_checks import is_loopback
from common.errors import EXIT_DONE, EXITS_FOR_GOOD, HopelessError, SlipstreamError, UsageError
from common.process.lifecycle import SUPERVISOR_ENV, DrainFlag
from common.process.logs import visible
from common.process.run_dir import RunDir
from launch.cluster.interface import routed
from launch.cluster.slurm.jobs import SlurmError, end_run, over_file, read_jobs, repeated, slurm, unfinished
from launch.up.supervisor import DRAIN_S, FIRST_BACKOFF_S, LONGEST_BACKOFF_S, describe_exit

BROKER_WAIT_S = 600.0
BROKER_ANSWER_S = 5.0
POLL_S = 0.2
BEFORE_LIMIT_S = 10.0  # the limit would end the job for good, so a longer drain is cut off by a requeue
CANCEL_S = 10.0  # for a drain after scancel: Slurm kills this process KillWait after it, 30 s by default
Fate = Literal["runs", "comes_back", "cancelled"]  # where Slurm takes a job that has a signal


class RoleJob:
    """One role, in the batch script that runs this. `role` is broker, learner or fleet."""

    def __init__(self, run: RunDir, role: str, command: Sequence[str]) -> None:
        self.run_dir = run
        self.role = role
        self._command = command
        self.config = load_either(run.config)
        index = os.environ.get("SLURM_ARRAY_TASK_ID")
        self.id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{index}" if index else os.environ["SLURM_JOB_ID"]
        self._over = over_file(run, self.id)
        self._over.unlink(missing_ok=True)
        self._is_step = command[0] == "srun"  # several hosts, or a container of pyxis
        self._spans = self._is_step and int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1
        self.flag = DrainFlag()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: self.flag.set(signal.Signals(number).name))

    def run(self) -> int:
        """Run the role to its end; returns the job's exit code."""
        code = EXIT_DONE
        restarts = 0
        most = 0 if self._spans else self.config.run.max_restarts  # the launchers of many machines count themselves
        while not self.flag.is_set:
            try:
                code = self._live()
            except SlipstreamError as error:
                say(str(error))
                code = error.exit_code
            say(f"{self.role}: {describe_exit(code)} after {restarts} of {most} restarts")
            if self.flag.is_set or code in (EXIT_DONE, *EXITS_FOR_GOOD) or restarts == most:
                break
            restarts += 1
            self.flag.wait(min(FIRST_BACKOFF_S * 2**restarts, LONGEST_BACKOFF_S))
        self._finish(code)
        return code

    def _live(self) -> int:
        """One life of the role; returns its exit code, also that of a drain. Raises HopelessError."""
        argv = self._argv()
        if self.flag.is_set:
            return EXIT_DONE
        # A role of this host ends with this process.
        env = os.environ if self._is_step else {**os.environ, SUPERVISOR_ENV: str(os.getpid())}
        process = subprocess.Popen(argv, env=env)
        while (code := process.poll()) is None and not self.flag.wait(POLL_S):
            pass
        if code is not None:
            return code
        fate, until = self._fate()
        if fate == "runs":  # otherwise Slurm has sent SIGTERM to the role, too
            if self._is_step:
                repeated(lambda: slurm("scancel", "--signal=TERM", self.id), say, until)
            else:
                process.terminate()
        while (code := process.poll()) is None and time.time() < until:
            time.sleep(POLL_S)
        return code or EXIT_DONE

    def _argv(self) -> list[str]:
        """The command with its addresses, once the broker answers. Raises HopelessError or UsageError without them."""
        text = "\0".join(self._command)
        deadline = time.monotonic() + BROKER_WAIT_S
        if "{host}" in text:  # the interface that routes to the host where the run was submitted
            host = os.environ["SLURM_SUBMIT_HOST"]
            if is_loopback(own := routed(host).address):
                raise UsageError(f"{host} has address {own} here; set broker.address and weights.address in the config")
            text = text.replace("{host}", own)
        while "{broker}" in text and not self.flag.is_set:
            if time.monotonic() > deadline:
                raise HopelessError(f"no broker of {self.run_dir.path} answered within {BROKER_WAIT_S:g} s")
            with suppress(SlipstreamError):
                if (file := self.run_dir.broker()) is not None:
                    ask_status(file.address, BROKER_ANSWER_S, self.config.broker.credentials)
                    text = text.replace("{broker}", file.address)
            self.flag.wait(POLL_S)
        return text.split("\0")

    def _fate(self) -> tuple[Fate, float]:
        """(the fate of this job in Slurm, the Unix time until which a drain may last)."""
        try:
            line = slurm("scontrol", "show", "job", "--oneliner", self.id)
        except SlurmError:
            return "runs", float("inf")  # an answer may come later
        job = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if job["JobState"] == "RUNNING":
            ends = ends_at(job.get("EndTime", "")) if self.flag.reason == "SIGTERM" else float("inf")
            return "runs", ends - BEFORE_LIMIT_S
        if int(job["Restarts"]) > int(os.environ.get("SLURM_RESTART_COUNT", "0")):
            return "comes_back", float("inf")
        return "cancelled", time.time() + CANCEL_S

    def _finish(self, code: int) -> None:
        """Requeue this job, leave it to Slurm, or end the others."""
        fate, until = self._fate() if self.flag.is_set else ("runs", float("inf"))
        if self.flag.reason == "SIGTERM" and fate == "runs":
            say(f"{self.role}: drained ahead of the limit")
            repeated(lambda: slurm("scontrol", "requeue", self.id), say, until + BEFORE_LIMIT_S)
            say(f"{self.role}: requeued")
            return
        if self.flag.reason == "SIGUSR1" or fate == "comes_back":
            told = "comes back" if fate == "comes_back" else "has left"
            say(f"{self.role}: drained; {told}")
            return
        with suppress(OSError):  # a full disk keeps no job from ending the others
            self._over.parent.mkdir(exist_ok=True)
            self._over.touch()  # before the look at the others, because several may end at the same time
        try:
            repeated(lambda: self._end_others(code, fate == "cancelled"), say, until)
        except SlipstreamError as error:  # the job has the role's exit code all the same
            hint = f"end them with `slipstream slurm {self.run_dir.path} --cancel`"
            say(f"{error}; the run's other jobs may go on: {hint}")

    def _end_others(self, code: int, cancelled: bool) -> None:
        """End the run's other jobs, unless the run needs no end. Raises SlurmError."""
        others = any(task.stays for task in unfinished(self.run_dir, read_jobs(self.run_dir).fleet))
        if self.role != "fleet" or (code != EXIT_DONE and not others):
            say(f"{self.role}: {'cancelled' if cancelled else 'over'}; the run's other jobs end")
            end_run(self.run_dir, say, 0.0 if cancelled else DRAIN_S)


def ends_at(told: str) -> float:
    """The Unix time of a local time as Slurm tells it; infinite when it is not known, or in another format."""
    try:
        local = datetime.fromisoformat(told)
    except ValueError:
        return float("inf")
    # A clock change may repeat the hour: the first time is then over, and the job ends at the second.
    first = local.timestamp()
    return first if first > time.time() else local.replace(fold=1).timestamp()


def say(text: str) -> None:
    with suppress(OSError):  # the job's output may be on a full disk
        print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), visible(text), flush=True)


def main(words: Sequence[str]) -> int:
    """`RUN ROLE -- COMMAND`; returns the exit code of the job."""
    run, role, _, *command = words
    try:
        return RoleJob(RunDir(run), role, command).run()
    except SlipstreamError as error:
        say(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
