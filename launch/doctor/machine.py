"""The facts of this machine, read without importing torch, vLLM or Megatron."""

import ctypes
import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from launch.up.devices import available_cores, list_gpus, torch_cuda

CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    python: tuple[int, ...]
    cores: int
    memory_bytes: int  # the host's, or the limit of this container
    available_bytes: int
    shm_bytes: int  # size of /dev/shm; 0 when there is none
    open_files: int  # the hard limit of this process; -1: none
    packages: Mapping[str, str]  # installed distributions, lower case, with versions
    now_s: float
    torch_cuda: str | None = None  # that torch was built for; None: a CPU build, or no torch
    gpus: tuple[str, ...] = ()  # names of the CUDA devices
    clock_synchronised: bool | None = None  # None when the kernel does not say


def look() -> Machine:
    memory = psutil.virtual_memory()
    limits = []
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or no number: 'max'
            limits.append(int(Path(path).read_text()))
    limit = min([memory.total, *limits])
    found = [(d.metadata["Name"], d.version) for d in metadata.distributions()]
    return Machine(
        python=tuple(sys.version_info[:3]),
        cores=len(available_cores()),
        memory_bytes=limit,
        available_bytes=min(memory.available, limit),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        # the first of a name is the one that is imported
        packages={name.lower().replace("_", "-"): version for name, version in reversed(found) if name},
        torch_cuda=torch_cuda(),
        gpus=tuple(name for _, name in list_gpus()),
        now_s=time.time(),
        clock_synchronised=_clock_synchronised(),
    )


def _clock_synchronised() -> bool | None:
    """Whether a time server keeps the clock, as adjtimex(2) says."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.create_string_buffer(512))  # modes 0: only read
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != CLOCK_UNSYNCHRONISED
