"""Removes the shared memory of engines that were killed; left alone, it fills /dev/shm over time.

The workers of one engine share memory through files there, and remove them only when they end in order. A node writes
a record of the files that its workers map. A later node of the same user removes the files of every record whose
workers have all ended. It cannot see the workers of another container (process namespace) and leaves their files.
"""

import contextlib
import logging
import os
import stat
import time
from pathlib import Path

import msgspec

from common.process.lifecycle import start_ticks

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
PREFIX = "slipstream-engine-"
RECORD_BYTES = 1 << 20
LOOK_S = 0.02


class Worker(msgspec.Struct, frozen=True):
    pid: int
    started: int  # clock ticks since the machine's start
    files: dict[str, int]  # name to inode

    @property
    def lives(self) -> bool:
        return start_ticks(self.pid) == self.started


class _Record(msgspec.Struct, frozen=True):
    namespace: str
    workers: list[Worker]


def this_worker(folder: Path = FOLDER) -> Worker:
    """This process and the files of `folder` that it maps."""
    files: dict[str, int] = {}
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            inode, path = [*line.rstrip("\n").split(None, 5), ""][4:6]
            if path.startswith(f"{folder}/") and not path.endswith(" (deleted)"):
                files[path.removeprefix(f"{folder}/")] = int(inode)
    return Worker(os.getpid(), start_ticks(os.getpid()) or 0, files)


def record(workers: list[Worker], folder: Path = FOLDER) -> None:
    """Record the files that the workers of a living engine map, if they map any."""
    if not any(worker.files for worker in workers):
        return
    first = min(workers, key=lambda worker: worker.pid)
    path = folder / f"{PREFIX}{first.pid}-{first.started}"
    unfinished = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):
        unfinished.write_bytes(msgspec.json.encode(_Record(_namespace(), workers)))
        unfinished.replace(path)


def remove_after(workers: list[Worker], limit_s: float) -> None:
    """Remove the files of these workers once they have ended; `limit_s` bounds the wait."""
    end = time.monotonic() + limit_s
    others = [worker for worker in workers if worker.files and worker.pid != os.getpid()]
    while any(worker.lives for worker in others) and time.monotonic() < end:
        time.sleep(LOOK_S)
    remove_left_files()


def remove_left_files(folder: Path = FOLDER) -> list[str]:
    """Remove what this user's ended engines have left in `folder`; returns the files' names."""
    removed: list[str] = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        found = _read(path)
        if found is None or any(worker.lives for worker in found.workers):
            continue
        for name, inode in {item for worker in found.workers for item in worker.files.items()}:
            with contextlib.suppress(OSError):
                status = (folder / name).lstat()
                if Path(name).name == name and (status.st_ino, status.st_uid) == (inode, os.getuid()):
                    (folder / name).unlink()
                    removed.append(name)
        path.unlink(missing_ok=True)
    if removed:
        logger.info("removed %d shared files of engines that have ended: %s", len(removed), ", ".join(removed[:4]))
    return removed


def _read(path: Path) -> _Record | None:
    """A record that this user wrote in this process namespace; None for anything else."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError, msgspec.DecodeError), os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            found = msgspec.json.decode(file.read(RECORD_BYTES), type=_Record)
            return found if found.namespace == _namespace() else None
    return None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
