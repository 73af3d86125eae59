"""The facts of this machine, read without importing torch, vLLM or Megatron."""

import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from launch.up.core_pinning import available_cores

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
NVIDIA_SMI_S = 10.0
CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    python: tuple[int, ...]
    cores: int
    memory_bytes: int  # the host's, or the limit of this container
    available_bytes: int
    shm_bytes: int  # size of /dev/shm; 0 when there is none
    open_files: tuple[int, int]  # soft and hard limit of this process
    packages: Mapping[str, str]  # installed distributions, lower case, with versions
    now_s: float
    torch_cuda: str | None = None  # that torch was built for; None: a CPU build, or no torch
    gpus: tuple[str, ...] = ()  # names of the CUDA devices
    clock_synchronised: bool | None = None  # None when the kernel does not say


def look() -> Machine:
    memory = psutil.virtual_memory()
    limit = min([memory.total, *(int(text) for path in CGROUP_LIMITS if (text := _text(path)).isdigit())])
    found = [(d.metadata["Name"], d.version) for d in metadata.distributions()]
    return Machine(
        python=tuple(sys.version_info[:3]),
        cores=len(available_cores()),
        memory_bytes=limit,
        available_bytes=min(memory.available, limit),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        # the first of a name is the one that is imported
        packages={name.lower().replace("_", "-"): version for name, version in reversed(found) if name},
        torch_cuda=_torch_cuda(),
        gpus=_gpus(),
        now_s=time.time(),
        clock_synchronised=_clock_synchronised(),
    )


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _torch_cuda() -> str | None:
    """From torch/version.py, because importing torch takes seconds."""
    spec = find_spec("torch")
    text = _text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""
    found = re.search(r"^cuda.*= *['\"]([\d.]+)", text, re.MULTILINE)
    return found[1] if found else None


def _gpus() -> tuple[str, ...]:
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def _clock_synchronised() -> bool | None:
    """Whether a time server keeps the clock, as adjtimex(2) says."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.create_string_buffer(512))  # modes 0: only read
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != CLOCK_UNSYNCHRONISED
