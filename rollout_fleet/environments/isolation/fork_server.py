"""The process side of environments in processes of their own: three kinds of process, in this order.

    node --socket of one episode--> fork server --fork--> guard (pid 1 of its own namespace) --fork--> worker

The **fork server** is small, single-threaded and without secrets. It imports the environment's module once, and a fork
of it costs a few milliseconds. The **guard** watches one episode. It ends all processes below it when the worker ends,
or when the node closes its end of the episode's socket or dies. It does the same when the wall time is over or too many
processes run. The **worker** runs the environment and answers the node's requests one at a time.

python -m rollout_fleet.environments.isolation.fork_server CONTROL_FD MODULE... -- LEARNED...
(started by process_backend.py; standard library only). LEARNED are the modules that an earlier episode has imported:
one that fails to import here is left to the episodes.
"""

import asyncio
import contextlib
import ctypes
import importlib
import inspect
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_fleet.environments.isolation import ipc_frames
from rollout_fleet.environments.isolation.backend import EnvironmentDied, close_environment
from rollout_fleet.environments.isolation.ipc_frames import ProcessOrder

MOST_PROCESSES = 64  # an episode with more is ended; the kernel refuses twice as many
FIRST_UID = 1_000_000_000  # real users of episodes, where the node runs as root
LOOK_S = 0.5  # between two counts of an episode's processes, which cost CPU time
UNLIMITED_LOOK_S = 0.05  # where the kernel refuses no process, or tells of no end
ASKED_S = 5.0  # for the first request: a node that cannot send it reads no reason
OPEN_FILES = 256
REQUEST_BYTES = 1 << 30
MOST_IMPORTS = 8192  # names of modules that are told to the node

# Linux: flags of unshare, options of prctl, and the version of capset's header
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS, SET_SECUREBITS, DROP_BOUND = 36, 38, 28, 24
NO_ROOT_LOCKED = 0b11  # user 0 has no privileges, and the setting is locked
CAPABILITY_VERSION_3 = 0x20080522
LIBC = ctypes.CDLL(None)


# -------------------------------------------------------------------- fork server


def main(arguments: list[str]) -> int:
    """Serve until the node closes the control socket."""
    control = socket.socket(fileno=int(arguments[0]))
    _search_working_directory()
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children: no wait for them here
    LIBC.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # guards too: the process 1 of a container may not reap them
    while True:
        request, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not request:
            return 0
        if os.fork() == 0:
            _become_guard(ProcessOrder(**json.loads(request)), fds[0])
        os.close(fds[0])


def _search_working_directory() -> None:
    """Find the job's modules, here and in processes of environments; never in the place of ours."""
    sys.path.append(os.getcwd())
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), os.getcwd()]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _namespaces_work() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if _unshare(NEW_PID) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _become_guard(order: ProcessOrder, fd: int) -> None:
    """In the first child: leave the fork server's world, then continue in a child that is the first of its own."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.closerange(3, fd)
        os.closerange(fd + 1, min(os.sysconf("SC_OPEN_MAX"), 1 << 20))
        kinds = NEW_PID | (0 if order.network else NEW_NET)
        alone = order.isolate and _unshare(kinds)
        uid = FIRST_UID + os.getpid()
        if os.fork() == 0:
            _guard(order, fd, alone, uid)
    finally:
        os._exit(0)


# -------------------------------------------------------------------- guard


def _guard(order: ProcessOrder, fd: int, alone: bool, uid: int) -> None:
    """Watch one worker; when this process ends, so does everything that it started."""
    folder = died = ""
    try:
        try:
            folder = tempfile.mkdtemp(prefix="episode-", dir=_open_folder())
        except OSError as error:
            died = f"no temporary folder: {error}"
            select.select([fd], [], [], ASKED_S)
            return
        LIBC.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
        child = os.fork()
        if child == 0:
            _become_worker(order, fd, folder, uid, alone)
        limited = alone or (os.geteuid() == 0 and _is_user(uid))
        died = _watch(child, fd, time.monotonic() + order.wall_s, LOOK_S if limited else UNLIMITED_LOOK_S)
    finally:
        if died:
            with contextlib.suppress(OSError):
                os.set_blocking(fd, False)
                os.write(fd, ipc_frames.pack({"died": died}))
        _end_all(alone)
        shutil.rmtree(folder, ignore_errors=True)  # nothing writes there any more
        os._exit(0)


def _open_folder() -> str:
    """Where temporary folders lie: TMPDIR, but /tmp where a worker of another user could not reach its own there."""
    found = os.path.realpath(tempfile.gettempdir())
    above = [found[:end] or "/" for end, letter in enumerate(f"{found}/") if letter == "/"]
    return "/tmp" if os.geteuid() == 0 and not all(os.stat(path).st_mode & 0o001 for path in above) else found


def _end_all(alone: bool) -> None:
    """Kill everything below this process and wait for it."""
    if alone and os.getpid() == 1:  # nowhere else: -1 is everything in this namespace except this process
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    while not alone and (found := _descendants()):
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _watch(child: int, fd: int, deadline: float, look_s: float) -> str:
    """Why the worker died; '' when it ended by itself or the node has closed the socket."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP | select.POLLHUP)
    try:
        poll.register(os.pidfd_open(child), select.POLLIN)
    except (OSError, AttributeError):  # a kernel, or a build of Python, without them
        look_s = UNLIMITED_LOOK_S
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        gone = any(found == fd for found, _ in poll.poll(min(look_s, left_s) * 1000 + 1))
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
        if len(_descendants()) > MOST_PROCESSES:
            return f"it started more than {MOST_PROCESSES} processes"


