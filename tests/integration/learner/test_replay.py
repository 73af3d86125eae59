"""Recorded groups: a learner and a broker killed with -9 end as if nothing had been, and a replay computes the same."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from broker.contract import LedgerEntry
from common.metrics import StepMetrics
from common.process.run_dir import RunDir
from common.run_reader import read_tail
from tests.rigs.jobs import STEPS, Job, slipstream, warm, weights_of
from tests.rigs.processes import until
from tests.rigs.redis_servers import durable_redis

LEARNER = {"dynamic_sampling": True}
KEPT = {"every": 3, "keep": 9, "asynchronous": False}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Job:
    """A run that ended without a fault; its store has all its groups."""
    job = Job(tmp_path_factory.mktemp("unbroken") / "job", model, LEARNER, KEPT)
    with job.served():
        job.finish()
    assert any(filtered for _, _, _, filtered in ledger(job)), "some groups must be without signal"
    return job


def ledger(job: Job) -> list[tuple[int, str, int | None, bool]]:
    """The fate of every task, as the broker left it."""
    entries = msgspec.json.decode(job.run.ledger_json.read_bytes(), type=list[LedgerEntry])
    return [(entry.serial, entry.state, entry.step, entry.filtered) for entry in entries]


def replay(job: Job, out: Path, *words: str, code: int = 0) -> str:
    return warm("replay", str(job.run.path), "--out", str(out), *words, code=code)


def figures(lines: list[StepMetrics], first: int = 0) -> list[tuple[int, float, float, float]]:
    return [(x.step, x.loss, x.grad_norm, x.reward_mean) for x in lines if x.step >= first]


def test_a_learner_and_a_broker_killed_with_9_end_bitwise_as_if_neither_was(
    tmp_path: Path, model: Path, unbroken: Job
) -> None:
    job = Job(tmp_path / "job", model, LEARNER, {"every": 3, "asynchronous": False})
    with job.broker() as first, job.node() as generating:
        address = job.run.broker().address
        job.start()
        job.until(lambda: len(job.lines()) >= 5)
        job.kill()
        first.process.kill()
        first.wait()
        assert not job.run.model.exists()
        with job.broker() as second:
            assert job.run.broker().address == address, "the node finds it where it was"
            job.finish()
            with job.client() as client:
                assert client.status().learner.incarnation == 1
            until("the end of the node", lambda: generating.process.poll() is not None, second)
    job.assert_every_step_once()
    assert {line.incarnation for line in job.lines()} == {0, 1}
    assert ledger(job) == ledger(unbroken), "every group in exactly one step, the same one"
    assert job.weights() == unbroken.weights()
    assert figures(job.lines()) == figures(unbroken.lines())


def test_a_replay_from_the_start_computes_what_the_run_computed(tmp_path: Path, unbroken: Job) -> None:
    said = slipstream("replay", str(unbroken.run.path), "--out", str(tmp_path / "out"))
    again = RunDir(tmp_path / "out")
    assert figures(read_tail(again.metrics, StepMetrics).lines) == figures(unbroken.lines())
    assert weights_of(again) == unbroken.weights()
    assert "all 8 " in said
    assert said.count("loss") == STEPS
    assert json.loads((again.path / "replay.json").read_bytes())["checkpoint"] is None


def test_a_replay_from_a_checkpoint_goes_on_from_it_and_shows_where_an_override_changes_something(
    tmp_path: Path, unbroken: Job
) -> None:
    before = {path: path.stat().st_mtime_ns for path in unbroken.run.path.rglob("*") if path.is_file()}
    said = replay(unbroken, tmp_path / "out", "--from", "6", "learner.optimizer.lr=0.002")
    again = RunDir(tmp_path / "out")
    found, original = figures(read_tail(again.metrics, StepMetrics).lines), figures(unbroken.lines(), first=6)
    assert [line[0] for line in found] == [6, 7]
    assert found[0] == original[0], "the other learning rate shows in the step after"
    assert found[1] != original[1]
    assert re.findall(r"(\d) of (\d) steps .*step +(\d)", said) == [("1", "2", "7")]
    lock = unbroken.run.store / "lock"
    after = {path: path.stat().st_mtime_ns for path in unbroken.run.path.rglob("*") if path.is_file()}
    assert {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)} <= {lock}
    refused = replay(unbroken, tmp_path / "none", "--from", "5", code=2)
    assert "step 5" in refused and "3, 6," in refused


def test_a_run_on_redis_computes_and_replays_what_the_embedded_broker_s_does(
    tmp_path: Path, model: Path, unbroken: Job
) -> None:
    server = durable_redis(tmp_path)
    try:
        job = Job(tmp_path / "job", model, LEARNER, KEPT, {"store": "redis", "redis": server.address})
        with job.served():
            job.finish()
        assert job.weights() == unbroken.weights()
        said = replay(job, tmp_path / "out", "--from", "3")
        assert "all 5 " in said
        assert weights_of(RunDir(tmp_path / "out")) == job.weights()
    finally:
        server.stop()
