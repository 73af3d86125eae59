"""Locks that the kernel releases when their process ends, however it ends."""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import IO

from common.errors import UsageError

LOOK_S = 0.1  # `is_locked` has a lock for less


class AlreadyLocked(Exception):
    """Another process has the lock; `holder` is its pid, or 'unknown'."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"process {holder} has the lock")
        self.holder = holder


def take_lock(path: Path) -> IO[str]:
    """Lock `path` until the returned file is closed, and write this process's pid into it.

    Raises AlreadyLocked when another process has it; OSError when there is no file, or its file system has no locks.
    """
    file = path.open("a+")
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_S)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise AlreadyLocked(holder) from None
    except OSError:
        file.close()
        raise
    with contextlib.suppress(OSError):  # on a full disk the lock does not name its process
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), str(os.getpid()).encode())
    return file


def only_one(path: Path, does: str) -> IO[str]:
    """`take_lock` in a folder that may not exist; raises UsageError when another process has it and `does` the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return take_lock(path)
    except AlreadyLocked as error:
        raise UsageError(f"{path.parent}: another process (pid {error.holder}) {does}") from None
    except OSError as error:
        raise UsageError(f"run.dir: {path.parent} cannot be created: {error}") from None


def is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock_holder(path: Path) -> int | None:
    """The process that has the lock, from /proc/locks; None when it is not visible."""
    inode = path.stat().st_ino
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if "FLOCK" in words and "->" not in words and words[5].rpartition(":")[2] == str(inode):
            return int(words[4]) if int(words[4]) > 0 else None
    return None
