"""Processes of tests: children forked from one that has imported torch, and commands that write to a log.

The import of torch costs seconds of CPU each time.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import psutil

from tests.rigs import waiting
from tests.rigs.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
OURS = {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}  # variables of a process that runs this checkout
PRELOAD = ["common.weights.receive.receiver", "common.weights.transports.groups", "common.weights.transports.relay"]
SLIPSTREAM = [sys.executable, "-m", "launch.cli"]
JOB_S = 4 * LIMIT_S  # for a whole job


def context() -> ForkServerContext:
    """The fork server's context; its process starts with the first child."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ["OMP_NUM_THREADS"] = "1"
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*PRELOAD, "common.weights.receive.weight_client"])
    return found


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A child that runs `target`, a function of an importable module, and dies with this process."""
    process = context().Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def fork_server(module: str, environment: dict[str, str]) -> forkserver.ForkServer:
    """A fork server of its own, which imports `module` with these variables."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([module])
    before = dict(os.environ)
    os.environ |= OURS | environment
    try:
        server.ensure_running()
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    return server


class WarmPopen(popen_forkserver.Popen):
    """A process of the fork server that its class names."""

    def _launch(self, process_obj: Any) -> None:
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = process_obj.server().connect_to_new_process
        try:
            super()._launch(process_obj)
        finally:
            forkserver.connect_to_new_process = usual


class WarmFork(ForkServerProcess):
    """A process whose module is imported already. A subclass belongs in that module, and names its server."""

    server: Callable[[], forkserver.ForkServer]

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # its name in multiprocessing
        return WarmPopen(process_obj)


class Forked:
    """A forked process with what is asked of subprocess.Popen."""

    def __init__(self, kind: type[WarmFork], target: Callable[..., None], *arguments: Any) -> None:
        self._process = kind(target=target, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def write_to(log: Path) -> None:
    """Let this process write its output to a new file."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)


class Process:
    """A child that writes to a log; killed with everything that it started when the test leaves the block."""

    def __init__(self, log: Path, command: list[str], **environment: str) -> None:
        self.name, self.log, self._command = log.stem, log, command
        self._environment = {**os.environ, **OURS, **environment}

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment, process_group=0
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for child in descendants(self.process.pid):
                kill(child.pid)
            self.process.kill()
            self.process.wait(timeout=LIMIT_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = JOB_S) -> int:
        """Exit code; fails with the output when it takes longer."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {timeout_s:g} s:\n{self.output()}") from None

    def drain(self) -> None:
        """SIGTERM, which it must obey."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 0, self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


class Command(Process):
    """A running `slipstream` command."""

    def __init__(self, folder: Path, name: str, *words: str, **environment: str) -> None:
        super().__init__(folder / f"{name}.out", [*SLIPSTREAM, *words], **environment)


def until(what: str, condition: Callable[[], Any], *commands: Process) -> Any:
    """Wait for something; fails at once when a command that should run has ended."""

    def check() -> None:
        for command in commands:
            code = command.process.poll()
            assert code is None, f"{command.name} ended with {code} while waiting for {what}:\n{command.output()}"

    def told() -> str:
        return "\n".join(command.output()[-3000:] for command in commands)

    return waiting.until(condition, what, 2 * LIMIT_S, check=check, told=told, every_s=0.2)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def survivors(processes: list[psutil.Process], wait_s: float = LIMIT_S) -> list[psutil.Process]:
    """Which of these processes never end."""
    return psutil.wait_procs(processes, timeout=wait_s)[1]
