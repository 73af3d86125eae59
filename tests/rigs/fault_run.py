"""Starts the processes of one run, does harm to them, and ends the run with a check of the promise."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from broker.client.calls import LearnerBroker
from broker.client.connect import Access, connect
from broker.contract import LedgerEntry
from common.config.schema import Config, StalenessConfig
from common.errors import BrokerError, BrokerUnreachable
from common.process.run_dir import RunDir
from tests.rigs import fault_roles
from tests.rigs.brokers import job
from tests.rigs.processes import ROOT, Forked
from tests.rigs.promise import (
    GROUPS_PER_STEP,
    HEARTBEAT_S,
    LEASE_S,
    MAX_STALENESS,
    PROMPTS,
    LearnerOptions,
    NodeOptions,
    always_fails,
    check_promise,
    final_ledger,
    trained_lines,
)
from tests.rigs.proxy import Proxy
from tests.rigs.redis_servers import RedisUnderTest, free_port
from tests.rigs.waiting import LIMIT_S, until

WILD_CLOCK = Path(__file__).with_name("wild_clock")

Process = subprocess.Popen[bytes]
FAULTS = 8
MEMORY_BYTES = 8 << 10  # a part of the window, so that groups are read from the store, too


class FaultRig:
    """One run in `run_dir`; `random` decides when and whom. Close it to end whatever it started.

    With `forks` processes do not begin with imports, so a recovery with a new process is shorter than a real one.
    """

    def __init__(
        self,
        run_dir: Path,
        seed: int,
        poisoned: int | None = None,
        wild_clock: bool = False,
        redis: str = "",
        forks: bool = False,
    ) -> None:
        self.run_dir, self.random, self.seed = run_dir, random.Random(seed), seed
        self.poisoned, self._wild_clock = poisoned, wild_clock
        self._forks = forks and not wild_clock  # the clock is set when Python starts
        fsync = "everysec" if redis == "everysec" else "always"
        self._redis = RedisUnderTest(run_dir / "redis", fsync, redis == "replica") if redis else None
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.broker_process: Process | None = None
        self.learner_process: Process | None = None
        self.nodes: dict[str, Process] = {}
        self.broker_options: dict[str, Any] = {"memory_bytes": MEMORY_BYTES}
        self.learner_options: dict[str, Any] = {}
        self.max_attempts = 50
        self._incarnation = 0
        self._started: list[Process] = []
        self._proxy: Proxy | None = None
        self._observer: LearnerBroker | None = None
        rows = [{"n": n, "poison": always_fails(n, poisoned)} for n in range(PROMPTS)]
        (run_dir / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    # ---------------------------------------------------------------- processes

    def start_broker(self, wait: bool = True, **options: Any) -> Process:
        """The run's broker; keyword arguments are keys of the config's section `broker`, kept for later starts."""
        self.broker_options |= options
        self.broker_process = self.start("broker", self.broker_config())
        if wait:
            self.eventually(self.broker_answers, "the broker does not answer")
        return self.broker_process

    def broker_config(self) -> Config:
        """The job's config with what the broker is told."""
        section = {"address": self.address, "lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S}
        if self._redis is not None:
            section |= {"store": "redis", "redis": self._redis.address, "durability": self._redis.durability}
        made = job(self.run_dir, GROUPS_PER_STEP, **(section | self.broker_options))
        tasks = msgspec.structs.replace(made.tasks, max_attempts=self.max_attempts)
        return msgspec.structs.replace(made, tasks=tasks, staleness=StalenessConfig(max=MAX_STALENESS))

    def start_learner(self, address: str | None = None, **options: Any) -> Process:
        """A learner that resumes from the checkpoint, as the next incarnation."""
        self._incarnation += 1
        where = {"address": address or self.address, "run_dir": str(self.run_dir), **self.learner_options}
        self.learner_process = self.start("learner", LearnerOptions(**where, incarnation=self._incarnation, **options))
        return self.learner_process

    def start_node(self, name: str, address: str | None = None, **options: Any) -> Process:
        options = {"seed": self.seed, **options}
        self.nodes[name] = self.start("node", NodeOptions(address=address or self.address, name=name, **options))
        return self.nodes[name]

    def start(self, role: str, options: msgspec.Struct) -> Process:
        """One process; its output goes to RUN/ROLE-NUMBER.log."""
        log = self.run_dir / f"{role}-{len(self._started)}.log"
        process = self._fork(role, options, log) if self._forks else self._spawn(role, options, log)
        self._started.append(process)
        return process

    def _fork(self, role: str, options: msgspec.Struct, log: Path) -> Process:
        process: Any = Forked(fault_roles.Role, fault_roles.forked, role, msgspec.json.encode(options), log)
        return process

    def _spawn(self, role: str, options: msgspec.Struct, log: Path) -> Process:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        if self._wild_clock:
            paths.insert(0, str(WILD_CLOCK))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "tests.rigs.fault_roles", role, msgspec.json.encode(options).decode()]
        with log.open("wb") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def start_all(
        self, nodes: int = 2, address: str | None = None, learner_deadline_s: float = 30.0, **node_options: Any
    ) -> None:
        """Broker, learner and nodes n0, n1, ...; returns when the run is well under way."""
        self.start_broker()
        self.start_learner(address, deadline_s=learner_deadline_s)
        for number in range(nodes):
            self.start_node(f"n{number}", address, **node_options)
        self.warm_up()

    def start_behind_proxy(self, **options: Any) -> Proxy:
        """As `start_all`; learner and nodes are connected through the proxy that is returned."""
        self._proxy = Proxy(self.address)
        self.start_all(address=self._proxy.address, **options)
        return self._proxy

    def warm_up(self, steps: int = 4) -> None:
        """Wait until that many steps are trained, and a random moment longer; no node may end meanwhile."""

        def all_run() -> None:
            ended = [name for name, process in self.nodes.items() if process.poll()]
            assert not ended, f"{', '.join(ended)} ended:\n{self.log_of('node')[-3000:]}"

        self.eventually(lambda: len(trained_lines(self.run_dir)) >= steps, "the run does not get going", check=all_run)
        self.pause()

    @property
    def with_redis(self) -> bool:
        return self._redis is not None

    @property
    def redis(self) -> RedisUnderTest:
        assert self._redis is not None, "this run has no Redis"
        return self._redis

    # ---------------------------------------------------------------- harm and recovery

    def pause(self, least_s: float = 0.0, most_s: float = 0.4) -> None:
        """A random time."""
        time.sleep(self.random.uniform(least_s, most_s))

    def kill(self, process: Process) -> float:
        """SIGKILL; returns when it was done, monotonic seconds."""
        assert process.poll() is None, "the process had ended before it was killed"
        process.kill()
        at_s = time.monotonic()
        process.wait(LIMIT_S)
        return at_s

    def stop_for(self, process: Process, seconds: float) -> float:
        """SIGSTOP, SIGCONT after `seconds`; returns when it continued, monotonic seconds."""
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        return time.monotonic()

    def new_steps_s(self, since_s: float, steps: int = 3, incarnation: int = 0) -> float:
        """Seconds from `since_s` until a learner, of that incarnation at least, had trained `steps` new steps.

        Three, since the groups of two may have been ready before.
        """
        known = [line for line in trained_lines(self.run_dir) if line.at_s <= since_s]
        highest = max((line.step for line in known), default=-1) + steps

        def reached() -> float | None:
            lines = [x for x in trained_lines(self.run_dir) if x.at_s > since_s and x.incarnation >= incarnation]
            return next((x.at_s for x in lines if x.step >= highest), None)

        return self.eventually(reached, f"step {highest} was not trained") - since_s

    def leased_by(self, node: str) -> list[int]:
        """Tasks that the node leases now."""
        return [e.serial for e in self.ledger() if e.state == "leased" and e.nodes[-1] == node]

    def done_elsewhere_s(self, serials: list[int], since_s: float, node: str) -> float:
        """Seconds from `since_s` until other processes than `node`'s have generated all these groups."""

        def done() -> bool:
            entries = [e for e in self.ledger() if e.serial in serials]
            return all(e.state in ("ready", "taken", "committed") and e.nodes[-1] != node for e in entries)

        self.eventually(done, f"tasks {serials} of {node} were not generated by another node")
        return time.monotonic() - since_s

    # ---------------------------------------------------------------- looking

    @property
    def observer(self) -> LearnerBroker:
        if self._observer is None:
            self._observer = connect(Access(address=self.address, role="observer", deadline_s=LIMIT_S, retry_s=0.5))
        return self._observer

    def broker_answers(self) -> bool:
        """Whether the broker that was started last is at its address."""
        process, here = self.broker_process, RunDir(self.run_dir).broker()
        assert process is not None and process.poll() is None, self.log_of("broker")
        if here is None or here.pid != process.pid:
            return False
        try:
            with connect(Access(address=self.address, role="observer", deadline_s=10.0, retry_s=0.2)) as observer:
                return observer.status().address != ""
        except (BrokerError, BrokerUnreachable):
            return False

    def ledger(self) -> list[LedgerEntry]:
        return self.observer.ledger()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Details of the events of one kind, from RUN/events.jsonl."""
        return [event["detail"] for event in self.all_events() if event["kind"] == kind]

    def all_events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_bytes().splitlines()]

    def log_of(self, role: str) -> str:
        """All that processes of this role wrote."""
        paths = sorted(self.run_dir.glob(f"{role}-*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(path.read_text(errors="replace") for path in paths)

    def eventually(
        self,
        condition: Callable[[], Any],
        otherwise: str,
        seconds: float = LIMIT_S,
        *,
        check: Callable[[], object] = lambda: None,
    ) -> Any:
        """As `until`; the text of a failure has the learner's log."""
        return until(condition, otherwise, seconds, check=check, told=lambda: self.log_of("learner")[-3000:])

    # ---------------------------------------------------------------- the end

    def finish(self) -> list[LedgerEntry]:
        """Train a few steps more, drain the learner, see the others end, check the promise; returns the ledger."""
        assert self.learner_process is not None and self.broker_process is not None
        self.new_steps_s(time.monotonic(), steps=4)
        (self.run_dir / "drain").touch()
        assert self.learner_process.wait(LIMIT_S) == 0, self.log_of("learner")[-3000:]
        ledger = self.ledger()
        for name, process in self.nodes.items():
            assert process.wait(LIMIT_S) == 0, f"{name}\n{self.log_of('node')[-3000:]}"
        self.broker_process.send_signal(signal.SIGTERM)
        assert self.broker_process.wait(LIMIT_S) == 0, self.log_of("broker")[-3000:]
        check_promise(self.run_dir, ledger, self.poisoned)
        check_promise(self.run_dir, final_ledger(self.run_dir), self.poisoned)
        return ledger

    def close(self) -> None:
        """Kill what still runs."""
        if self._observer is not None:
            self._observer.close()
        if self._proxy is not None:
            self._proxy.close()
        for process in self._started:
            process.kill()  # a stopped one too
        for process in self._started:
            process.wait(LIMIT_S)
        if self._redis is not None:
            self._redis.close()


