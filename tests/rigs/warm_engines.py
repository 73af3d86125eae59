"""Engines and nodes of tests, forked from one process for all files of a worker that has imported vLLM once.

A node itself starts its engine's process so (rollout_fleet/vllm_patches/engine_start.py), but a test's process has
threads. With CUDA, which does not survive a fork, they start as anywhere else.
"""

import functools
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from common.process.lifecycle import leave
from rollout_fleet.vllm_patches.engine_start import EngineContext, EngineProcess, import_vllm
from tests.rigs import device
from tests.rigs.processes import OURS, Command

ARCHITECTURES = (
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "MixtralForCausalLM"),
    "DeepseekV3ForCausalLM",
)
WARM = "SLIPSTREAM_TEST_WARM_ENGINES"  # variable of the process that forks
SETTINGS = {  # the engine sets them, too, before it imports vLLM
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class WarmPopen(popen_forkserver.Popen):
    """A process of our own fork server."""

    def _launch(self, process_obj: Any) -> None:
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _server().connect_to_new_process
        try:
            super()._launch(process_obj)
        finally:
            forkserver.connect_to_new_process = usual


class WarmProcess(EngineProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # its name in multiprocessing
        return WarmPopen(process_obj)

    def start(self) -> None:
        self.has_workers = type(self).has_workers  # goes to the child with the process
        super().start()


class WarmContext(EngineContext):
    Process = WarmProcess


@functools.cache
def _server() -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([__name__])
    before = dict(os.environ)
    os.environ |= SETTINGS | OURS | {WARM: "1"}
    try:
        server.ensure_running()
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    return server


@contextmanager
def forking(has_workers: bool) -> Iterator[None]:
    """Within, vLLM forks the process of an engine, which forks its workers."""
    from vllm.v1.engine import utils

    usual, WarmProcess.has_workers = utils.get_mp_context, has_workers
    utils.get_mp_context = WarmContext  # type: ignore[assignment]
    try:
        yield
    finally:
        utils.get_mp_context, WarmProcess.has_workers = usual, False


class Node(Command):
    """`slipstream rollout WORDS`."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        super().__init__(folder, name, "rollout", *words)
        self._words = ("rollout", *words)

    def __enter__(self) -> Self:
        if device.CUDA:
            return super().__enter__()
        process: Any = Forked(_role, str(self.log), os.getcwd(), self._words)
        self.process = process
        return self


class Forked:
    """A forked process with what a Process asks subprocess.Popen for."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self._process = WarmProcess(target=target, args=arguments)
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


def _role(log: str, folder: str, words: tuple[str, ...]) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= OURS
    from launch.cli import main

    leave(main(words))


if os.environ.pop(WARM, None):
    import_vllm(ARCHITECTURES)
