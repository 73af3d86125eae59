"""Runs of the learner: a config, learners, forked or started, a broker, and a node that hands in recorded groups."""

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from broker.client.connection import BrokerClient
from broker.contract import LedgerEntry
from common.metrics import StepMetrics
from common.process.run_dir import RunDir
from common.run_reader import read_tail
from tests import waiting
from tests.integration.jobs.job_rig import Command, Process, until
from tests.integration.megatron import fork_rig

STEPS, GROUPS, GROUP_SIZE, VOCABULARY = 8, 4, 4, 128


class Run:
    """The config of a run and its learners."""

    metrics: type = StepMetrics

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self.folder, self.config, self.run = folder, folder / "job.yaml", RunDir(folder / "run")
        self.config.write_text(yaml.safe_dump(document))
        self.pid = 0

    def start(self) -> None:
        """Fork a learner of one rank."""
        self.pid = fork_rig.start_learner("--config", str(self.config))

    def until(self, condition: Callable[[], Any], every_s: float = 0.01) -> None:
        """Wait while that learner runs."""
        waiting.until(condition, check=lambda: os.kill(self.pid, 0), every_s=every_s)

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to that learner and wait for its end; its exit code."""
        os.kill(self.pid, number)
        return fork_rig.learner_ended()

    def kill(self) -> None:
        """kill -9."""
        assert self.signal(signal.SIGKILL) == -signal.SIGKILL

    def finish(self, code: int = 0) -> None:
        """Fork a learner that ends by itself."""
        self.start()
        assert fork_rig.learner_ended() == code

    def words(self, ranks: int) -> list[str]:
        """The command line of a learner as a person starts it."""
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "learner.torchrun", "--nproc-per-node", str(ranks)]
            command += ["--shutdown-timeout", "300"]
        return [*command, "-m", "learner.main", "--config", str(self.config)]

    def learner(self, ranks: int, name: str = "torchrun") -> Process:
        """The learner as a person starts it."""
        return Process(self.folder / f"{name}.log", self.words(ranks))

    def lines(self) -> list[Any]:
        return read_tail(self.run.metrics, self.metrics).lines

    def weights(self) -> str:
        return weights_of(self.run)


class Job(Run):
    """A run of RL. Keywords are keys of the config's sections."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        learner: dict[str, Any] | None = None,
        checkpoint: dict[str, Any] | None = None,
        broker: dict[str, Any] | None = None,
        steps: int = STEPS,
    ) -> None:
        folder.mkdir()
        rows = (f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(9))
        (folder / "tasks.jsonl").write_text("".join(rows))
        shared = {"groups_per_step": GROUPS, "optimizer": {"lr": 1e-3}, "checkpoint": checkpoint or {"every": 3}}
        document = {
            "run": {"name": "resume", "dir": f"{folder}/run", "steps": steps, "seed": 3},
            "model": {"path": str(model), "dtype": "float32"},
            "tasks": {"environment": "addition", "dataset": f"{folder}/tasks.jsonl"},
            "learner": shared | (learner or {}),
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": 64, "engine": {"max_model_len": 128}},
            "broker": broker or {},
        }
        super().__init__(folder, document)

    @contextmanager
    def served(self) -> Iterator[BrokerClient]:
        """While active, a broker and a node serve the learner."""
        with self.broker(), self.node(), self.client() as client:
            yield client

    @contextmanager
    def broker(self) -> Iterator[Command]:
        """While active, a broker serves the learner; it is told to end, unless it was killed."""
        self.run.broker_json.unlink(missing_ok=True)
        with Command(self.folder, "broker", "broker", str(self.config)) as broker:
            until("the broker", lambda: self.run.broker() is not None, broker)
            yield broker
            if broker.process.poll() is None:
                broker.drain()

    def client(self) -> BrokerClient:
        return BrokerClient(self.run.broker().address)

    def node(self) -> Process:
        """A node that hands in recorded groups."""
        words = [self.run.broker().address, str(VOCABULARY), str(GROUP_SIZE), str(GROUPS)]
        command = [sys.executable, "-m", "tests.integration.learner.recorded_node", *words]
        return Process(self.folder / "node.log", command)

    def assert_every_step_once(self) -> None:
        assert [line.step for line in self.lines()] == list(range(STEPS))


def weights_of(run: RunDir) -> str:
    return hashlib.sha256((run.model / "model.safetensors").read_bytes()).hexdigest()


def assert_delivered_once(ledger: list[LedgerEntry]) -> None:
    assert [entry.serial for entry in ledger] == list(range(STEPS * GROUPS))
    assert {entry.state for entry in ledger} == {"committed"}
    assert [entry.step for entry in ledger] == [n // GROUPS for n in range(STEPS * GROUPS)]
