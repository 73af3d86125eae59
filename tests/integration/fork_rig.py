"""Ranks forked from a process that has imported Megatron once, which costs seconds of CPU, and what they leave.

A worker script gives `serve` its jobs; a test gives `run` that script and stages of groups. The groups of a stage run
at the same time, each as many ranks with torchrun's environment, and each rank runs its job once per spec.
"""

import gc
import json
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

from common.process.lifecycle import die_with_parent
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]

Job = Callable[[Path, dict[str, Any]], None]


def group(ranks: int, job: str, specs: list[dict[str, Any]]) -> dict[str, Any]:
    """One world of `ranks` that runs `job` on each of `specs`."""
    return {"ranks": ranks, "job": job, "specs": specs}


def run(script: Path, folder: Path, stages: list[list[dict[str, Any]]], timeout_s: float = 12 * LIMIT_S) -> None:
    """Run the stages one after another; the test fails with the ranks' logs when one of them does."""
    command = [sys.executable, str(script), str(folder), json.dumps(stages), str(timeout_s)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s + 60, check=False)
    if done.returncode != 0:
        logs = [f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log"))]
        pytest.fail("\n".join([done.stderr[-3000:], *logs]), pytrace=False)


def write(path: Path, rank: int, tensors: dict[str, Tensor], result: dict[str, Any]) -> None:
    """What one rank found out, for Outcome."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / f"{rank}.safetensors")
    (path / f"{rank}.json").write_text(json.dumps(result))


class Outcome:
    """What the ranks of one spec wrote; `tensors` holds what any of them knows."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.json"))
        self.ranks = [json.loads(file.read_text()) for file in files]
        self.tensors_of = [load_file(file.with_suffix(".safetensors")) for file in files]
        self.tensors = {k: v for tensors in self.tensors_of for k, v in tensors.items()}

    def section(self, prefix: str) -> dict[str, Tensor]:
        """Tensors named `prefix`.NAME, by NAME."""
        return {k.removeprefix(prefix + "."): v for k, v in self.tensors.items() if k.startswith(prefix + ".")}


def _run_rank(jobs: dict[str, Job], folder: Path, group: dict[str, Any], rank: int, port: int) -> None:
    die_with_parent()
    log = os.open(folder / f"{group['job']}-{group['ranks']}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(group["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for spec in group["specs"]:
        jobs[group["job"]](folder, spec)
        gc.collect()  # models refer to themselves and to their groups, whose threads end with the last reference
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _fork_rank(*arguments: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _run_rank(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run_stage(jobs: dict[str, Job], folder: Path, stage: list[dict[str, Any]], deadline: float) -> bool:
    """Whether every rank ended well. A failed rank ends the others."""
    running: set[int] = set()
    for group in stage:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        running |= {_fork_rank(jobs, folder, group, rank, port) for rank in range(group["ranks"])}
    good = True
    while running and good:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            good = status == 0
        elif time.monotonic() > deadline:
            good = False
        else:
            time.sleep(0.02)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return good


def leave() -> None:
    """Give up Megatron's groups but keep the world, for the next spec in this process. Collective.

    Megatron forgets its groups without ending them, and each of its dozens has threads of its own.
    """
    from megatron.core import parallel_state

    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    c10d = torch.distributed.distributed_c10d
    for made in list(c10d._world.pg_map):
        if made is not c10d.GroupMember.WORLD:
            torch.distributed.destroy_process_group(made)


def serve(jobs: dict[str, Job]) -> int:
    """The worker script's main: `FOLDER STAGES TIMEOUT_S`."""
    folder, stages, timeout_s = Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    die_with_parent()
    import learner.megatron.backend  # noqa: F401

    deadline = time.monotonic() + timeout_s
    return 0 if all(_run_stage(jobs, folder, stage, deadline) for stage in stages) else 1