def _cause(code: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return f"killed after {used.ru_utime + used.ru_stime:.1f} s of CPU time"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended with exit code {code}"


# -------------------------------------------------------------------- worker


def _become_worker(order: ProcessOrder, fd: int, folder: str, uid: int, alone: bool) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
        limits = {
            resource.RLIMIT_AS: order.memory_mib << 20,
            resource.RLIMIT_FSIZE: order.file_bytes,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 0,
        }
        if _drop_privileges(uid) or alone:  # else the limit would count every process of the user
            limits[resource.RLIMIT_NPROC] = 2 * MOST_PROCESSES
        resource.setrlimit(resource.RLIMIT_CPU, (order.cpu_s, order.cpu_s + 1))
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))
        asyncio.run(_serve(socket.socket(fileno=fd)))
        code = 0
    finally:
        os._exit(code)


async def _serve(connection: socket.socket) -> None:
    """Answer until the node closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)
    episode = _Episode()
    with contextlib.suppress(EnvironmentDied):  # the node has closed its end
        while True:
            request = await ipc_frames.read(reader, REQUEST_BYTES)
            try:
                answer = ipc_frames.pack({"answer": await episode.answer(**request)})
            except (KeyboardInterrupt, SystemExit) as error:
                answer = ipc_frames.pack({"error": f"raised {type(error).__name__}"})
            except Exception as error:
                answer = ipc_frames.pack({"error": f"raised {type(error).__name__}: {error}"[:2000]})
            writer.write(answer)
            await writer.drain()


class _Episode:
    """The environment of one episode, or one agent."""

    def __init__(self) -> None:
        self._environment: Any = None
        self._imported_before = set(sys.modules)

    async def answer(self, do: str, path: str = "", action: Any = None, **given: Any) -> Any:
        """The answer to a request; `path` is 'module:name'."""
        if do == "step":
            result = await self._environment.step(ipc_frames.action_of(action))
            return replace(result, observation="") if result.done else result  # no code reads it
        if do == "close":
            return await close_environment(self._environment)
        if do == "imports":  # modules that are here since this process began, without the standard library's, in order
            new = [name for name in list(sys.modules) if name not in self._imported_before]
            own = [name for name in new if name.partition(".")[0] not in sys.stdlib_module_names]
            return [name for name in own if getattr(sys.modules.get(name), "__spec__", None) is not None][:MOST_IMPORTS]
        module, _, name = path.partition(":")
        found = getattr(importlib.import_module(module), name)
        if do == "call":
            result = found(**given["keywords"])
            return await result if inspect.isawaitable(result) else result
        self._environment = found(given["problem"], **given["keywords"])
        return await self._environment.reset()


# -------------------------------------------------------------------- Linux namespaces and privileges


def _unshare(flags: int) -> bool:
    """Leave the namespaces of `flags`; children of this process are born in the new ones.

    Returns False where the kernel or the container does not allow it.
    """
    uid = os.getuid()
    gid = os.getgid()
    if LIBC.unshare(flags) == 0:  # with CAP_SYS_ADMIN
        return True
    if uid != os.geteuid():  # a worker that dropped root's rights: its limit would count all processes of root there
        return False
    if LIBC.unshare(flags | NEW_USER) != 0:
        return False
    with contextlib.suppress(OSError):  # files get an owner that exists outside
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "wb") as file:
                file.write(text.encode())
    return True


def _drop_privileges(real_uid: int) -> bool:
    """No later program gains rights. If run by root: drop all capabilities and make `real_uid` the real user.

    The kernel counts processes by the real user, and RLIMIT_NPROC does not limit root. The effective user stays, so
    that files stay readable. Returns whether the real user is another one now.
    """
    LIBC.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid() != 0:
        return False
    LIBC.prctl(SET_SECUREBITS, NO_ROOT_LOCKED, 0, 0, 0)
    for capability in range(64):
        LIBC.prctl(DROP_BOUND, capability, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.setgroups([])
    try:
        os.setresuid(real_uid, 0, 0)
    except OSError:  # not allowed in this container
        return False
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    return LIBC.capset(header, (ctypes.c_uint32 * 6)()) == 0


def _is_user(uid: int) -> bool:
    """Whether a process here may have this user: a rootless container has few of them."""
    try:
        ranges = [map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return False
    return any(first <= uid < first + count for first, _, count in ranges)


def _descendants() -> list[int]:
    """Process ids, as /proc has them, of everything below this process."""
    # /proc/self differs from os.getpid() in a process namespace without a /proc of its own
    family = [int(os.readlink("/proc/self"))]
    for pid in family:  # the list grows meanwhile
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    family += map(int, file.read().split())
    return family[1:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
