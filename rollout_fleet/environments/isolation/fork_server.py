"""The process that environment processes are forked from: small, single-threaded, without secrets.

    node --socket of one episode--> fork server --fork--> guard (pid 1 of its own namespace) --fork--> worker

The worker runs the environment (worker.py). The guard ends all processes below it when the worker ends, or when the
node closes its end of the episode's socket or dies. It does the same when the wall time is over or too many processes
run. The environment's module is imported once, here; a fork costs a few milliseconds.

python -m rollout_fleet.environments.isolation.fork_server CONTROL_FD MODULE... -- LEARNED...
(started by process_host.py; standard library only). LEARNED are the modules that an earlier episode has imported: one
that fails to import here is left to the episodes.
"""

import asyncio
import contextlib
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from rollout_fleet.environments.isolation import namespaces, worker
from rollout_fleet.environments.isolation.ipc_frames import pack

MOST_PROCESSES = 64  # an episode with more is ended; the kernel refuses twice as many
FIRST_UID = 1_000_000_000  # real users of episodes, where the node runs as root
LOOK_S = 0.05
OPEN_FILES = 256


def main(arguments: list[str]) -> int:
    """Serve until the node closes the control socket."""
    control = socket.socket(fileno=int(arguments[0]))
    try:
        split = arguments.index("--")
        for module in arguments[1:split]:
            importlib.import_module(module)
        for module in arguments[split + 1 :]:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module)
        ready = {"namespaces": _namespaces_work(), "threads": len(os.listdir("/proc/self/task"))}
        control.send(json.dumps(ready).encode())
    except BaseException as error:  # a user's module may raise anything while it is imported
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    while True:
        request, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not request:
            return 0
        if os.fork() == 0:
            _become_guard(json.loads(request), fds[0])
        os.close(fds[0])


def _namespaces_work() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if namespaces.unshare(namespaces.NEW_PID) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _become_guard(request: dict[str, Any], fd: int) -> None:
    """In the first child: leave the fork server's world, then continue in a child that is the first of its own."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.closerange(3, fd)
        os.closerange(fd + 1, min(os.sysconf("SC_OPEN_MAX"), 1 << 20))
        kinds = namespaces.NEW_PID | (0 if request["network"] else namespaces.NEW_NET)
        alone = request["isolate"] and namespaces.unshare(kinds)
        uid = FIRST_UID + os.getpid()
        if os.fork() == 0:
            _guard(request, fd, alone, uid)
    finally:
        os._exit(0)


def _guard(request: dict[str, Any], fd: int, alone: bool, uid: int) -> None:
    """Watch one worker; when this process ends, so does everything that it started."""
    folder = tempfile.mkdtemp(prefix="episode-")
    died = ""
    try:
        namespaces.LIBC.prctl(namespaces.SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
        child = os.fork()
        if child == 0:
            _become_worker(request, fd, folder, uid, alone)
        died = _watch(child, fd, time.monotonic() + request["wall_s"])
    finally:
        if died:
            with contextlib.suppress(OSError):
                os.set_blocking(fd, False)
                os.write(fd, pack({"died": died}))
        shutil.rmtree(folder, ignore_errors=True)
        while not alone and (found := namespaces.descendants()):  # with a namespace, the kernel ends them
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        os._exit(0)


def _watch(child: int, fd: int, deadline: float) -> str:
    """Why the worker died; '' when it ended by itself or the node has closed the socket."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP | select.POLLHUP)
    while True:
        gone = poll.poll(LOOK_S * 1000)
        pid = -1
        while pid != 0:  # orphans are ours to wait for as well
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return "its process is gone"
            if pid == child:
                return _cause(os.waitstatus_to_exitcode(status))
        if gone:
            return ""
        if time.monotonic() > deadline:
            return "the episode's wall time is over"
        if len(namespaces.descendants()) > MOST_PROCESSES:
            return f"it started more than {MOST_PROCESSES} processes"


def _cause(code: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return f"killed after {used.ru_utime + used.ru_stime:.1f} s of CPU time"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended with exit code {code}"


def _become_worker(request: dict[str, Any], fd: int, folder: str, uid: int, alone: bool) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
        cpu_s, memory, file_bytes = request["cpu_s"], request["memory_mib"] << 20, request["file_bytes"]
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        limits = {"AS": memory, "FSIZE": file_bytes, "NOFILE": OPEN_FILES, "CORE": 0}
        if namespaces.drop_privileges(uid) or alone:  # else the limit would count every process of the user
            limits["NPROC"] = 2 * MOST_PROCESSES
        for name, most in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        asyncio.run(worker.serve(socket.socket(fileno=fd)))
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
