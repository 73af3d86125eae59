"""Start, watch, restart and stop the processes of a job on this machine. Knows nothing of what they do.

Every child leads a process group of its own, so a terminal's Ctrl-C reaches only the supervisor, which decides
the order. Children end with the supervisor even when it is killed with -9 (common/process/lifecycle.py); what a child
started itself is remembered and ended with it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from common.errors import EXIT_HOPELESS, EXIT_USAGE, EXITS_FOR_GOOD, HopelessError, SlipstreamError, UsageError
from common.process.lifecycle import SUPERVISOR_ENV
from common.process.logs import last_lines
from launch.up.devices import Cores

SCAN_EVERY_S = 1.0
SCAN_SHARE = 0.05  # Scans of many processes take this share of the time at most.
LOG_LINES_SHOWN = 15
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
DRAIN_S = 330.0  # a node's episodes in flight, or a learner's step and checkpoint
Sink = Callable[[str, Mapping[str, object]], None]


@dataclass(frozen=True)
class RoleSpec:
    name: str  # 'broker', 'learner', 'node-0', ...
    argv: Sequence[str]
    log: Path  # gets stdout and stderr, appended
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment
    cores: Cores = None  # CPU cores that it and its children may use
    child_cores: Cores = None  # cores of the processes that it starts, while it stays free itself
    max_restarts: int = 0  # after crashes, but never after one of EXITS_FOR_GOOD


class Role:
    """One supervised process and the processes that it started; raises OSError when the command does not exist."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self.restarts = 0
        self.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self.running else None

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def start(self) -> None:
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **self.spec.env, SUPERVISOR_ENV: str(os.getpid())}
        with self.spec.log.open("ab") as log:
            self._process = subprocess.Popen(
                list(self.spec.argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, process_group=0
            )
        self.exit_code: int | None = None  # exit code of the last process that ended
        self.restart_at: float | None = None  # monotonic
        self.descendants: dict[int, psutil.Process] = {}
        if self.spec.cores is not None:
            with contextlib.suppress(OSError):  # it may have ended already
                os.sched_setaffinity(self._process.pid, self.spec.cores)

    def poll(self) -> bool:
        """True once, when the process has ended since the last call; what it left behind is killed."""
        if not self.running or self._process.poll() is None:
            return False
        self.exit_code = self._process.returncode
        self._kill_descendants()
        return True

    def terminate(self) -> None:
        """SIGTERM to the process alone: it drains and tells its own children."""
        self._process.terminate()  # does nothing when it has ended

    def kill(self) -> None:
        """SIGKILL to the process, its group and everything that it started."""
        if self.running:
            scan([self])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.exit_code = self._process.wait(timeout=10)
        self._kill_descendants()

    def _kill_descendants(self) -> None:
        for child in self.descendants.values():
            with contextlib.suppress(psutil.Error):  # psutil compares creation times: a reused pid is left alone
                child.kill()
        self.descendants = {}


class Supervisor:
    """Roles in the order in which they were started; `sink` is told what happens to them, as (kind, details)."""

    def __init__(self, sink: Sink) -> None:
        self.roles: dict[str, Role] = {}
        self.restarts: Collection[str] | None = None  # only these are started again; None: every role
        self._sink = sink
        self._scan_at = 0.0

    def start(self, spec: RoleSpec) -> Role:
        role = self.roles[spec.name] = Role(spec)
        self._sink("started", {"role": spec.name, "pid": role.pid, "log": str(spec.log)})
        return role

    def poll(self) -> list[Role]:
        """Notice ends, schedule and do restarts; returns roles that ended just now and will not come back."""
        now = time.monotonic()
        if now >= self._scan_at:
            worked_s = -time.thread_time()  # a busy machine that lets it wait is no reason to look less often
            scan(self.roles.values())
            worked_s += time.thread_time()
            self._scan_at = now + max(SCAN_EVERY_S, worked_s / SCAN_SHARE)
        ended = [role for role in self.roles.values() if role.poll() and not self._plan_restart(role, now)]
        for role in self.roles.values():
            if role.restart_at is not None and now >= role.restart_at and self._may_restart(role):
                role.restarts += 1
                role.start()
                self._sink("restarted", {"role": role.spec.name, "pid": role.pid, "restart": role.restarts})
        return ended

    def stop(self, names: Sequence[str], timeout_s: float) -> list[str]:
        """SIGTERM to these roles, wait for them, kill what is left; returns the names that had to be killed."""
        self.restarts = ()
        roles = [self.roles[name] for name in names if name in self.roles]
        scan(roles)
        for role in roles:
            role.restart_at = None
            role.terminate()
        deadline = time.monotonic() + timeout_s
        while any(role.running for role in roles) and time.monotonic() < deadline:
            for role in roles:
                if role.poll():
                    self._sink("ended", {"role": role.spec.name, "exit_code": role.exit_code})
            time.sleep(0.02)
        late = [role for role in roles if role.running]
        for role in late:
            role.kill()
            self._sink("killed", {"role": role.spec.name, "after_s": timeout_s})
        return [role.spec.name for role in late]

    def kill_all(self) -> None:
        self.restarts = ()
        for role in self.roles.values():
            role.kill()

    def _may_restart(self, role: Role) -> bool:
        return self.restarts is None or role.spec.name in self.restarts

    def _plan_restart(self, role: Role, now: float) -> bool:
        """Whether a role that just ended will be started again."""
        code = role.exit_code
        name = role.spec.name
        if code == 0 or not self._may_restart(role):
            self._sink("ended", {"role": name, "exit_code": code})
            return False
        if code in EXITS_FOR_GOOD or role.restarts >= role.spec.max_restarts:
            self._sink("gave_up", {"role": name, "exit_code": code, "restarts": role.restarts})
            return False
        wait_s = min(FIRST_BACKOFF_S * 2**role.restarts, LONGEST_BACKOFF_S)
        role.restart_at = now + wait_s
        self._sink("crashed", {"role": name, "exit_code": code, "restart_in_s": wait_s})
        return True


def scan(roles: Iterable[Role]) -> None:
    """Roles that run remember what they started, pinned to `child_cores`; one walk over all processes serves them."""
    owners = {role.pid: role for role in roles if role.running}
    for role in owners.values():
        role.descendants = {pid: child for pid, child in role.descendants.items() if child.is_running()}
    for child in psutil.Process().children(recursive=True):  # parents before their children
        with contextlib.suppress(psutil.Error):
            if child.pid not in owners and (role := owners.get(child.ppid())) is not None:
                owners[child.pid] = role
                role.descendants[child.pid] = child
                if role.spec.child_cores is not None:
                    pin(child.pid, role.spec.child_cores)


def end_error(role: Role) -> SlipstreamError:
    """The error about a role that ended for good: its refusal, or the end of its log."""
    name = role.spec.name
    lines = last_lines(role.spec.log, LOG_LINES_SHOWN)
    if role.exit_code == EXIT_USAGE and lines:
        return UsageError(f"{name}: {lines[-1]}")
    tries = f" after {role.restarts} restarts" if role.restarts else ""
    shown = "".join(f"\n  {line}" for line in lines)
    kind = HopelessError if role.exit_code == EXIT_HOPELESS else SlipstreamError
    how = describe_exit(role.exit_code)
    return kind(f"{name} failed{tries}: {how}; the end of its log, {role.spec.log}:{shown}")


def pin(pid: int, cores: frozenset[int]) -> None:
    """Bind every thread of a process to `cores`; threads that it starts later inherit that."""
    with contextlib.suppress(OSError):  # it may end at any moment
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores)


def describe_exit(code: int | None) -> str:
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
