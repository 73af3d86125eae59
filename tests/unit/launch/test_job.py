"""What `up` says when a role fails for good."""

from pathlib import Path
from typing import Any, Literal

import pytest

from common.config.schema import BrokerConfig, Config, ModelConfig, RunConfig, TasksConfig
from common.process.lifecycle import DrainFlag
from common.process.run_dir import RunDir
from launch.up.job import Job, JobFailed
from launch.up.supervisor import RoleSpec


def make_config(run_dir: Path) -> Config:
    return Config(
        run=RunConfig(name="unit", dir=str(run_dir), steps=1),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
    )


def test_a_full_disk_does_not_end_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    run.events.symlink_to("/dev/full")
    job = Job(make_config(tmp_path), run)
    notes: list[Any] = []
    monkeypatch.setattr(job, "_note", notes.append)
    job._on_event("restarted", {"role": "node-0"})
    assert notes == ["events.jsonl cannot be written: No space left on device", "node-0: restarted"]


def test_a_failure_is_said_before_the_other_roles_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    job = Job(make_config(tmp_path), run)
    said: list[str] = []

    def fail(flag: DrainFlag) -> None:
        raise JobFailed("broker failed: killed by SIGKILL; the end of its log\n  a line")

    def stop(done: bool) -> None:
        output = capsys.readouterr()
        said.append(output.out + output.err)

    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    monkeypatch.setattr(job, "_start", fail)
    monkeypatch.setattr(job, "_stop", stop)
    with pytest.raises(JobFailed, match="broker failed"):
        job.run(plain=True)
    assert "broker failed: killed by SIGKILL; the end of its log; stopping the job" in said[0]


@pytest.mark.parametrize(("durability", "restarts"), [("fsync", 3), ("everysec", 3), ("memory", 0)])
def test_a_broker_that_died_is_started_again_unless_it_would_have_forgotten_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Literal["fsync", "everysec", "memory"], restarts: int
) -> None:
    config = Config(
        run=RunConfig(name="unit", dir=str(tmp_path), steps=1, max_restarts=3),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
        broker=BrokerConfig(durability=durability),
    )
    job = Job(config, RunDir(tmp_path))
    started: dict[str, int] = {}

    def start(spec: RoleSpec) -> None:
        started[spec.name] = spec.max_restarts

    monkeypatch.setattr(job.supervisor, "start", start)
    monkeypatch.setattr(job, "_await_broker", lambda flag: True)
    job._start(DrainFlag())
    assert started == {"broker": restarts, "learner": 3, "node-0": 3}
