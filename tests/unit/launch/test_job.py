"""`up`: its words when a role fails for good, what it starts again, and when a run is finished."""

from typing import Any

import msgspec
import pytest

from common.config.schema import BrokerConfig
from common.process.lifecycle import DrainFlag
from common.process.run_dir import write_json
from launch.up.job import Job, JobFailed
from launch.up.supervisor import RoleSpec
from launch.up.up import finished


def test_a_full_disk_does_not_end_the_supervisor(config, run, monkeypatch) -> None:
    run.events.symlink_to("/dev/full")
    job = Job(config, run)
    notes: list[Any] = []
    monkeypatch.setattr(job, "_note", notes.append)
    job._on_event("restarted", {"role": "node-0"})
    assert notes == ["events.jsonl cannot be written: No space left on device", "node-0: restarted"]


def test_a_failure_is_said_before_the_other_roles_are_stopped(config, run, monkeypatch, capsys) -> None:
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


@pytest.mark.parametrize(("durability", "restarts"), [("fsync", 3), ("everysec", 3), ("memory", 0)])
def test_a_broker_that_died_is_started_again_unless_it_would_have_forgotten_everything(
    config, run, monkeypatch, durability, restarts
) -> None:
    job = Job(msgspec.structs.replace(config, broker=BrokerConfig(durability=durability)), run)
    started: dict[str, int] = {}

    def start(spec: RoleSpec) -> None:
        started[spec.name] = spec.max_restarts

    monkeypatch.setattr(job.supervisor, "start", start)
    monkeypatch.setattr(job, "_await_broker", lambda flag: True)
    job._start(DrainFlag())
    assert started == {"broker": restarts, "learner": 3, "node-0": 3}


@pytest.mark.parametrize(
    ("record", "model", "expected"),
    [
        ({"state": "done", "policy_version": 10}, True, True),
        ({"state": "done", "policy_version": 9}, True, False),
        ({"state": "drained", "policy_version": 10}, True, False),
        ({"state": "done", "policy_version": 10}, False, False),
        (None, True, False),
    ],
)
def test_run_is_finished_with_all_steps_and_a_model(config, run, record, model, expected):
    if record is not None:
        write_json(run.learner_json, {"pid": 1, "incarnation": 0, "time_s": 0.0, **record})
    if model:
        run.model.mkdir()
        (run.model / "config.json").write_text("{}")
    assert finished(run, config) is expected