def rage(rig: FaultRig, proxy: Proxy, kinds: Sequence[str]) -> float:
    """Several faults, one after another; returns when the last one was over, monotonic seconds.

    Broker, node, learner and, on Redis, server are killed and started again. Each of them but the learner may be
    stopped for a while ('stop node'). 'cut' resets the proxy's connections. A kind listed twice comes more often.
    """
    at_s = 0.0
    for _ in range(FAULTS):
        kind = rig.random.choice(kinds)
        at_s = _harm(rig, proxy, kind)
        rig.pause()
    return at_s


def _harm(rig: FaultRig, proxy: Proxy, kind: str) -> float:
    name = rig.random.choice(sorted(rig.nodes))
    broker, learner, node = rig.broker_process, rig.learner_process, rig.nodes[name]
    assert broker is not None and learner is not None
    if kind == "cut":
        proxy.cut()
        return time.monotonic()
    if kind == "server":
        rig.redis.server.kill()
        rig.pause()
        rig.redis.server.start()
        return time.monotonic()
    if kind.startswith("stop "):
        stopped = {"broker": broker, "node": node}.get(kind.removeprefix("stop ")) or rig.redis.server.process
        return rig.stop_for(stopped, rig.random.uniform(0.1, 1.5 * LEASE_S))
    at_s = rig.kill({"broker": broker, "learner": learner, "node": node}[kind])
    if kind == "broker":
        rig.start_broker(wait=False)
    elif kind == "learner":
        rig.start_learner(proxy.address)
    else:
        rig.start_node(name, proxy.address)
    return at_s
