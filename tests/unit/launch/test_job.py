"""`up`: its words when a role fails for good, what it starts again, and when a run is finished."""

import dataclasses
import sys

import msgspec
import pytest

from common.config.schema import BrokerConfig
from common.errors import SlipstreamError
from common.process.lifecycle import DrainFlag
from common.process.run_dir import write_json
from launch.up.supervisor import Role, RoleSpec
from launch.up.up import Job, finished, role_specs
from tests.launch_rig import write_broker
from tests.waiting import until


def test_a_failure_is_said_before_the_others_are_stopped_also_with_a_full_disk(
    config, run, monkeypatch, capsys
) -> None:
    """The broker fails at once, and every event meets a full disk, which must not end the supervisor."""
    run.events.symlink_to("/dev/full")
    job = Job(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, max_restarts=0)), run, {})
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    start, said = job.supervisor.start, list[str]()

    def start_failing(spec: RoleSpec) -> Role:
        return start(dataclasses.replace(spec, argv=[sys.executable, "-c", "raise SystemExit('a line')"]))

    monkeypatch.setattr(job.supervisor, "start", start_failing)
    monkeypatch.setattr(job.supervisor, "stop", lambda names, timeout_s: said.append(capsys.readouterr().out))
    why = r"broker failed: exit code 1; the end of its log, .*broker-0\.log:\n  a line"
    with pytest.raises(SlipstreamError, match=why):
        job.run(plain=True)
    assert "events.jsonl cannot be written: No space left on device" in said[0]
    assert "broker failed: exit code 1; the end of its log" in said[0] and "broker-0.log; stopping the job" in said[0]


def test_metrics_that_cannot_be_read_end_no_job(config, run, monkeypatch, capsys) -> None:
    run.metrics.mkdir()
    write_broker(run)
    write_json(run.learner_json, {"pid": 1, "incarnation": 0, "time_s": 0.0, "state": "done", "policy_version": 10})
    job = Job(config, run, {})
    job._specs = [dataclasses.replace(s, argv=["sleep", "600"] if s.name == "broker" else ["true"]) for s in job._specs]
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    assert job.run(plain=True) == 0
    assert "done: 10 of 10 steps" in capsys.readouterr().out
    assert job.supervisor.roles["broker"].exit_code == -15, "told by SIGTERM, it could write its ledger"


@pytest.mark.parametrize("first", ["broker", "learner"])
def test_a_job_whose_broker_or_learner_was_told_to_stop_ends_well(config, run, monkeypatch, capsys, first) -> None:
    """With `slipstream stop` either may be seen to end first."""
    write_broker(run)
    job = Job(config, run, {})
    job._specs = [dataclasses.replace(s, argv=["true"] if s.name == first else ["sleep", "600"]) for s in job._specs]
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    assert job.run(plain=True) == 0
    said = capsys.readouterr().out
    assert f"the {first} was told to stop; stopping the job" in said and "stopped; the same command" in said
    assert {role.exit_code for name, role in job.supervisor.roles.items() if name != first} == {-15}


@pytest.mark.parametrize("restarts", [3, 0])
def test_a_broker_that_dies_when_the_job_is_done_is_started_again_or_nobody_waits_for_it(
    config, run, monkeypatch, tmp_path, restarts
) -> None:
    """Nodes learn from the broker that the job is done. Here they wait for the file that the second broker writes."""
    write_broker(run)
    write_json(run.learner_json, {"pid": 1, "incarnation": 0, "time_s": 0.0, "state": "done", "policy_version": 10})
    job = Job(config, run, {})
    second, done = tmp_path / "second", tmp_path / "done"
    first_broker = f"until [ -e {done} ]; do sleep 0.05; done; touch {second}; kill -9 $$"
    words = {
        "broker": f"if [ -e {second} ]; then touch {tmp_path}/told; exec sleep 600; else {first_broker}; fi",
        "learner": f"touch {done}",
        "node-0": f"until [ -e {tmp_path}/told ]; do sleep 0.05; done",
    }
    job._specs = [dataclasses.replace(s, argv=["sh", "-c", words[s.name]], max_restarts=restarts) for s in job._specs]
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    monkeypatch.setattr(
        job, "_watch", lambda flag: until(second.exists)
    )  # the learner was seen to end before the broker
    assert job.run(plain=True) == 0
    assert job.supervisor.roles["node-0"].exit_code == (0 if restarts else -15)
    assert job.supervisor.roles["broker"].restarts == (1 if restarts else 0)


LOOK = """
import sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
while True:
    try:
        open(sys.argv[1], "wb").write(opener.open(sys.argv[2], timeout=60).read())
        break
    except OSError:
        time.sleep(0.05)
"""


def test_up_serves_the_page_until_the_job_is_done(config, run, monkeypatch, capsys, tmp_path) -> None:
    """The page is the real one; the learner is done when it has got the page's first answer."""
    write_broker(run)
    write_json(run.learner_json, {"pid": 1, "incarnation": 0, "time_s": 0.0, "state": "done", "policy_version": 10})
    job = Job(config, run, {}, web=True)
    address = f"http://127.0.0.1:{job._specs[-1].argv[-1]}/"
    others = {
        "broker": ["sleep", "600"],
        "learner": ["timeout", "120", sys.executable, "-c", LOOK, str(tmp_path / "page"), address],
    }
    job._specs = [
        s if s.name == "web" else dataclasses.replace(s, argv=others.get(s.name, ["true"]), max_restarts=0)
        for s in job._specs
    ]
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    assert job.run(plain=True) == 0
    said = capsys.readouterr().out
    assert f"the page is at {address}" in said and "done: 10 of 10 steps" in said
    assert "<caption>" in (tmp_path / "page").read_text()
    assert job.supervisor.roles["web"].exit_code == 0, "it ended when it was told to"


def test_a_page_that_fails_for_good_harms_no_job(config, run, monkeypatch, capsys) -> None:
    write_broker(run)
    write_json(run.learner_json, {"pid": 1, "incarnation": 0, "time_s": 0.0, "state": "done", "policy_version": 10})
    job = Job(config, run, {}, web=True)
    gone = f"until grep -qs role_gave_up {run.events}; do sleep 0.05; done"
    others = {
        "broker": ["sleep", "600"],
        "learner": ["timeout", "120", "sh", "-c", gone],
        "web": ["sh", "-c", "exit 2"],
    }
    job._specs = [dataclasses.replace(s, argv=others.get(s.name, ["true"]), max_restarts=0) for s in job._specs]
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    assert job.run(plain=True) == 0
    said = capsys.readouterr().out
    assert "web: exit code 2; the job continues without it" in said and "done: 10 of 10 steps" in said


@pytest.mark.parametrize(("durability", "restarts"), [("fsync", 3), ("everysec", 3), ("memory", 0)])
def test_a_broker_that_died_is_started_again_unless_it_would_have_forgotten_everything(
    config, run, durability, restarts
) -> None:
    specs = role_specs(msgspec.structs.replace(config, broker=BrokerConfig(durability=durability)), run, {})
    assert {spec.name: spec.max_restarts for spec in specs} == {"broker": restarts, "learner": 3, "node-0": 3}


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
    assert finished(run, config) == (
        f"{run.path} is finished: 10 steps, the model is in {run.model}" if expected else ""
    )
