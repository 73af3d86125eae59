"""Whole jobs, and runs of a learner: their configs, the commands that a person starts, and what is seen from outside.

A run of the learner alone has a broker and a node that hands in recorded groups.
"""

import hashlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import psutil
import yaml

from broker.client.connection import BrokerClient
from broker.contract import LedgerEntry
from common.metrics import StepMetrics
from common.process.lifecycle import stop_signals
from common.process.run_dir import RunDir
from common.run_reader import read_tail
from launch import convert
from launch.cli import main
from launch.quickstart.assets import main as build_assets
from launch.results import export, replay
from launch.up.supervisor import RoleSpec
from tests.rigs import waiting
from tests.rigs.configs import run_cli
from tests.rigs.processes import JOB_S, Command, Process, kill, until
from tests.rigs.waiting import read_jsonl

STALENESS = 1
GROUPS = 4  # per step
STEPS, GROUP_SIZE, VOCABULARY = 8, 4, 128


def make_assets(folder: Path) -> Path:
    """The quickstart's random model, tokenizer and problems; returns their folder."""
    assert build_assets(["--out", str(folder), "--seed", "1"]) == 0
    return folder


def write_config(path: Path, assets: Path, run_dir: Path, steps: int, **sections: dict[str, Any]) -> Path:
    """A job of a few small steps on the real engine and the real learner."""
    document: dict[str, dict[str, Any]] = {
        "run": {"name": "end-to-end", "dir": str(run_dir), "seed": 1, "steps": steps},
        "model": {"path": str(assets / "model"), "dtype": "float32"},
        "tasks": {
            "environment": "tests.rigs.environments:EvenDigits",
            "dataset": str(assets / "addition" / "train.jsonl"),
        },
        "learner": {"groups_per_step": GROUPS, "optimizer": {"lr": 3e-3}, "checkpoint": {"every": 2, "keep": 2}},
        "rollout": {
            "group_size": 4, "max_tokens": 16, "concurrency": 16,
            "engine": {"max_model_len": 64, "max_num_seqs": 16, "kv_cache_mib": 16, "eager": True},
        },
        "broker": {"lease_s": 6.0, "heartbeat_s": 0.5},
        "staleness": {"max": STALENESS},
    }  # fmt: skip
    for name, section in sections.items():
        document.setdefault(name, {}).update(section)
    path.write_text(yaml.safe_dump(document))
    return path


