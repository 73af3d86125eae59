"""Worlds of ranks, and learners, forked from one process that has imported Megatron once, which costs seconds of CPU.

A test gives `run` groups of specs, each with a job, a function of its module that every rank runs; jobs assert nothing.
Every spec gets a new world, of its `ranks` or of the fewest that its `parallel` needs. All files of a worker share the
process that forks.
"""

import atexit
import functools
import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config.schema import ParallelConfig
from common.process.lifecycle import die_with_parent, leave
from learner.rank_process import guard
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]
WORLD_S = 2 * LIMIT_S  # for one world; the largest need some seconds

Job = Callable[[Path, dict[str, Any]], None]


def group(job: Job, specs: list[dict[str, Any]]) -> dict[str, Any]:
    """For each of `specs` one world that runs `job` on it."""
    return {"module": job.__module__, "job": job.__name__, "specs": specs}


def run(factory: pytest.TempPathFactory, *groups: dict[str, Any]) -> Path:
    """A new folder in which the worlds ran one after another; if one of them fails, the test fails with its logs."""
    folder = factory.mktemp("worlds")
    for name in ("models", "saved", "checkpoints"):
        (folder / name).mkdir()
    _order({"folder": str(folder), "groups": groups})
    if failed := _answer():
        logs = [f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log"))]
        pytest.fail("\n".join([failed, *logs]), pytrace=False)
    return folder


@functools.cache
def _server() -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.integration.megatron.fork_rig"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes)

    def end() -> None:
        server.stdin.close()
        server.wait(LIMIT_S)
        server.stdout.close()

    atexit.register(end)
    return server


def start_learner(*arguments: str) -> int:
    """Fork `python -m learner.main ARGUMENTS`, which needs no time for imports; its process id. One at a time."""
    _order({"learner": arguments})
    return _answer()


def learner_ended() -> int:
    """Wait for the end of the learner that was started last; its exit code, negative: the signal that ended it."""
    return _answer()


def _order(order: dict[str, Any]) -> None:
    server = _server()
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()


def _answer() -> Any:
    server = _server()
    answer = server.stdout.readline()
    assert answer, f"the process that forks the ranks ended with {server.wait(LIMIT_S)}"
    return json.loads(answer)


def write(path: Path, rank: int, tensors: dict[str, Tensor], result: dict[str, Any]) -> None:
    """The findings of one rank, for Outcome."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / f"{rank}.safetensors")
    (path / f"{rank}.json").write_text(json.dumps(result))


class Outcome:
    """The files of the ranks of one spec; `tensors` has those of all ranks."""

    def __init__(self, path: Path) -> None:
        assert path.is_dir(), path
        files = sorted(path.glob("*.json"))
        self.ranks = [json.loads(file.read_text()) for file in files]
        self.tensors_of = [load_file(file.with_suffix(".safetensors")) for file in files]
        self.tensors = {k: v for tensors in self.tensors_of for k, v in tensors.items()}

    def section(self, prefix: str) -> dict[str, Tensor]:
        """Tensors named `prefix`.NAME, by NAME."""
        return section(self.tensors, prefix)


def named(specs: list[dict[str, Any]]) -> Any:
    """Parametrizes a test with specs, each under its name."""
    return pytest.mark.parametrize("spec", specs, ids=[spec["name"] for spec in specs])


def section(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors named `prefix`.NAME, by NAME."""
    return {k.removeprefix(prefix + "."): v for k, v in tensors.items() if k.startswith(prefix + ".")}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    """Assert the same names, and values that are equal to the bit or, with `atol`, close."""
    assert found and found.keys() == expected.keys()
    for name, tensor in expected.items():
        said = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=said)


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the error in units of the expected norm, in float64; of one where nothing is expected."""
    norm = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (norm or 1.0)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error, and the tensor that has it; `found` may have more names."""
    assert expected and expected.keys() <= found.keys()
    errors = [(relative(found[name], tensor), name) for name, tensor in expected.items()]
    return max(errors, key=lambda error: (math.isnan(error[0]), error))


def _join(bound: socket.socket, rank: int, ranks: int) -> None:
    """Join the world whose rank 0 serves the store at a socket that is bound already, so that no port is lost."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    port = bound.getsockname()[1]
    fd = {"master_listen_fd": bound.detach()} if rank == 0 else {}
    store = torch.distributed.TCPStore("127.0.0.1", port, ranks, rank == 0, **fd)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def _fork_rank(job: Job, folder: Path, spec: dict[str, Any], log: Path, bound: socket.socket, world: tuple) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        _join(bound, *world)
        job(folder, spec)
        torch.distributed.barrier()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_world(job: Job, folder: Path, spec: dict[str, Any], name: str) -> str:
    """The reason of a failure; a failed rank ends the others."""
    layout = ParallelConfig(**spec.get("parallel", {}))
    ranks = spec.get("ranks") or max(layout.model_ranks, layout.pipeline * layout.expert * layout.expert_tensor)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        logs = [folder / f"{name}-{ranks}-{rank}.log" for rank in range(ranks)]
        running = {_fork_rank(job, folder, spec, log, bound, (rank, ranks)) for rank, log in enumerate(logs)}
    failed, end = "", time.monotonic() + WORLD_S
    while running and not failed:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            failed = f"{name} {spec}: a rank ended with {os.waitstatus_to_exitcode(status)}" if status else ""
        elif time.monotonic() > end:
            failed = f"{name} {spec}: {len(running)} of {ranks} ranks still run after {WORLD_S:g} s"
        else:
            time.sleep(0.005)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed


def _run_worlds(order: dict[str, Any]) -> str:
    """The reason of the failure in the first world that failed."""
    for group in order["groups"]:
        job = getattr(importlib.import_module(group["module"]), group["job"])
        for spec in group["specs"]:
            if failed := _run_world(job, Path(order["folder"]), spec, group["job"]):
                return failed
    return ""


def _run_learner(arguments: list[str], answer: Callable[[Any], None]) -> int:
    """The exit code; `answer` gets the process id first."""
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        leave(guard(importlib.import_module("learner.main").run, arguments))
    answer(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve() -> None:
    """Fork worlds and learners as the lines of standard input say; each answer is a line of JSON."""
    torch.set_num_threads(1)
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import learner.main
    import learner.megatron.backend  # noqa: F401

    def answer(found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer(_run_learner(order["learner"], answer) if "learner" in order else _run_worlds(order))
        except Exception:
            answer(traceback.format_exc())


if __name__ == "__main__":
    serve()
