"""Worlds of ranks, and learners, forked from one process that has imported Megatron once, which costs seconds of CPU.

A test gives `run` groups of specs, each with a job, a function of its module that every rank runs; jobs assert nothing.
Every spec gets a new world, of its `ranks` or of the fewest that its `parallel` needs. Neighbours of `shared` groups
that need as many ranks share the processes of one world, and each makes its own process group there. All files of a
worker share the process that forks. With CUDA, which does not survive a fork, it starts a new Python for each rank.
"""

import atexit
import functools
import gc
import importlib
import itertools
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
from tests.rigs import device
from tests.rigs.processes import OURS, ROOT
from tests.rigs.redis_servers import free_port
from tests.rigs.waiting import LIMIT_S

CASE_S = 2 * LIMIT_S  # for one spec; the largest need some seconds

Job = Callable[[Path, dict[str, Any]], None]
Case = tuple[str, str, dict[str, Any], bool]  # module and name of a job, its spec, whether it shares processes


def group(job: Job, specs: list[dict[str, Any]], shared: bool = False) -> dict[str, Any]:
    """Let a world run `job` on each of `specs`.

    In a `shared` group, specs that need as many ranks share a world, the smallest worlds first. A spec with a name that
    fails there is a failure of its Outcome; others run on, in new processes.
    """
    ordered = sorted(specs, key=_ranks_of) if shared else specs
    return {"module": job.__module__, "job": job.__name__, "specs": ordered, "shared": shared}


def run(factory: pytest.TempPathFactory, *groups: dict[str, Any]) -> Path:
    """A new folder in which the worlds ran one after another; if one of them fails, the test fails with its logs."""
    folder = factory.mktemp("worlds")
    for name in ("models", "saved", "checkpoints"):
        (folder / name).mkdir()
    _order({"folder": str(folder), "groups": groups})
    if failed := _answer():
        pytest.fail(_with_logs(failed, folder), pytrace=False)
    return folder


def _with_logs(failed: str, folder: Path) -> str:
    return "\n".join([failed, *(f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))])


@functools.cache
def _server() -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.rigs.forked_ranks"]
    environment = os.environ | OURS
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes)

    def end() -> None:
        server.stdin.close()
        server.wait(LIMIT_S)
        server.stdout.close()

    atexit.register(end)
    return server


def start_learner(*arguments: str, ranks: int = 1) -> list[int]:
    """Fork `python -m learner.main ARGUMENTS`, which needs no time for imports; process ids by rank. One at a time."""
    _order({"module": "learner.main", "arguments": arguments, "ranks": ranks})
    return _answer()


def finished(module: str, *arguments: str) -> int:
    """The exit code of `python -m MODULE ARGUMENTS`, a command that works as a rank does: a forked one."""
    _order({"module": module, "arguments": arguments, "ranks": 1})
    pids = _answer()
    assert isinstance(pids, list), pids
    (code,) = learner_ended()
    return code


def learner_ended() -> list[int]:
    """Wait for the end of the learner that was started last; exit codes by rank, negative: the signal that ended it."""
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
        if (failed := path.parent / f"{path.name}.failed").exists():
            pytest.fail(failed.read_text(), pytrace=False)
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


