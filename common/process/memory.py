"""The memory that this process may use: its machine's, or the limit of its container or Slurm job."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = (  # versions 2 and 1: root, limit, use, and the line of memory.stat on files that the kernel may drop
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_limit() -> int:
    """Bytes that this process and all others that share its limit may use."""
    most = psutil.virtual_memory().total
    for folder, (limit, *_) in _cgroups():
        with contextlib.suppress(OSError, ValueError):  # no such file, or no number: no limit
            most = min(most, int((folder / limit).read_text()))
    return most


def free_memory() -> int:
    """Bytes that this process can still get."""
    free = psutil.virtual_memory().available
    for folder, (limit, used, cached) in _cgroups():
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such file, or no number: no limit
            most, now = (int((folder / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, most - now + int(stat[cached]))
    return free


def _cgroups() -> Iterator[tuple[Path, list[str]]]:
    """The folders whose limits bind this process, each with the names of its files as in CGROUPS."""
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, at = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                root, *names = CGROUPS[bool(controllers)]
                own = Path(root, at.lstrip("/"))
                yield from ((folder, names) for folder in (own, *own.parents) if folder.is_relative_to(root))
