"""Engines and nodes of tests, forked from one process for all files of a worker that has imported vLLM once.

A node itself starts its engine's process so (rollout_fleet/vllm_patches/engine_start.py), but a test's process has
threads. With CUDA, which does not survive a fork, they start as anywhere else.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any, Self

from common.process.lifecycle import leave
from rollout_fleet.vllm_patches.engine_start import EngineContext, EngineProcess, import_vllm
from tests.rigs import device
from tests.rigs.processes import OURS, Command, Forked, WarmFork, fork_server, write_to

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


@functools.cache
def _server() -> ForkServer:
    return fork_server(__name__, SETTINGS | {WARM: "1"})


class WarmProcess(WarmFork, EngineProcess):
    server = staticmethod(_server)

    def start(self) -> None:
        self.has_workers = type(self).has_workers  # goes to the child with the process
        super().start()


class WarmContext(EngineContext):
    Process = WarmProcess


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
        process: Any = Forked(WarmProcess, _role, str(self.log), os.getcwd(), self._words)
        self.process = process
        return self


def _role(log: str, folder: str, words: tuple[str, ...]) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    write_to(Path(log))
    os.environ |= OURS
    from launch.cli import main

    leave(main(words))


if os.environ.pop(WARM, None):
    import_vllm(ARCHITECTURES)