def slipstream(*words: str) -> str:
    """Output of a command that must succeed."""
    done = run_cli(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class ForkedLearner:
    """Stands in for the Supervisor of a replay, and for the learner that it starts there: this one is forked."""

    restarts = 0

    def __init__(self, told: object) -> None:
        self.running = False
        self.exit_code: int | None = None

    def start(self, spec: RoleSpec) -> Self:
        self.spec, self.running = spec, True
        self._pids = _forks().start_learner("--config", spec.argv[-1])
        self._waits = threading.Thread(target=self._wait)
        self._waits.start()
        return self

    def poll(self) -> None:
        self.running = self._waits.is_alive()

    def stop(self, names: object, drain_s: float) -> None:
        if self._waits.is_alive():
            for pid in self._pids:
                os.kill(pid, signal.SIGTERM)
        self._waits.join()
        self.running = False

    def _wait(self) -> None:
        (self.exit_code,) = _forks().learner_ended()


def _fork_module(command: list[str], **told: Any) -> SimpleNamespace:
    """Stands in for subprocess.run where `convert` and `export` call it: python -P -m MODULE WORDS."""
    _, _, _, module, *words = command
    return SimpleNamespace(returncode=_forks().finished(module, *words))


def warm(*words: str, code: int = 0) -> str:
    """As `slipstream`, in this process, for `replay`, `export` and `convert`; the errors where it must fail.

    Their learner, or the process that converts, is forked and works in another folder: paths must be absolute.
    """
    out, errors = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        with ExitStack() as within:
            within.enter_context(redirect_stdout(out))
            within.enter_context(redirect_stderr(errors))
            within.enter_context(patch.object(replay, "Supervisor", ForkedLearner))
            for module in (convert, export):
                within.enter_context(patch.object(module, "subprocess", SimpleNamespace(run=_fork_module)))
            assert main(words) == code, errors.getvalue()[-3000:]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return (errors if code else out).getvalue()


def told(*words: str) -> Any:
    """The JSON of a command, run in this process: a process of its own would keep a core busy while it is polled."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main([*words, "--json"]) == 0
    return json.loads(out.getvalue())


def status(run_dir: Path) -> dict[str, Any]:
    return told("status", str(run_dir))


def ledger(run_dir: Path) -> list[dict[str, Any]]:
    return told("ledger", str(run_dir))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_jsonl(run_dir / "metrics.jsonl") if "kind" not in line]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(run_dir / "events.jsonl"))


def assert_trained_exactly_once(run_dir: Path, steps: int) -> None:
    """Every step is there once, within the staleness bound, and every group is in exactly one of them."""
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(steps))
    assert all(line["staleness_max"] <= STALENESS for line in lines)
    assert all(line["groups"] == GROUPS for line in lines)
    committed = [entry for entry in ledger(run_dir) if entry["state"] == "committed"]
    serials = [entry["serial"] for entry in committed]
    assert len(serials) == len(set(serials)) == steps * GROUPS
    per_step = {step: sum(entry["step"] == step for entry in committed) for step in range(steps)}
    assert set(per_step.values()) == {GROUPS}
    for entry in committed:
        assert entry["version_min"] <= entry["version_max"] <= entry["step"]
        if entry["step"] - entry["version_min"] > STALENESS:  # its old tokens left the loss, and were counted
            assert lines[entry["step"]]["tokens_expired"] > 0


def _forks() -> Any:
    """The module imports torch, which jobs that start no learner do not need."""
    from tests.rigs import forked_ranks

    return forked_ranks


class Run:
    """The config of a run, FOLDER/job.yaml, and its learners. Without a document it is there already."""

    metrics: type = StepMetrics

    def __init__(self, folder: Path, document: dict[str, Any] | None = None) -> None:
        self.folder, self.config, self.run = folder, folder / "job.yaml", RunDir(folder / "run")
        if document is not None:
            self.config.write_text(yaml.safe_dump(document))
        self._pids: list[int] = []

    def start(self, ranks: int = 1) -> None:
        """Fork a learner."""
        self._pids = _forks().start_learner("--config", str(self.config), ranks=ranks)

    def until(self, condition: Callable[[], Any], every_s: float = 0.01) -> None:
        """Wait while that learner runs."""
        waiting.until(condition, check=lambda: [os.kill(pid, 0) for pid in self._pids], every_s=every_s)

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to every rank of that learner and wait for its end; its exit code."""
        for pid in self._pids:
            os.kill(pid, number)
        return self.ended()

    def ended(self) -> int:
        """Wait for the end of that learner; the exit code, which all ranks have."""
        codes = _forks().learner_ended()
        assert len(set(codes)) == 1, codes
        return codes[0]

    def kill(self) -> None:
        """kill -9."""
        assert self.signal(signal.SIGKILL) == -signal.SIGKILL

    @property
    def runs(self) -> bool:
        return all(map(psutil.pid_exists, self._pids))

    def end(self) -> None:
        """kill -9, unless it has ended."""
        for pid in self._pids:
            kill(pid)
        _forks().learner_ended()

    def finish(self, code: int = 0, ranks: int = 1) -> None:
        """Fork a learner that ends by itself."""
        self.start(ranks)
        assert self.ended() == code

    def words(self, ranks: int) -> list[str]:
        """The command line of a learner as a person starts it."""
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "learner.torchrun", "--nproc-per-node", str(ranks)]
            command += ["--shutdown-timeout", "300"]
        return [*command, "-m", "learner.main", "--config", str(self.config)]

    def learner(self, ranks: int) -> Process:
        """The learner as a person starts it."""
        return Process(self.folder / "torchrun.log", self.words(ranks))

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
        command = [sys.executable, "-m", "tests.rigs.recorded_node", *words]
        return Process(self.folder / "node.log", command)

    def assert_every_step_once(self) -> None:
        assert [line.step for line in self.lines()] == list(range(STEPS))


@contextmanager
def at_work(config: Path) -> Iterator[list[Process]]:
    """Broker and node of a job, whose learner works, too; the block ends when all three have, each with 0.

    RUN is the folder `run` beside the config. Node and learner are forked, which costs less than `slipstream up`.
    """
    from tests.rigs.warm_engines import Node  # it knows vLLM, which other jobs do not need

    folder = config.parent
    learner = Run(folder)
    with Command(folder, "broker", "broker", str(config)) as broker, Node(folder, "node", str(config)) as node:
        until("the broker", learner.run.broker, broker, node)
        learner.config = learner.run.config  # the broker's, whose paths are absolute
        learner.start()

        def none_failed() -> None:
            for role in (broker, node):
                assert not role.process.poll(), role.output()

        try:
            yield [broker, node]
            waiting.until(lambda: not learner.runs, "the learner's end", JOB_S, check=none_failed, every_s=0.1)
        except BaseException:
            learner.end()
            raise
        assert learner.ended() == 0, (learner.run.logs / "learner-0.log").read_text()[-6000:]
        assert node.wait() == 0, node.output()
        broker.drain()


def weights_of(run: RunDir) -> str:
    return hashlib.sha256((run.model / "model.safetensors").read_bytes()).hexdigest()


def assert_delivered_once(ledger: list[LedgerEntry]) -> None:
    assert [entry.serial for entry in ledger] == list(range(STEPS * GROUPS))
    assert {entry.state for entry in ledger} == {"committed"}
    assert [entry.step for entry in ledger] == [n // GROUPS for n in range(STEPS * GROUPS)]
