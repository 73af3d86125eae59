"""Engine processes of tests, forked from one process for all files of a worker that has imported vLLM once.

The engine itself forks them from its node (rollout_fleet/vllm_patches/engine_start.py). A test's process has threads.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from rollout_fleet.vllm_patches.engine_start import EngineContext, EngineProcess, import_vllm

ARCHITECTURES = (
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "MixtralForCausalLM"),
    "DeepseekV3ForCausalLM",
)
WARM = "SLIPSTREAM_TEST_WARM_ENGINES"  # variable of the process that forks


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
    """Started in the environment of an engine that is about to start."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([__name__])
    os.environ[WARM] = "1"
    try:
        server.ensure_running()
    finally:
        del os.environ[WARM]
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
        utils.get_mp_context = usual


if os.environ.pop(WARM, None):
    import_vllm(ARCHITECTURES)
