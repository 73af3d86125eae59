"""`up`: its words when a role fails for good, what it starts again, and when a run is finished."""

import dataclasses
import json
import os
import pty
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest
import yaml

from common.config.checks import resolve_paths
from common.config.loading import load_config
from common.config.schema import BrokerConfig
from common.errors import SlipstreamError
from common.evaluation import EvalResult
from common.process.lifecycle import DrainFlag
from common.process.run_dir import write_json
from common.run_reader import read_recent
from launch.cli import main
from launch.observe.observation import outcome_of
from launch.up import roles, up
from launch.up.supervisor import Role, RoleSpec
from launch.up.up import Job, role_specs
from tests.rigs.configs import json_of, node_status, prepared, refusal, status_of, write_broker, write_job
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until

DONE = {"pid": 1, "incarnation": 0, "time_s": 0.0, "state": "done", "policy_version": 10}


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
    with refused(SlipstreamError, "broker", "code 1", "broker-0.log:\n  a line"):
        job.run(plain=True)
    assert "events.jsonl cannot" in said[0]
    assert "broker failed: exit code 1; the end of its log" in said[0] and "broker-0.log; stopping the job" in said[0]


def test_metrics_that_cannot_be_read_end_no_job(config, run, monkeypatch, capsys) -> None:
    run.metrics.mkdir()
    write_broker(run)
    write_json(run.learner_json, DONE)
    job = Job(config, run, {})
    job._specs = [dataclasses.replace(s, argv=["sleep", "600"] if s.name == "broker" else ["true"]) for s in job._specs]
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    assert job.run(plain=True) == 0
    assert "done: 10" in capsys.readouterr().out
    assert job.supervisor.roles["broker"].exit_code == -15, "told by SIGTERM, it could write its ledger"


@pytest.mark.parametrize("reads", [True, False])
def test_a_job_waits_for_a_broker_that_reads_a_long_history_and_for_no_other(
    config, run, monkeypatch, capsys, reads
) -> None:
    monkeypatch.setattr(up, "BROKER_START_S", 0.2)
    job = Job(config, run, {})
    job._specs = [dataclasses.replace(s, argv=["sleep", "600"] if s.name == "broker" else ["true"]) for s in job._specs]
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    note, waited = job._note, list[str]()

    def noted(text: str) -> None:
        note(text)
        waited.append(text)
        if len(waited) == 3:
            run.recovering.unlink()
            write_broker(run)
            write_json(run.learner_json, DONE)

    if not reads:
        with refused(SlipstreamError, "the broker did not come up within 0.2 s", "broker-0.log"):
            job.run(plain=True)
        return
    run.recovering.touch()
    monkeypatch.setattr(job, "_note", noted)
    assert job.run(plain=True) == 0
    said = capsys.readouterr().out
    assert said.count("waiting for the broker, which still reads the run's store; log: ") == 3
    assert "done: 10 of 10" in said


@pytest.mark.parametrize("where", ["pipe", "full disk", "terminal"])
def test_a_job_whose_words_nobody_gets_is_done_all_the_same(config, run, monkeypatch, where) -> None:
    """`up | tee log` where tee ends, stdout on a full disk, and a terminal whose connection breaks."""
    write_broker(run)
    write_json(run.learner_json, DONE)
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    reader, writer = pty.openpty() if where == "terminal" else os.pipe()
    job = Job(config, run, {})
    job._specs = [dataclasses.replace(s, argv=["sleep", "600"] if s.name == "broker" else ["true"]) for s in job._specs]
    start, readers = job.supervisor.start, [reader]

    def start_unseen(spec: RoleSpec) -> Role:
        while readers:
            os.close(readers.pop())
        return start(spec)

    monkeypatch.setattr(job.supervisor, "start", start_unseen)
    code = None
    place = "/dev/full" if where == "full disk" else writer
    with suppress(OSError), open(place, "w", encoding="utf-8") as stdout, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        code = job.run(plain=False)
    assert code == 0
    assert job.supervisor.roles["broker"].exit_code == -15, "told by SIGTERM, not killed"


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
    write_json(run.learner_json, DONE)
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


@pytest.mark.slow
def test_up_serves_the_page_until_the_job_is_done(config, run, monkeypatch, capsys, tmp_path) -> None:
    """The page is the real one; the learner is done when it has got the page's first answer."""
    write_broker(run)
    write_json(run.learner_json, DONE)
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
    assert f"the page is at {address}" in said and "done: 10 of 10 steps" in said and "stays" not in said
    assert f"next: `slipstream web {run.path}` shows the run in a browser" in said
    assert "<caption>" in (tmp_path / "page").read_text()
    assert job.supervisor.roles["web"].exit_code == 0, "it ended when it was told to"


