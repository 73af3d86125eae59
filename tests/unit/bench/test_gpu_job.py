"""bench/gpu_job.py: which jobs start together, when a job's time begins, and what is told of one that is late."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_job
import harness
import pytest

from launch.checks.selftest import ENGINE_LOG

OPTIONS: Any = SimpleNamespace(
    output="", dry=False, staleness=[0, 1, 4], start_s=100.0, compile_s=100.0, seconds=30.0, curve_s=30.0, compared=8,
    steps=8, attention="", eager=True,
)  # fmt: skip
SIZE = gpu_job.SIZES["0.6b"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock whose second passes when gpu_job sleeps; it then does what `tick` says."""
    clock = SimpleNamespace(now=0.0, tick=lambda: None)

    def sleep(_: float) -> None:
        clock.now += 1.0
        clock.tick()

    time = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr(gpu_job, "time", time)
    return clock


class Job:
    """Stands for `slipstream up`, which runs until it is told to end."""

    began: list[str]

    def __init__(self, folder: Path, name: str, *words: str, **environment: str) -> None:
        self.name, self.environment = name, environment
        self.process = SimpleNamespace(poll=lambda: None)
        self.ended = False

    def __enter__(self) -> "Job":
        self.began.append(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True

    def output(self) -> str:
        return "what it printed"


def lease(folder: Path, staleness: int) -> None:
    run = folder / f"staleness-{staleness}"
    run.mkdir()
    (run / "events.jsonl").write_text('{"kind":"first_lease"}\n')


@pytest.mark.parametrize("given", [None, "DEBUG"])
def test_the_first_job_is_ready_before_the_others_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, given: str | None
) -> None:
    Job.began = []
    monkeypatch.setattr(gpu_job, "Command", Job)
    monkeypatch.setenv(ENGINE_LOG, given) if given else monkeypatch.delenv(ENGINE_LOG, raising=False)

    def tick() -> None:
        if clock.now == 90:
            assert Job.began == ["up-0"]
            lease(tmp_path, 0)
        if clock.now == 180:
            assert Job.began == ["up-0", "up-1", "up-4"]
            lease(tmp_path, 1)
            lease(tmp_path, 4)

    clock.tick = tick
    figures: harness.Figures = {}
    with gpu_job.jobs(tmp_path, SIZE, OPTIONS, True, partial(harness.part, OPTIONS, figures)) as found:
        waited = {name: part["waited_s"] for name, part in figures.items()}
        assert waited == {"start_0": 90.0, "start_1": 90.0, "start_4": 0.0}
        assert all(one.environment[ENGINE_LOG] == (given or "INFO") for one in found.values())


def test_a_job_that_does_not_come_up_is_told_with_its_nodes_log_and_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(gpu_job, "join_times", lambda run: {"node-0": {"registered": 2.5}})
    (tmp_path / "staleness-0/logs").mkdir(parents=True)
    (tmp_path / "staleness-0/logs/rollout-node-0.log").write_text("kernels are compiled")
    job: Any = Job(tmp_path, "up-0")
    with pytest.raises(RuntimeError, match=r"kernels are compiled\n.*registered.*2\.5"):
        gpu_job.come(tmp_path, 0, job, 100.0)
    assert (clock.now, job.ended) == (101, True)


def add_step(metrics: Path, now: float) -> None:
    with metrics.open("a") as file:
        file.write(json.dumps(dict.fromkeys(gpu_job.KEPT, 1.0) | {"time_s": now}) + "\n")


def test_a_jobs_time_begins_after_the_steps_that_compile(tmp_path: Path, clock: SimpleNamespace) -> None:
    (tmp_path / "staleness-0").mkdir()
    (tmp_path / "staleness-0.yaml").write_text("{}")
    metrics = tmp_path / "staleness-0/metrics.jsonl"

    def tick() -> None:
        if clock.now >= 60 and clock.now % 10 == 0:  # 60, 70 and 80 end the steps that are left out
            add_step(metrics, clock.now)

    clock.tick = tick
    job: Any = Job(tmp_path, "up-0")
    found = gpu_job.run(tmp_path, SIZE, 0, job, OPTIONS)
    assert (found["steps"], found["joined"], clock.now) == (6, {}, 110)
    assert found["samples_per_s"] == 0.1 and job.ended


def test_a_job_without_its_first_steps_says_how_many_are_missing(tmp_path: Path, clock: SimpleNamespace) -> None:
    (tmp_path / "staleness-0").mkdir()
    add_step(tmp_path / "staleness-0/metrics.jsonl", 1.0)
    job: Any = Job(tmp_path, "up-0")
    with pytest.raises(RuntimeError, match=r"(?s)^1 of the first 3 steps.* 100 s:\nwhat it printed"):
        gpu_job.run(tmp_path, SIZE, 0, job, OPTIONS)
    assert (clock.now, job.ended) == (100, True)


def test_a_large_vocabulary_gets_small_batches_and_the_first_version_time(tmp_path: Path) -> None:
    import yaml

    made = yaml.safe_load(gpu_job.config(tmp_path, SIZE, 0, OPTIONS, True).read_text())
    assert made["learner"]["micro_batch_tokens"] == 8192
    assert made["weights"]["timeout_s"] == 60.0
    assert made["rollout"]["engine"]["kv_cache_mib"] == 4096
