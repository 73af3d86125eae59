"""What `up` says when a role fails for good."""

from pathlib import Path

import pytest

from common.config import Config, ModelConfig, RunConfig, TasksConfig
from common.lifecycle import DrainFlag
from common.run_dir import RunDir
from launch.job import Job, JobFailed


def test_a_failure_is_said_before_the_other_roles_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    config = Config(
        run=RunConfig(name="unit", dir=str(tmp_path), steps=1),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
    )
    job = Job(config, run)
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
