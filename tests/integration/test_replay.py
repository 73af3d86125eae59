"""Recorded groups: a learner and a broker killed with -9 end as if nothing had been, and a replay computes the same."""

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker.contract import LedgerEntry
from broker.messaging.sync_client import BrokerClient
from common.metrics import StepMetrics, read_metrics
from common.process.run_dir import RunDir
from tests.integration.test_learner_resume import (
    BROKER,
    ENVIRONMENT,
    GROUP_SIZE,
    GROUPS,
    HERE,
    STEPS,
    VOCABULARY,
    Job,
    process,
    wait_for,
)
from tests.redis_server import RedisServer
from tests.waiting import LIMIT_S

LEARNER = ", dynamic_sampling: true"


@contextlib.contextmanager
def broker(job: Job) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A broker process of the job, and its address."""
    job.run.broker_json.unlink(missing_ok=True)
    with process([sys.executable, "-c", BROKER, str(job.config)]) as child:
        wait_for(lambda: job.run.broker() is not None, child)
        yield child, job.run.broker().address


@contextlib.contextmanager
def node(address: str) -> Iterator[subprocess.Popen[str]]:
    words = [address, str(VOCABULARY), str(GROUP_SIZE), str(GROUPS)]
    with process([sys.executable, str(HERE / "recorded_node.py"), *words]) as child:
        yield child


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Job:
    """A run that nothing happened to, ended; its store holds all its groups."""
    folder = tmp_path_factory.mktemp("unbroken") / "job"
    job = Job(folder, model, LEARNER, checkpoint="every: 3, keep: 9, asynchronous: false")
    with job.served():
        job.finish()
    assert any(filtered for _, _, _, filtered in ledger(job)), "some groups must be without signal"
    return job


def ledger(job: Job) -> list[tuple[int, str, int | None, bool]]:
    """What became of every task, as the broker left it."""
    entries = msgspec.json.decode(job.run.ledger_json.read_bytes(), type=list[LedgerEntry])
    return [(entry.serial, entry.state, entry.step, entry.filtered) for entry in entries]


def replay(job: Job, out: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "launch.cli", "replay", str(job.run.path), "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=ENVIRONMENT, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout if code == 0 else done.stderr


def figures(lines: list[StepMetrics], first: int = 0) -> list[tuple[int, float, float, float]]:
    return [(x.step, x.loss, x.grad_norm, x.reward_mean) for x in lines if x.step >= first]


def weights(run: RunDir) -> str:
    return hashlib.sha256((run.model / "model.safetensors").read_bytes()).hexdigest()


def test_a_learner_and_a_broker_killed_with_9_end_bitwise_as_if_neither_was(
    tmp_path: Path, model: Path, unbroken: Job
) -> None:
    job = Job(tmp_path / "job", model, LEARNER, checkpoint="every: 3, asynchronous: false")
    with broker(job) as (first, address), node(address) as generating:
        with process(job.learner()) as learner:
            wait_for(lambda: len(job.lines()) >= 5, learner)
            learner.kill()
            first.kill()
            assert (learner.wait(LIMIT_S), first.wait(LIMIT_S)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert not job.run.model.exists()
        with broker(job) as (second, again):
            assert again == address, "the node finds it where it was"
            job.finish()
            with BrokerClient(again) as client:
                assert client.status().learner.incarnation == 1
            wait_for(lambda: generating.poll() is not None, second)
    assert ledger(job) == ledger(unbroken), "every group in exactly one step, the same one"
    assert job.weights() == unbroken.weights()
    assert figures(job.lines()) == figures(unbroken.lines())


def test_a_replay_from_the_start_computes_what_the_run_computed(tmp_path: Path, unbroken: Job) -> None:
    said = replay(unbroken, tmp_path / "out")
    again = RunDir(tmp_path / "out")
    assert figures(read_metrics(again.metrics, StepMetrics)) == figures(unbroken.lines())
    assert weights(again) == unbroken.weights()
    assert "all 8 steps equal the run's, bit for bit" in said
    assert said.count("loss") == STEPS
    assert json.loads((again.path / "replay.json").read_bytes())["checkpoint"] is None


def test_a_replay_from_a_checkpoint_goes_on_from_it_and_shows_where_an_override_changes_something(
    tmp_path: Path, unbroken: Job
) -> None:
    before = {path: path.stat().st_mtime_ns for path in unbroken.run.path.rglob("*") if path.is_file()}
    said = replay(unbroken, tmp_path / "out", "--from", "6", "learner.optimizer.lr=0.002")
    again = RunDir(tmp_path / "out")
    found, original = figures(read_metrics(again.metrics, StepMetrics)), figures(unbroken.lines(), first=6)
    assert [line[0] for line in found] == [6, 7]
    assert found[0] == original[0], "the other learning rate shows in the step after"
    assert found[1] != original[1]
    assert "1 of 2 steps equal the run's; the first that differs: step     7" in said
    lock = unbroken.run.store / "lock"
    after = {path: path.stat().st_mtime_ns for path in unbroken.run.path.rglob("*") if path.is_file()}
    assert {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)} <= {lock}
    assert "has no checkpoint of step 5; it has those of steps 3, 6, 8" in replay(
        unbroken, tmp_path / "none", "--from", "5", code=2
    )


def test_a_run_on_redis_computes_and_replays_what_the_embedded_broker_s_does(
    tmp_path: Path, model: Path, unbroken: Job
) -> None:
    server = RedisServer(tmp_path, {"appendonly": "yes", "appendfsync": "always"})
    try:
        store = f"store: redis, redis: '{server.address}'"
        job = Job(tmp_path / "job", model, LEARNER, "every: 3, keep: 9, asynchronous: false", store)
        with process([sys.executable, "-m", "launch.cli", "broker", str(job.config)]) as broker:
            wait_for(lambda: job.run.broker() is not None, broker)
            with node(job.run.broker().address):
                job.finish()
        assert job.weights() == unbroken.weights()
        said = replay(job, tmp_path / "out", "--from", "3")
        assert "all 5 steps equal the run's, bit for bit" in said
        assert weights(RunDir(tmp_path / "out")) == job.weights()
    finally:
        server.stop()
