"""Environments in processes of their own, with limits: the node's side of fork_server.py.

It contains blocking calls, endless loops, memory, unlimited output, forks and crashes. The processes get none of the
node's descriptors and environment variables. They run as the node's user, so they can still attack the machine: run
nodes with hostile code in a container.
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
import time
from typing import Any

from common.process.install import CHECKOUT
from rollout_fleet.environments.isolation import backend, ipc_frames
from rollout_fleet.environments.protocol import Action, Limits, Observation, StepResult

logger = logging.getLogger(__name__)

START_S = 120.0
LOOK_S = 0.5
IMPORTS_BYTES = 1 << 20
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
SPARE_S = 60.0  # wall time added to the episode's own, so that the node notices first


class ProcessHost:
    """A fork server and the channels to its processes. Thread-safe; a channel belongs to the loop that opens it."""

    def __init__(self, modules: tuple[str, ...] = (), python: str = sys.executable, isolate: bool = True) -> None:
        """`python` imports `modules` once, before it forks; `isolate`: in namespaces, if the kernel allows it."""
        self._modules = modules
        self._python = python
        self._isolate = isolate
        self._lock = threading.Lock()
        self._server: _ForkServer | None = None
        self._learned: list[str] | None = None  # modules that the first episode imported
        self._closed = threading.Event()

    async def open(self, limits: Limits, wall_s: float, network: bool = True, file_bytes: int = 1 << 26) -> "Channel":
        """A process for one episode. Raises BackendFailed, with the reason, when no process can be started at all."""
        order = ipc_frames.ProcessOrder(
            cpu_s=limits.cpu_s,
            memory_mib=limits.memory_mib,
            file_bytes=file_bytes,
            wall_s=wall_s,
            network=network,
            isolate=self._isolate,
        )
        request = json.dumps(vars(order)).encode()
        here, there = socket.socketpair()
        sending = asyncio.get_running_loop().run_in_executor(None, self._hand_over, request, there)
        try:
            await asyncio.shield(sending)  # the thread needs `there` until it ends, also when the caller is cancelled
        except BaseException:
            here.close()
            raise
        reader, writer = await asyncio.open_connection(sock=here)
        return Channel(reader, writer)

    async def learn(self, channel: "Channel") -> None:
        """After the first answer of an episode: import in advance, from now on, what that episode has imported.

        A new fork server does so in the background. The old one serves until it is ready, also when the new one fails.
        """
        if self._learned is None:
            self._learned = []
            self._learned = [str(name) for name in await channel.ask(IMPORTS_BYTES, do="imports")]
            if self._learned:
                threading.Thread(target=self._warm_up, name="fork server", daemon=True).start()

    def close(self) -> None:
        """End the fork server; processes of episodes end when their channels are closed."""
        self._closed.set()
        with self._lock:
            self._end()

    def _hand_over(self, request: bytes, there: socket.socket) -> None:
        with there, self._lock:
            for attempt in (1, 2):
                if self._server is None or self._server.process.poll() is not None:
                    self._end()
                    self._server = _ForkServer(self._python, self._modules, self._learned or [], self._closed)
                try:
                    socket.send_fds(self._server.control, [request], [there.fileno()])
                    return
                except OSError as error:
                    self._end()  # it was killed: once more, with a new one
                    if attempt == 2:
                        raise backend.BackendFailed(f"environment processes cannot be started: {error}") from error

    def _warm_up(self) -> None:
        started = time.monotonic()
        try:
            fresh = _ForkServer(self._python, self._modules, self._learned or [], self._closed)
        except backend.BackendFailed as error:
            if not self._closed.is_set():
                logger.warning("the first episode's modules are not imported in advance: %s", error)
            self._learned = []
            return
        with self._lock:
            if fresh.threads > 1 or self._closed.is_set():  # a fork copies a thread's locks, but not the thread
                logger.info("modules that start threads are not imported in advance")
                self._learned = []
                fresh.end()
                return
            old = self._server
            self._server = fresh
        took = time.monotonic() - started
        logger.info("environments start from %d modules imported in advance (%.1f s)", len(self._learned or []), took)
        if old is not None:
            old.end(START_S)

    def _end(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None


class _ForkServer:
    """A process of fork_server.py that has said that it is ready."""

    def __init__(self, python: str, modules: tuple[str, ...], learned: list[str], closed: threading.Event) -> None:
        """Blocks until it is ready; `closed` ends the wait. Raises BackendFailed."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = "rollout_fleet.environments.isolation.fork_server"
        try:
            self.process = subprocess.Popen(
                [python, "-P", "-m", name, str(theirs.fileno()), *modules, "--", *learned],
                env=child_variables(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
            )
        except OSError as error:
            self.control.close()
            raise backend.BackendFailed(f"environment processes of {python} cannot be started: {error}") from error
        finally:
            theirs.close()
        said = self._ready(closed)
        self.control.settimeout(START_S)  # many requests at once fill the socket until some are forked
        if "error" in said:
            self.end()
            raise backend.BackendFailed(f"environment processes of {python} cannot be started: {said['error']}")
        self.threads = int(said["threads"])
        if not said["namespaces"]:
            logger.warning("no process namespaces here: environment processes are ended one by one, and have a network")

    def end(self, patience_s: float = 0.0) -> None:
        """Let it fork for `patience_s` what it was asked for, then kill it; its forked processes live on."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
            return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _ready(self, closed: threading.Event) -> dict[str, Any]:
        """Its first message, or the reason why there is none."""
        deadline = time.monotonic() + START_S
        self.control.settimeout(LOOK_S)
        while time.monotonic() < deadline and not closed.is_set():
            try:
                return json.loads(self.control.recv(65536) or b'{"error": "it ended at once"}')
            except TimeoutError:
                continue
            except (OSError, ValueError) as error:
                return {"error": str(error)}
        return {"error": "the node ends" if closed.is_set() else f"it was not ready after {START_S:g} s"}


class Channel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.idle = True  # no question is open: the process listens

    async def ask(self, limit_bytes: int, **request: Any) -> Any:
        """One request and its answer. Raises ObservationTooLarge, EnvironmentDied or EnvironmentRaised."""
        self.idle = False
        try:
            self._writer.write(ipc_frames.pack(request))
            await self._writer.drain()
        except ConnectionError as error:
            raise backend.EnvironmentDied("its process has ended") from error
        said = await ipc_frames.read(self._reader, max(limit_bytes, ipc_frames.SMALL_BYTES))
        if "died" in said:
            raise backend.EnvironmentDied(str(said["died"])[:200])
        self.idle = True
        if "error" in said:
            raise backend.EnvironmentRaised(str(said["error"]))
        return said["answer"]

    def close(self) -> None:
        """The guard sees it and ends the process with all that it started."""
        self._writer.close()


class ProcessBackend(backend.Backend):
    def __init__(
        self, path: str, options: dict[str, Any], limits: Limits, timeout_s: float, host: ProcessHost, shares_seed: bool
    ) -> None:
        super().__init__(options, shares_seed)
        self._path = path
        self._limits = limits
        self._wall_s = timeout_s + SPARE_S
        self._host = host

    def environment(self, problem: dict[str, Any], seed: int, group_seed: int) -> backend.EnvironmentHandle:
        request = {"path": self._path, "problem": problem, "keywords": self.keywords(seed, group_seed)}
        return _ProcessHandle(self._host, self._limits, self._wall_s, request)

    async def run_agent(self, problem: dict[str, Any], seed: int, group_seed: int, **access: str) -> Any:
        keywords = {"problem": problem, **self.keywords(seed, group_seed), **access}
        with contextlib.closing(await self._host.open(self._limits, self._wall_s)) as channel:
            said = await channel.ask(ipc_frames.SMALL_BYTES, do="call", path=self._path, keywords=keywords)
            await self._host.learn(channel)
            return said

    def close(self) -> None:
        self._host.close()


class _ProcessHandle(backend.EnvironmentHandle):
    def __init__(self, host: ProcessHost, limits: Limits, wall_s: float, request: dict[str, Any]) -> None:
        self._host = host
        self._limits = limits
        self._wall_s = wall_s
        self._request = request
        self._limit_bytes = limits.observation_chars * ipc_frames.CHAR_BYTES + ipc_frames.SMALL_BYTES
        self._channel: Channel | None = None

    async def reset(self) -> Observation:
        self._channel = await self._host.open(self._limits, self._wall_s)
        said = await self._channel.ask(self._limit_bytes, do="reset", **self._request)
        await self._host.learn(self._channel)
        return ipc_frames.observation_of(said)

    async def step(self, action: Action) -> StepResult:
        assert self._channel is not None
        return ipc_frames.result_of(await self._channel.ask(self._limit_bytes, do="step", action=action))

    async def close(self) -> None:
        if self._channel is None:
            return
        with contextlib.closing(self._channel), contextlib.suppress(Exception):
            if self._channel.idle:
                async with asyncio.timeout(backend.CLOSE_S):
                    await self._channel.ask(ipc_frames.SMALL_BYTES, do="close")


def child_variables() -> dict[str, str]:
    """The node's variables that environment processes get; secrets are not among them."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    sources = [] if CHECKOUT is None else [str(CHECKOUT)]  # a wheel lies among packages of this Python alone
    paths = [*sources, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"}
