"""Starts vLLM's engine process as a fork of one that has imported vLLM already: half of a start on a CPU is imports.

A fork of the running node would inherit the locks of its threads, its sockets and the signals of its event loop. So the
forks are made by multiprocessing's fork server, which is a fork of the node from before it had any of these.
"""

import atexit
import contextlib
import gc
import json
import os
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from common.process.lifecycle import die_with_parent

SPAWN = util.spawnv_passfds


class EngineProcess(ForkServerProcess):
    """A process with the environment variables of the moment at which it is started, as a spawned one has them."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items() - os.environ.items():  # others stay in place, for the title's sake
            os.environ[name] = value
        super().run()


class EngineContext(ForkServerContext):
    Process = EngineProcess


def import_ahead(model: Path) -> None:
    """Import what the engine of this model folder needs, here and for its process.

    Call it before the process has threads; where it has some, its engine processes are spawned. vLLM must find its
    settings in the environment. A folder that is no model is left to the engine's own check.
    """
    if threading.active_count() > 1:  # those of numpy's library are no matter: it ends them around a fork
        return
    try:
        architectures = json.loads((model / "config.json").read_bytes()).get("architectures") or ()
    except (OSError, ValueError, AttributeError):
        return
    gc.disable()  # the imports make hundreds of thousands of objects; walking them meanwhile costs a second
    import vllm.v1.engine.async_llm
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import ModelRegistry
    from vllm.v1.engine import utils

    for name in architectures:
        if name in ModelRegistry.models:  # else vLLM looks at the class in a Python of its own
            with contextlib.suppress(ImportError):  # the engine's start says what is missing
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules complain of leaks when the process ends
    gc.enable()
    resource_tracker.ensure_running()
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        forkserver.set_forkserver_preload([])
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = SPAWN
    utils.get_mp_context = EngineContext  # type: ignore[assignment]


def _fork(_path: bytes, _arguments: Sequence[bytes], fds: Sequence[int]) -> int:
    """As util.spawnv_passfds starts a fork server in a fresh Python, but in a fork of this process; its id."""
    parent = os.getpid()
    if child := os.fork():
        return child
    try:
        die_with_parent(parent)
        util.spawnv_passfds = SPAWN  # an engine of several workers spawns them
        forkserver.main(fds[0], fds[1], [])
    finally:
        os._exit(0)
