"""How processes end, with their parent or by draining on the first signal, and what they get from the system."""

import ctypes
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

logger = logging.getLogger(__name__)

SUPERVISOR_ENV = "SLIPSTREAM_SUPERVISOR_PID"  # set by the local supervisor for the roles that it starts

_PR_SET_PDEATHSIG = 1
KEPT_BYTES = 128 << 20  # freed memory at the top of a heap that a process keeps
MMAP_BYTES = 32 << 20  # blocks from here on come from the kernel one by one; the largest that glibc allows
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # names of mallopt(3)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to kill this process (SIGKILL) when the thread that started it ends. Linux; elsewhere a no-op.

    It survives exec and is not inherited by fork. If the expected parent is gone already, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def join_supervisor() -> None:
    """Tie this process to the supervisor that started it, if one did (environment variable SUPERVISOR_ENV)."""
    parent = os.environ.pop(SUPERVISOR_ENV, None)
    if parent is not None:
        die_with_parent(int(parent))


def raise_open_files() -> None:
    """Let this process open as many files and connections as the hard limit allows; the soft one is often 1,024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # a system may refuse 'no limit'
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_freed_memory(one_heap: bool = False) -> bool:
    """Let this process reuse what large messages leave behind; returns whether the C library took it.

    By default glibc gives that memory back to the kernel, which maps it again page by page. For groups of 0.6 MB this
    costs more than everything else that is done to them. Call it before threads are started. `one_heap` makes all
    threads share one heap, because other heaps give memory back in pieces of 64 MB. Never where threads compute.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    mallopt.restype = ctypes.c_int
    settings = [(TRIM_THRESHOLD, KEPT_BYTES), (MMAP_THRESHOLD, MMAP_BYTES)]
    settings += [(ARENA_MAX, 1)] if one_heap else []
    return all([mallopt(*setting) == 1 for setting in settings])


def leave(code: int) -> NoReturn:
    """End at once: after torch or vLLM, tearing the interpreter down takes seconds and prints leaks of libraries."""
    for flush in (logging.shutdown, lambda: sys.stdout.flush(), lambda: sys.stderr.flush()):
        with suppress(Exception):  # a closed descriptor or a full disk changes no exit code
            flush()
    os._exit(code)


@contextmanager
def leaving_after(seconds: float, code: int, why: str) -> Generator[None]:
    """Around what may hang beyond the reach of Python: after `seconds` the process logs `why` and ends with `code`."""

    def give_up() -> None:
        logger.error("gave up after %g s: %s", seconds, why)
        leave(code)

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def alive(pid: int, birth: str = "", space: str = "") -> bool:
    """Whether the process `pid` runs on this machine (zombies count as gone on Linux).

    With its `birth`, another process that got the same number later does not count. With its `pid_space`, a stranger
    that has the number here does not, either.
    """
    if space not in ("", pid_space()):
        return False
    seen = os.path.isdir("/proc/self")
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that does not fit
        return False
    except PermissionError:
        seen = os.path.isdir(f"/proc/{pid}")
    return not seen or (start_ticks(pid) is not None and birth in ("", birth_of(pid)))


def birth_of(pid: int) -> str:
    """When a living process started, unlike every other one of its number: 'boot ticks'; '' without Linux."""
    boot = boot_id()
    return f"{boot} {start_ticks(pid)}" if boot else ""


def boot_id() -> str:
    """Names this start of the machine; '' without Linux."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def pid_space() -> str:
    """The boot and the PID namespace, in which a process's number means something; '' without Linux."""
    with suppress(OSError):
        return f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def out_of_sight(host: str, space: str) -> bool:
    """Whether a process of that `host` and `pid_space` may live although it is not seen here; '' where unknown.

    It is on another host, or in another container of this one. A process of an earlier boot has ended.
    """
    here = pid_space()
    return host not in ("", socket.gethostname()) or (space != here and space.split()[:1] == here.split()[:1])


def start_ticks(pid: int) -> int | None:
    """When a living process started, in clock ticks since the machine started; None: it is gone, or no Linux.

    A thread id is no process id, except that of a process's first thread.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            leader = next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))
    except OSError:
        return None
    return None if fields[0] == "Z" or leader != pid else int(fields[19])


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, Ctrl-C and, unless it is ignored as under nohup, SIGHUP, which a terminal that closes sends."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *[signal.SIGHUP] * (not ignored))


class DrainFlag:
    """Set by the first of `stop_signals`. A second one calls `on_second` and ends the process at once.

    A SIGHUP is no second one: a terminal that closes may send several.
    `reason` says why it is set, for example 'SIGTERM'; '' while it is not.
    """

    def __init__(self, on_second: Callable[[], None] = lambda: None) -> None:
        self.reason = ""
        self._on_second = on_second
        self._read, self._write = os.pipe()  # a pipe, because a lock taken in a signal handler can deadlock
        os.set_blocking(self._write, False)

    @classmethod
    def install(cls, on_second: Callable[[], None] = lambda: None) -> "DrainFlag":
        """A flag wired to `stop_signals` of this process. Call it in the main thread."""
        flag = cls(on_second)
        for number in stop_signals():
            signal.signal(number, flag._on_signal)
        return flag

    def set(self, reason: str) -> None:
        """Ask for the drain; the first reason stays."""
        if not self.is_set:
            self.reason = reason
            os.write(self._write, b"\0")

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the drain is asked for, at most `timeout_s`; True when it is. Any thread may call."""
        if not self.is_set:
            select.select([self._read], [], [], max(0.0, timeout_s))
        return self.is_set

    @property
    def is_set(self) -> bool:
        return self.reason != ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number != signal.SIGHUP:
            self._on_second()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.set(signal.Signals(number).name)