@pytest.mark.slow
def test_the_page_stays_after_the_job_until_the_next_signal_and_the_run_is_free(
    config, run, monkeypatch, capsys, tmp_path
) -> None:
    write_broker(run)
    write_json(run.learner_json, DONE)
    job, flag, freed = Job(config, run, {}, web=True), DrainFlag(), list[bool]()
    address = f"http://127.0.0.1:{job._specs[-1].argv[-1]}/"
    ends = {"broker": ["sleep", "600"]}
    job._specs = [
        s if s.name == "web" else dataclasses.replace(s, argv=ends.get(s.name, ["true"]), max_restarts=0)
        for s in job._specs
    ]
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: flag)

    def look_when_the_broker_has_ended() -> None:
        until(lambda: "broker" in job.supervisor.roles and not job.supervisor.roles["broker"].running)
        until(lambda: freed)
        subprocess.run([sys.executable, "-c", LOOK, str(tmp_path / "page"), address], timeout=LIMIT_S, check=True)
        flag.set("SIGINT")

    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look_when_the_broker_has_ended)
        assert job.run(plain=True, before_stay=lambda: freed.append(True)) == 0
        looked.result()
    said = capsys.readouterr().out
    assert said.index("done: 10 of 10 steps") < said.index(f"the page stays at {address} until Ctrl-C")
    assert "<caption>" in (tmp_path / "page").read_text()
    assert job.supervisor.roles["web"].exit_code == 0


def test_a_page_that_fails_for_good_harms_no_job(config, run, monkeypatch, capsys) -> None:
    write_broker(run)
    write_json(run.learner_json, DONE)
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
    assert "web: exit code 2; the job continues without it" in said and "done: 10" in said


@pytest.mark.parametrize(("durability", "restarts"), [("fsync", 3), ("everysec", 3), ("memory", 0)])
def test_a_broker_that_died_is_started_again_unless_it_would_have_forgotten_everything(
    config, run, durability, restarts
) -> None:
    specs = role_specs(msgspec.structs.replace(config, broker=BrokerConfig(durability=durability)), run, {})
    assert {spec.name: spec.max_restarts for spec in specs} == {"broker": restarts, "learner": 3, "node-0": 3}


@pytest.mark.parametrize("command", ["up", "broker", "learner", "slurm"])
def test_a_config_in_its_own_run_folder_is_not_replaced(tmp_path, capsys, monkeypatch, command) -> None:
    monkeypatch.setattr(roles, "need_packages", lambda *names: None)
    file = write_job(tmp_path).rename(tmp_path / "config.yaml")
    before = file.read_bytes()
    words = [str(file), f"run.dir={tmp_path}", "weights.transport=relay"]
    said = refusal(capsys, command, *words, *["--dry-run"] * (command == "slurm"))
    assert f"{file}: " in said and "run.dir" in said
    assert file.read_bytes() == before and {path.name for path in tmp_path.iterdir()} == {
        "config.yaml", "model", "train.jsonl"
    }  # fmt: skip


def test_up_refuses_one_health_port_for_all_its_roles_and_plan_says_so(job, run, capsys) -> None:
    words = [str(job), f"run.dir={run.path.parent / 'probed'}", "telemetry.health_port=8080"]
    said = refusal(capsys, "up", *words)
    fact = "telemetry.health_port: expected 0 with `slipstream up`, found 8080; "
    assert f"{job}: {fact}" in said and "started one by one" in said
    assert not (run.path.parent / "probed").exists()
    main(["plan", *words, "--json"])
    made = json.loads(capsys.readouterr().out)
    assert [line for line in made["before_launch"] if line.startswith(fact)] and fact not in str(made["failed"])


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
    assert outcome_of(run, config, read_recent(run.metrics)).finished == expected


def test_a_launch_says_once_which_keys_have_no_effect_and_a_role_does_not(tmp_path, capsys, monkeypatch):
    file = write_job(tmp_path, learner={"optimizer": {"decay_steps": 9}}, weights={"transport": "relay"})
    for module in (up, roles):
        monkeypatch.setattr(module, "need_packages", lambda *names: None)
    monkeypatch.setattr(up, "Job", lambda *words: SimpleNamespace(run=lambda *words: 0))
    monkeypatch.setattr(roles, "become_torchrun", lambda *words: 0)
    document = yaml.safe_load(file.read_text())
    warm = {key: document[key] for key in ("run", "model", "learner")} | {"tasks": {"dataset": str(tmp_path / "t")}}
    warm["run"] = {**warm["run"], "dir": str(tmp_path / "warm")}
    shutil.copy(document["tasks"]["dataset"], tmp_path / "t")
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(warm))
    other = f"run.dir={tmp_path / 'slurm'}"
    for words in (["up", file], ["sft", tmp_path / "sft.yaml"], ["slurm", file, "--dry-run", other]):
        assert main([str(word) for word in words]) == 0
        assert capsys.readouterr().err.count("warning: learner.optimizer.decay_steps has no effect with ") == 1
    assert main(["learner", str(file)]) == 0
    assert "no effect" not in "".join(capsys.readouterr())


