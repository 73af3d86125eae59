"""Starts vLLM's engine process as a fork of one that has imported vLLM already: half of a start on a CPU is imports.

A fork of the running node would inherit the locks of its threads, its sockets and the signals of its event loop. So the
forks are made by multiprocessing's fork server, which is a fork of the node from before it had any of these. A fork of
the engine's process makes those of its workers.
"""

import atexit
import contextlib
import gc
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from common.process.lifecycle import die_with_parent

SPAWN = util.spawnv_passfds
LOWERING = "torch._inductor.lowering"  # a fifth of vLLM's imports; it needs it for what is compiled


class EngineProcess(ForkServerProcess):
    """A process with the environment variables of the moment at which it is started, as a spawned one has them."""

    has_workers = False  # whether an engine has processes of its own

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items() - os.environ.items():  # others stay in place, for the title's sake
            os.environ[name] = value
        if self.has_workers and self.name.startswith("EngineCore"):
            from vllm.v1.executor import multiproc_executor

            serve_forks()
            multiproc_executor.get_mp_context = EngineContext  # type: ignore[assignment]
        super().run()


class EngineContext(ForkServerContext):
    Process = EngineProcess


def import_ahead(model: Path, has_workers: bool = False) -> None:
    """Import what the engine of this model folder needs, here and for its processes.

    Call it before the process has threads; where it has some, its engine processes are spawned. vLLM must find its
    settings in the environment. A folder that is no model is left to the engine's own check.
    """
    if threading.active_count() > 1:  # those of numpy's library are no matter: it ends them around a fork
        return
    if (architectures := architectures_of(model)) is None:
        return
    import_vllm(architectures)
    from vllm.v1.engine import utils

    EngineProcess.has_workers = has_workers
    serve_forks()
    utils.get_mp_context = EngineContext  # type: ignore[assignment]


def architectures_of(model: Path) -> Sequence[str] | None:
    """The classes that a model folder's config.json names; None for a folder that is no model."""
    try:
        return json.loads((model / "config.json").read_bytes()).get("architectures") or ()
    except (OSError, ValueError, AttributeError):
        return None


def import_vllm(architectures: Sequence[str]) -> None:
    """Import what an engine of these architectures needs."""
    gc.disable()  # the imports make hundreds of thousands of objects; walking them meanwhile costs a second
    with _without_compiler():
        import vllm.v1.engine.async_llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    register_models(architectures)
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules complain of leaks when the process ends
    gc.enable()


def register_models(architectures: Sequence[str]) -> None:
    """Import vLLM's classes; else it looks at each in a Python of its own, which imports vLLM for 10 s and more.

    vLLM fears that the import uses CUDA, after which no fork could. No engine process of ours is forked on a GPU.
    """
    from vllm import ModelRegistry

    for name in architectures:
        if name in ModelRegistry.models:
            with contextlib.suppress(ImportError):  # the engine's start says what is missing
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Where nothing is compiled, an import of vLLM does not find what it changes in torch's compiler."""
    hidden = os.environ.get("TORCHDYNAMO_DISABLE") == "1" and LOWERING not in sys.modules
    if hidden:
        sys.modules[LOWERING] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[LOWERING]


def serve_forks() -> None:
    """Start multiprocessing's fork server as a fork of this process, which has no threads yet."""
    resource_tracker.ensure_running()
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        forkserver.set_forkserver_preload([])
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = SPAWN


def _fork(_path: bytes, _arguments: Sequence[bytes], fds: Sequence[int]) -> int:
    """As util.spawnv_passfds starts a fork server in a fresh Python, but in a fork of this process; its id."""
    parent = os.getpid()
    if child := os.fork():
        return child
    try:
        die_with_parent(parent)
        util.spawnv_passfds = SPAWN
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # `ensure_running` has the other
        forkserver.main(fds[0], fds[1], [])
    finally:
        os._exit(0)