def again(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """`same` for what one model computed twice: to the bit, but kernels of CUDA add in any order."""
    same(found, expected, atol=1e-3 if device.CUDA else 0.0)


def moved_alike(
    before: dict[str, Tensor],
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    atol: float = 0.0,
    most: float = 0.2,
) -> None:
    """`same` for what training has moved from `before`. On CUDA errors are at most this share of all that moved."""
    if not device.CUDA:
        return same(found, expected, atol)
    assert found and found.keys() == expected.keys() <= before.keys()
    moved, error = (
        sum((tensor.double() - other[name].double()).square().sum().item() for name, tensor in expected.items()) ** 0.5
        for other in (before, found)
    )
    assert error <= most * moved, f"{error / (moved or 1.0):.1e} of what moved"
    return None


def approximately(figures: Any) -> Any:
    """Equal to figures that were computed before, as in `again`."""
    return pytest.approx(figures, rel=1e-4 * device.LOOSE, abs=1e-7) if device.CUDA else figures


def tried(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those for which the ranks of SLIPSTREAM_TEST_RANKS suffice."""
    return [spec for spec in specs if _ranks_of(spec) <= device.RANKS]


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the error in units of the expected norm, in float64; of one where nothing is expected."""
    norm = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (norm or 1.0)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error, and the tensor that has it; `found` may have more names."""
    assert expected and expected.keys() <= found.keys()
    errors = [(relative(found[name], tensor), name) for name, tensor in expected.items()]
    return max(errors, key=lambda error: (math.isnan(error[0]), error))


def _run_rank(cases: list[Case], folder: Path, log: Path, bound: socket.socket, world: tuple[int, int]) -> None:
    """Join the world whose rank 0 serves the store at a socket that is bound already, so that no port is lost."""
    status, (rank, ranks) = 1, world
    try:
        die_with_parent()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ |= device.rank_environment(rank, ranks, torch.cuda.device_count())
        port = bound.getsockname()[1]
        fd = {"master_listen_fd": bound.detach()} if rank == 0 else {}
        store = torch.distributed.TCPStore("127.0.0.1", port, ranks, rank == 0, **fd)
        if device.CUDA:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if device.CUDA else "gloo"
        for number, (module, job, spec, _) in enumerate(cases):
            if number:
                _leave_groups()
            own = torch.distributed.PrefixStore(str(number), store)
            torch.distributed.init_process_group(backend, store=own, rank=rank, world_size=ranks)
            getattr(importlib.import_module(module), job)(folder, spec)
            torch.distributed.barrier()
            if rank == 0:
                _progress(folder).write_text(str(number + 1))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _leave_groups() -> None:
    """Leave nothing of a case in its process for the next one."""
    from learner.megatron import parallel

    parallel.shutdown()
    gc.collect()
    if device.CUDA:
        torch.cuda.empty_cache()


def _progress(folder: Path) -> Path:
    """The number of cases that are through in the world that runs."""
    return folder / "progress"


def _start_rank(cases: list[Case], folder: Path, log: Path, bound: socket.socket, world: tuple[int, int]) -> int:
    if device.CUDA:
        words = json.dumps([cases, str(folder), str(log), bound.fileno(), world])
        command = [sys.executable, "-m", "tests.rigs.forked_ranks", "--rank", words]
        bound.set_inheritable(True)
        return os.posix_spawn(sys.executable, command, os.environ)  # a Popen that is dropped may reap the rank itself
    for module, *_ in cases:
        importlib.import_module(module)
    if pid := os.fork():
        return pid
    _run_rank(cases, folder, log, bound, world)
    return 0


def _spawned_rank(words: str) -> None:
    cases, folder, log, fd, world = json.loads(words)
    import learner.megatron.backend  # noqa: F401  (before any other import of megatron)

    _run_rank(cases, Path(folder), Path(log), socket.socket(fileno=fd), tuple(world))


def _ranks_of(spec: dict[str, Any]) -> int:
    layout = ParallelConfig(**spec.get("parallel", {}))
    return spec.get("ranks") or max(layout.model_ranks, layout.pipeline * layout.expert * layout.expert_tensor)


def _run_world(cases: list[Case], ranks: int, folder: Path) -> tuple[str, int]:
    """The reason of a failure, and how many cases were through; a failed rank ends the others."""
    name, done = cases[0][1], 0
    _progress(folder).write_text("0")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        logs = [folder / f"{name}-{ranks}-{rank}.log" for rank in range(ranks)]
        running = {_start_rank(cases, folder, log, bound, (rank, ranks)) for rank, log in enumerate(logs)}
    failed, end = "", time.monotonic() + CASE_S
    while running and not failed:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if (through := int(_progress(folder).read_text() or done)) != done:
            done, end = through, time.monotonic() + CASE_S
        if pid:
            running.discard(pid)
            failed = f"a rank ended with {os.waitstatus_to_exitcode(status)}" if status else ""
        elif time.monotonic() > end:
            failed = f"{len(running)} of {ranks} ranks still run after {CASE_S:g} s"
        else:
            time.sleep(0.005)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    done = min(done, len(cases) - 1)
    return failed and f"{cases[done][1]} {cases[done][2]}: {failed}", done


def _run_worlds(order: dict[str, Any]) -> str:
    """The reason of the failure in the first world that failed."""
    folder = Path(order["folder"])
    cases: list[Case] = [
        (group["module"], group["job"], spec, group["shared"]) for group in order["groups"] for spec in group["specs"]
    ]
    apart = ((shared or number, _ranks_of(spec)) for number, (_, _, spec, shared) in enumerate(cases, start=2))
    for (_, ranks), found in itertools.groupby(zip(apart, cases, strict=True), key=lambda one: one[0]):
        world = [case for _, case in found]
        while world:
            failed, done = _run_world(world, ranks, folder)
            if not failed:
                break
            _, _, spec, shared = world[done]
            if not shared or "name" not in spec:
                return failed
            (folder / f"{spec['name']}.failed").write_text(_with_logs(failed, folder))
            world = world[done + 1 :]
    return ""


def _run_module(module: str, arguments: list[str], ranks: int, answer: Callable[[Any], None]) -> list[int]:
    """Exit codes by rank; `answer` gets the process ids first. Several ranks meet as under torchrun."""
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pids = []
    for rank in range(ranks):
        own = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        pids.append(_start_module(module, arguments, own))
    answer(pids)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _start_module(module: str, arguments: list[str], environment: dict[str, str]) -> int:
    if device.CUDA:
        command = [sys.executable, "-m", module, *arguments]
        return os.posix_spawn(sys.executable, command, os.environ | environment)
    run = importlib.import_module(module).run
    if pid := os.fork():
        return pid
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ |= environment
    leave(guard(run, arguments))


def serve() -> None:
    """Start worlds and learners as the lines of standard input say; each answer is a line of JSON."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not device.CUDA:
        torch.set_num_threads(1)
        import learner.main
        import learner.megatron.backend  # noqa: F401

    def answer(found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer(_run_module(**order, answer=answer) if "module" in order else _run_worlds(order))
        except Exception:
            answer(traceback.format_exc())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _spawned_rank(sys.argv[2])
    else:
        serve()