def test_up_on_a_finished_run_says_what_it_has_reached_and_the_next_command(tmp_path, capsys):
    file = write_job(tmp_path)
    run = prepared(resolve_paths(load_config(file)))
    finish(run, steps=5)
    assert main(["up", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{run.path} is finished: 5 of 5 steps; reward 0.200 (first 5 steps) to 0.200 (last 10); ")
    assert f"model in {run.model}\nnext: `slipstream web {run.path}` shows the run in a browser\n" in said


def finish(run, steps: int) -> None:
    """Write the files that a job of `steps` steps leaves."""
    lines = [{"step": n, "policy_version": n + 1, "reward_mean": n / 10} for n in range(steps)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(run.learner_json, {"pid": 1, "incarnation": 0, "time_s": 0.0, "state": "done", "policy_version": steps})
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")


@pytest.mark.slow
def test_the_status_of_a_finished_run_says_reward_accuracy_and_where_the_model_is(config, run, capsys):
    finish(run, steps=10)
    write_json(run.status_json, status_of(node_status(alive=False)))

    def says(*words: str) -> bool:
        assert main(["status", str(run.path)]) == 0
        text = "".join(capsys.readouterr().out.split())  # lines are wrapped, within long paths too
        return all("".join(word.split()) in text for word in words)

    reward = "finished: 10 of 10 steps; reward 0.200 (first 5 steps) to 0.450 (last 10); model in"
    assert says(reward, f"slipstream web {run.path}")
    assert not says("the broker has ended") and not says("gone")
    with run.metrics.open("a") as file:
        for version, reward in ((5, 0.1), (10, 0.75)):
            known = {"kind": "evaluation", "step": version, "policy_version": version}
            line = known | {"dataset": "held", "mean_reward": reward}
            file.write(json.dumps(line) + "\n")
    assert says("held-out accuracy 0.750 (held)")
    write_json(run.path / "eval.json", {"greedy_accuracy": 0.875, "sampled_accuracy": 0.8125, "problems": 16})
    run.report.mkdir()
    (run.report / "report.html").touch()
    assert says(f"held-out accuracy 0.875 (greedy), 0.812 (sampled); model in {run.model}; report in")
    found = json_of(capsys, "status", str(run.path))["finished"]
    assert (found["steps"], found["of"], found["model"]) == (10, 10, str(run.model))
    assert found["held_out"] == {"greedy": 0.875, "sampled": 0.8125}
    os.utime(run.path / "eval.json", (1.0, 1.0))
    assert says("0.750 (held)"), "the measurement of an earlier model does not count"


def test_an_accuracy_counts_for_the_version_that_was_measured_whatever_the_files_times_say(
    job, tmp_path, monkeypatch, capsys
):
    from rollout_fleet.engine import engine
    from rollout_fleet.node import evaluate

    accuracies = iter((0.5, 0.25))
    monkeypatch.setattr(roles, "need_packages", lambda *_: None)
    monkeypatch.setattr(engine, "import_ahead", lambda *_: None)
    monkeypatch.setattr(evaluate, "run_eval", lambda *_: EvalResult(next(accuracies), 0.0, 16))
    config = load_config(job)
    run = prepared(resolve_paths(config))
    finish(run, steps=10)

    def held_out(steps: int) -> dict[str, float]:
        longer = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=steps))
        return outcome_of(run, longer, read_recent(run.metrics)).held_out

    words = ["eval", str(run.path), f"evaluation.datasets=[{config.tasks.dataset}]"]
    assert main(words) == 0
    for at in (1.0, 2e9):  # as after a copy of the folder
        os.utime(run.path / "eval.json", (at, at))
        assert held_out(10) == {"greedy": 0.5, "sampled": 0.0}
    write_json(run.learner_json, {"pid": 1, "incarnation": 1, "time_s": 0.0, "state": "done", "policy_version": 20})
    assert held_out(20) == {}, "that of the model of 10 steps"
    assert main([*words, "--model", str(tmp_path)]) == 0
    assert held_out(20) == {}, "that of another folder"
    assert "greedy accuracy 0.250" in capsys.readouterr().out
