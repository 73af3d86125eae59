"""A learner of two machines on hosts of its own, real Megatron ranks with recorded groups, and what may befall it.

The broker and the node are on h1, launchers of the learner on h2, h3 and, as a spare, on h4. Run folders are each
host's own; all hosts share the folder of checkpoints.
"""

import functools
import hashlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any, TypeVar

import psutil
import yaml

from broker.client.calls import ObserverBroker
from broker.client.connect import connect_observer
from broker.contract import BrokerStatus
from common.process.run_dir import write_atomic
from common.security.credentials import KeyFolder
from launch.keys import make
from launch.quickstart.assets import build_model, dense
from tests.rigs.hosts import Host, enter, hosts, missing
from tests.rigs.jobs import GROUP_SIZE, GROUPS, VOCABULARY, Job, weights_of
from tests.rigs.processes import OURS
from tests.rigs.waiting import LIMIT_S, until

PORT = 5555
STEPS, EVERY = 130, 5  # length of the run, and between checkpoints
TIMEOUT_S = 20.0  # learner.timeout_s
T = TypeVar("T")


class MachineRig:
    """One run in `run_dir`. `close` ends it and its hosts."""

    def __init__(self, run_dir: Path, seed: int, **sections: dict[str, Any]) -> None:
        assert not missing(), missing()
        self.run_dir, self._stack = run_dir, ExitStack()
        self.broker_host, *self.hosts = self._stack.enter_context(hosts(run_dir, 4))
        self.checkpoints, self.own = run_dir / "checkpoints", self.broker_host.private / "run"
        self.config = run_dir / "job.yaml"
        self.config.write_text(yaml.safe_dump(self.document(sections)))
        self.gate = run_dir / "groups"  # that the node hands in, so that the run lasts until it is to end
        self.open_gate(4 * EVERY)
        self.launchers: dict[str, Popen[bytes]] = {}
        self.processes: list[Popen[bytes]] = []
        self._observer: ObserverBroker | None = None

    def document(self, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
        rows = (f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(9))
        (self.run_dir / "tasks.jsonl").write_text("".join(rows))
        make(KeyFolder(self.run_dir / "keys"), ["recorded"])
        document: dict[str, Any] = {
            "run": {"name": "machines", "dir": str(self.own), "steps": STEPS, "seed": 3},
            "model": {"path": str(model()), "dtype": "float32", "verify": False},
            "tasks": {"environment": "addition", "dataset": str(self.run_dir / "tasks.jsonl")},
            "learner": {
                "machines": 2,
                "world_size": 2,
                "timeout_s": TIMEOUT_S,
                "groups_per_step": GROUPS,
                "optimizer": {"lr": 1e-3},
                "checkpoint": {"every": EVERY, "dir": str(self.checkpoints)},
            },
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": 64, "engine": {"max_model_len": 128}},
            "broker": {"address": self.address, "credentials": str(self.run_dir / "keys")},
            "weights": {"transport": "relay"},
        }
        for name, section in sections.items():
            document[name] |= section
        return document

    @property
    def address(self) -> str:
        return f"tcp://{self.broker_host.address}:{PORT}"

    # ---------------------------------------------------------------- processes

    def start_broker(self) -> Popen[bytes]:
        self.broker = self.broker_host.slipstream("broker", str(self.config), log=self.run_dir / "broker.out")
        self.processes.append(self.broker)
        until(lambda: "listens on" in (self.run_dir / "broker.out").read_text(), "the broker to listen")
        return self.broker

    def start_node(self) -> None:
        words = [self.address, *(str(number) for number in (VOCABULARY, GROUP_SIZE, GROUPS))]
        words += [str(self.run_dir / "keys"), str(self.gate)]
        command = [sys.executable, "-m", "tests.rigs.recorded_node", *words]
        log = self.run_dir / "node.out"
        env = OURS
        self.node = self.broker_host.start(command, log, env)
        self.processes.append(self.node)

    def launch(self, host: Host, *words: str, **env: str) -> Popen[bytes]:
        """`slipstream learner` on a host; `words` replace the config."""
        log = self.run_dir / f"{host.name}.out"
        self.launchers[host.name] = host.slipstream("learner", *(words or (str(self.config),)), log=log, env=env)
        self.processes.append(self.launchers[host.name])
        return self.launchers[host.name]

    def start_all(self) -> None:
        """Two machines that train, and a spare one; returns when the run is well under way, or is so again."""
        if not self.launchers:
            self.start_broker()
            self.start_node()
            for host in self.hosts[:2]:
                self.launch(host)
            self.steps_beyond(EVERY)
            self.launch(self.hosts[2], "--join", self.address, "--credentials", str(self.run_dir / "keys"))
        until(self.is_complete, "two machines that train, and a spare one", told=self.logs, every_s=0.1)
        for rank in (0, 1):  # each host has a run folder of its own
            until(lambda: self.observer().log(f"learner-{rank}"), f"the log of rank {rank}", told=self.logs)  # noqa: B023

    def log(self, host: Host) -> str:
        return (self.run_dir / f"{host.name}.out").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-2500:]}" for path in self.run_dir.glob("*.out")
        )

    def ranks(self, host: Host) -> list[psutil.Process]:
        """The learner's ranks on a host, without torchrun and forks of ranks that are about to run another program."""
        parents: dict[psutil.Process, int] = {}
        for process in host.processes("-m learner.main"):
            with suppress(psutil.Error):  # ended meanwhile
                if "learner.torchrun" not in process.cmdline():
                    parents[process] = process.ppid()
        pids = [process.pid for process in parents]
        return [process for process, parent in parents.items() if parent not in pids]

    def open_gate(self, steps: int) -> None:
        """Let the node hand in the groups of the first `steps` steps."""
        write_atomic(self.gate, str(steps * GROUPS).encode(), sync=False)

    # ---------------------------------------------------------------- what is seen

    def status(self) -> BrokerStatus:
        """The broker's, from within its host's network."""
        return self.observer().status()

    def observer(self) -> ObserverBroker:
        if self._observer is None:
            keys = str(self.run_dir / "keys")
            self._observer = on_network(self.broker_host, lambda: connect_observer(self.address, LIMIT_S, keys))
        return self._observer

    def members(self) -> list[Host]:
        """The hosts of the round that runs, the one with the rendezvous first; [] while none does."""
        running = {m.host: m.index for m in self.status().machines if m.state == "running" and m.index >= 0}
        return sorted((host for host in self.hosts if host.name in running), key=lambda host: running[host.name])

    def is_complete(self) -> bool:
        """Whether two machines train, and the third is a spare one."""
        return len(self.members()) == 2 and "waiting" in {machine.state for machine in self.status().machines}

    def version(self) -> int:
        learner = self.status().learner
        return learner.policy_version if learner is not None else 0

    def steps_beyond(self, version: int) -> float:
        """Wait until a later step than `version` is trained; returns the time, monotonic seconds."""
        self.open_gate(version + 2 * EVERY)  # all faults need 111 steps at most
        until(
            lambda: self.version() > version, f"a step beyond {version}", told=self.logs, check=self.check, every_s=0.2
        )
        return time.monotonic()

    def new_round_s(self, at_s: float, without: Host | None = None) -> float:
        """Seconds from `at_s` until another round than the one of then has trained a step that is new.

        `without`: a host that is not in that round, and whose launcher is expected to be gone.
        """
        version, before = self.version(), self.learner_pid()
        until(lambda: self.learner_pid() != before, "another round", told=self.logs, check=self.check, every_s=0.2)
        recovered_s = self.steps_beyond(version) - at_s
        assert without not in self.members()
        return recovered_s

    def check(self) -> None:
        """Raise AssertionError when the broker or the node has ended."""
        for process in (self.broker, self.node):
            assert process.poll() is None, self.logs()

    def learner_pid(self) -> tuple[int, int]:
        """Process and incarnation of the lead rank."""
        learner = self.status().learner
        return (learner.pid, learner.incarnation) if learner is not None else (0, 0)

    def finish(self) -> None:
        """Wait for the end; every group is in one committed step, and the weights are those of a quiet run."""
        # A launcher that comes after the end would wait for a job that begins anew.
        until(
            lambda: {m.host for m in self.status().machines} >= self.launchers.keys(), "every launcher", told=self.logs
        )
        self.open_gate(STEPS)
        for name, launcher in self.launchers.items():
            code = launcher.wait(LIMIT_S)
            assert code == 0, f"{name} ended with {code}\n{self.logs()}"
        found = self.status()
        assert (found.groups_committed, found.groups_dead) == (STEPS * GROUPS, 0)
        ledger = self.observer().ledger()
        assert {entry.state for entry in ledger} == {"committed"}
        steps = [entry.step for entry in ledger]
        assert {step: steps.count(step) for step in steps} == dict.fromkeys(range(STEPS), GROUPS)
        models = [path for host in self.hosts for path in [host.files(self.own) / "model"] if path.is_dir()]
        assert {weights_in(path) for path in models} == {quiet_weights()}

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()
        self._stack.close()
        for process in self.processes:
            process.wait(LIMIT_S)


def weights_in(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@functools.cache
def model() -> Path:
    """A tiny random model with its tokenizer; removed at the end of this process."""
    folder = Path(_kept().name) / "model"
    build_model(dense(64, 128, 2, 4, 0.05) | {"max_position_embeddings": 256}, 1, folder)
    return folder


@functools.cache
def _kept() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="machine-rig-")


@functools.cache
def quiet_weights() -> str:
    """The final weights of the same run as two ranks on one machine, which nothing disturbs."""
    folder = Path(_kept().name) / "quiet"
    job = Job(folder, model(), {"world_size": 2, "timeout_s": TIMEOUT_S}, {"every": EVERY}, steps=STEPS)
    with job.served():
        job.finish(ranks=2)
    return weights_of(job.run)


def on_network(host: Host, call: Callable[[], T]) -> T:
    """The result of a call whose thread, and those that it starts, are in the network of a host."""
    found: list[T] = []

    def called() -> None:
        enter(host.pid, ["net"])
        found.append(call())

    thread = threading.Thread(target=called)
    thread.start()
    thread.join()
    (result,) = found
    return result
