"""Environments in processes of their own, with limits: the node's side of zygote.py.

What is contained: blocking, endless loops, memory, output without end, forks, crashes. The processes get none of the
node's descriptors and environment variables. They run under the node's user: this is no wall against code that attacks
the machine; run such nodes in a container.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rollout_fleet.environments.isolation import ipc_frames
from rollout_fleet.environments.isolation.placement import (
    CLOSE_S,
    EnvironmentDied,
    EnvironmentRaised,
    Flood,
    Seat,
    StageFailed,
)
from rollout_fleet.environments.protocol import Action, Limits, Observation, StepResult

logger = logging.getLogger(__name__)

START_S = 120.0
ROOT = Path(__file__).resolve().parents[3]
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
SPARE_S = 60.0  # of wall time beyond the episode's own: the node is to notice first


class ProcessHost:
    """One zygote and the channels to what it forks. Thread-safe; channels belong to the loop that opens them."""

    def __init__(self, modules: tuple[str, ...] = (), python: str = sys.executable, isolate: bool = True) -> None:
        """Nothing is started yet.

        Args:
            modules: imported once, before anything is forked.
            python: the interpreter, for environments whose libraries do not fit the node's.
            isolate: in namespaces, where the kernel allows them.
        """
        self._modules, self._python, self._isolate = modules, python, isolate
        self._lock = threading.Lock()
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.namespaces = False

    async def open(self, limits: Limits, wall_s: float, network: bool = True, file_bytes: int = 1 << 26) -> "Channel":
        """A process for one episode.

        Raises:
            StageFailed: environment processes cannot be started at all; the message says why.
        """
        request = {
            "cpu_s": limits.cpu_s,
            "memory_mib": limits.memory_mib,
            "wall_s": wall_s,
            "network": network,
            "isolate": self._isolate,
            "file_bytes": file_bytes,
        }
        here, there = socket.socketpair()
        sending = asyncio.get_running_loop().run_in_executor(None, self._hand_over, json.dumps(request).encode(), there)
        try:
            await asyncio.shield(sending)  # the thread needs `there` to its end, whoever gives up meanwhile
        except BaseException:
            here.close()
            raise
        reader, writer = await asyncio.open_connection(sock=here)
        return Channel(reader, writer)

    def _hand_over(self, request: bytes, there: socket.socket) -> None:
        with there:
            self._send(request, there.fileno())

    def _send(self, request: bytes, fd: int) -> None:
        with self._lock:
            for attempt in (1, 2):
                self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [request], [fd])
                    return
                except OSError as error:
                    self._end()  # somebody killed it: once more, with a new one
                    if attempt == 2:
                        raise StageFailed(f"environment processes cannot be started: {error}") from error

    def _start(self) -> None:
        if self._zygote is not None and self._zygote.poll() is None:
            return
        self._end()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._zygote = subprocess.Popen(
                [
                    self._python,
                    "-m",
                    "rollout_fleet.environments.isolation.fork_server",
                    str(theirs.fileno()),
                    *self._modules,
                ],
                env=child_variables(),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            control.close()
            raise StageFailed(f"environment processes of {self._python} cannot be started: {error}") from error
        finally:
            theirs.close()
        control.settimeout(START_S)
        try:
            said: dict[str, Any] = json.loads(control.recv(65536) or b'{"error": "it ended at once"}')
        except (OSError, ValueError) as error:
            said = {"error": str(error)}
        self._control = control
        if "error" in said:
            self._end()
            raise StageFailed(f"environment processes of {self._python} cannot be started: {said['error']}")
        self.namespaces = bool(said["namespaces"])
        if not self.namespaces:
            logger.warning("no process namespaces here: environment processes are ended one by one, and have a network")

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._zygote.pid, signal.SIGKILL)
            self._zygote.wait()
            self._zygote = None

    def close(self) -> None:
        """End the zygote; processes of episodes end when their channels are closed."""
        with self._lock:
            self._end()


class Channel:
    """The connection to one episode's process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.idle = True  # no question is open: the process listens

    async def ask(self, limit_bytes: int, **request: Any) -> Any:
        """One request and its answer.

        Raises:
            Flood, EnvironmentDied: as the names say.
            EnvironmentRaised: it raised; the message has type and text.
        """
        self.idle = False
        try:
            self._writer.write(ipc_frames.pack({**request, "limit_bytes": limit_bytes}))
            await self._writer.drain()
        except ConnectionError as error:
            raise EnvironmentDied("its process has ended") from error
        said = await ipc_frames.read(self._reader, max(limit_bytes, ipc_frames.SMALL_BYTES))
        if "died" in said:
            raise EnvironmentDied(str(said["died"])[:200])
        if "flood" in said:
            raise Flood(str(said["flood"])[:200])
        self.idle = True
        if "error" in said:
            raise EnvironmentRaised(str(said["error"]))
        return said["answer"]

    def close(self) -> None:
        """The guard sees it and ends the process with all that it started."""
        self._writer.close()


class ProcessStage:
    """Each episode in a process of its own."""

    def __init__(
        self, path: str, options: dict[str, Any], limits: Limits, timeout_s: float, host: ProcessHost, shares_seed: bool
    ) -> None:
        self._path, self._options, self._limits = path, options, limits
        self._wall_s, self._host, self._shares_seed = timeout_s + SPARE_S, host, shares_seed

    def seat(self, problem: dict[str, Any], seed: int, group_seed: int) -> Seat:
        shared = {"group_seed": group_seed} if self._shares_seed else {}
        request = {"path": self._path, "problem": problem, "keywords": {"seed": seed, **shared, **self._options}}
        return _ProcessSeat(self._host, self._limits, self._wall_s, request)


class _ProcessSeat:
    def __init__(self, host: ProcessHost, limits: Limits, wall_s: float, request: dict[str, Any]) -> None:
        self._host, self._limits, self._wall_s, self._request = host, limits, wall_s, request
        self._limit_bytes = limits.observation_chars * ipc_frames.CHAR_BYTES + ipc_frames.SMALL_BYTES
        self._channel: Channel | None = None

    async def reset(self) -> Observation:
        self._channel = await self._host.open(self._limits, self._wall_s)
        return ipc_frames.observation_of(await self._channel.ask(self._limit_bytes, do="reset", **self._request))

    async def step(self, action: Action) -> StepResult:
        assert self._channel is not None
        answer = await self._channel.ask(self._limit_bytes, do="step", action=ipc_frames.action_json(action))
        return ipc_frames.result_of(answer)

    async def close(self) -> None:
        if self._channel is None:
            return
        try:
            if self._channel.idle:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(CLOSE_S):
                        await self._channel.ask(ipc_frames.SMALL_BYTES, do="close")
        finally:
            self._channel.close()


def child_variables() -> dict[str, str]:
    """What environment processes get of the node's variables: no secrets."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    paths = [str(ROOT), os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"}
