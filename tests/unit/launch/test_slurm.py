"""`slipstream slurm` and `scale` where there is no Slurm: scripts, options, refusals, and the advisor's fleet."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from common.errors import EXIT_DONE, EXIT_HOPELESS, UsageError
from common.process.run_dir import RunDir, write_json
from launch.cli import main
from launch.cluster.slurm import jobs, role_job
from launch.cluster.slurm.container import paths
from launch.cluster.slurm.jobs import SlurmError
from launch.cluster.slurm.role_job import RoleJob
from launch.cluster.slurm.submit import parse_bounds, parse_options, wanted_nodes
from launch.observe.advisor import Advice
from tests.rigs.configs import job_of, prepared, refusal, write_job
from tests.rigs.refusals import refused
from tests.rigs.waiting import until

RELAY = {"weights": {"transport": "relay"}}


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def options_of(script: str) -> dict[str, str]:
    """The #SBATCH lines of a script."""
    words = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def dry_run(folder: Path, *words: str, **sections: object) -> dict[str, str]:
    """The scripts by role."""
    assert main(["slurm", str(write_job(folder, **RELAY | sections)), "--dry-run", *words]) == 0
    return {file.stem: file.read_text() for file in (folder / "run" / "slurm").glob("*.sbatch")}


@pytest.mark.usefixtures("no_slurm")
def test_dry_run_writes_and_prints_three_scripts_without_slurm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = {"world_size": 4, "parallel": {"tensor": 2}, "threads": 3}
    made = dry_run(tmp_path, rollout={"nodes": 5, "max_tokens": 100, "engine": {"max_model_len": 512}}, learner=learner)
    assert set(made) == {"broker", "learner", "fleet"}
    assert all(script in capsys.readouterr().out for script in [*made.values()][:1])
    broker, rank, fleet = (options_of(made[role]) for role in ("broker", "learner", "fleet"))
    assert (rank["nodes"], rank["gpus-per-node"], rank["cpus-per-task"]) == ("1", "4", "13")
    assert (fleet["gpus-per-node"], "gpus-per-node" in broker) == ("1", False)
    assert all("requeue" in role and role["signal"] == "B:TERM@60" for role in (broker, rank, fleet))
    assert "'broker.address=tcp://{host}:0'" in made["broker"]
    assert "--join '{broker}'" in made["fleet"]
    keys = tmp_path / "run" / "keys"
    assert (keys / "nodes" / "fleet.json").stat().st_mode & 0o077 == 0
    assert f"credentials: {keys}" in (tmp_path / "run" / "config.yaml").read_text()
    before = (keys / "server.json").read_bytes()
    dry_run(tmp_path, learner=learner)
    assert (keys / "server.json").read_bytes() == before


def test_options_of_the_command_replace_those_of_the_config(tmp_path: Path) -> None:
    words = ["account=lab", "fleet:partition=spot", "gpus-per-node=", "learner:gres=gpu:h100:8", "fleet:exclusive"]
    made = dry_run(tmp_path, *(word for option in words for word in ("--sbatch", option)))
    assert all("--account=lab" in script and "gpus-per-node" not in script for script in made.values())
    assert options_of(made["fleet"])["partition"] == "spot"
    assert "#SBATCH --exclusive\n" in made["fleet"]
    assert options_of(made["learner"])["gres"] == "gpu:h100:8"
    assert "partition" not in options_of(made["learner"])


def command_of(script: str) -> list[str]:
    """The words of the role behind role_job's, as the shell reads them."""
    return shlex.split(script[script.rindex("role_job") :].replace("\\\n", " "))[4:]


def test_lines_of_a_role_run_before_it_and_a_wrong_one_ends_the_job(tmp_path: Path) -> None:
    words = ["--setup", "echo all", "--setup", "learner:echo mine; false", "--setup", "echo never"]
    made = dry_run(tmp_path, *words)
    run = {role: script.replace("exec ", "exec true ") for role, script in made.items()}
    done = {role: subprocess.run(["bash", "-c", text], capture_output=True, text=True) for role, text in run.items()}
    assert [(done[role].stdout, done[role].returncode) for role in ("broker", "learner", "fleet")] == [
        ("all\nnever\n", 0),
        ("all\nmine\n", 1),
        ("all\nnever\n", 0),
    ]
    (tmp_path / "plain").mkdir()
    assert not any("set -e" in script for script in dry_run(tmp_path / "plain").values())


def test_a_role_runs_in_its_container_with_the_folders_that_its_config_names(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nowhere"))
    monkeypatch.chdir(tmp_path)
    Path("fleet.sif").touch()
    (tmp_path / "my job").mkdir()
    learner = {"world_size": 2, "machines": 2}
    images = ["--container", "fleet.sif", "--container", "learner:lab/image:1", "--container", "broker:"]
    made = {role: command_of(text) for role, text in dry_run(tmp_path / "my job", *images, learner=learner).items()}
    config = str(tmp_path / "my job" / "run" / "config.yaml")
    assert made["broker"][:5] == [sys.executable, "-P", "-m", "launch.cli", "broker"], "on the host"
    runtime, how, gpus, bind, folders, image, *inside = made["fleet"]
    assert (runtime, how, gpus, bind, image) == ("apptainer", "exec", "--nv", "--bind", "fleet.sif")
    assert inside[:6] == ["env", "-u", "PYTHONPATH", "slipstream", "rollout", config]
    mounted = [Path(folder) for folder in folders.split(",")]
    for needed in (config, tmp_path / "my job" / "run" / "keys", Path.cwd(), job_of(tmp_path / "my job").model.path):
        assert any(Path(needed).is_relative_to(folder) for folder in mounted), needed
    assert Path("/") not in mounted
    srun, *options = made["learner"]
    assert srun == "srun" and "--container-image=lab/image:1" in options
    (mounts,) = (word for word in options if word.startswith("--container-mounts="))
    assert mounts.partition("=")[2].split(",") == [f"{folder}:{folder}" for folder in folders.split(",")]
    assert options[options.index("slipstream") :][:4] == ["slipstream", "learner", config, "--join"]


def test_an_image_that_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("learner.sif").touch()
    job = str(write_job(tmp_path, **RELAY))
    for image, said in (("lerner.sif", "'learner.sif'"), ("./images/l.sqsh", "registry.example"), ("/no/where", "#")):
        text = refusal(capsys, "slurm", job, "--dry-run", "--container", f"fleet:{image}")
        assert f"found '{image}'" in text and said in text
    assert not (tmp_path / "run").exists()


def test_no_word_of_an_error_is_obeyed_by_the_terminal(capsys) -> None:
    role_job.say("the end of its log:\x1b[2J")
    assert r"log:\x1b[2J" in capsys.readouterr().out


def test_after_a_dry_run_the_config_may_change_until_a_job_is_submitted(tmp_path: Path, capsys) -> None:
    dry_run(tmp_path)
    assert options_of(dry_run(tmp_path, "learner.world_size=4")["learner"])["gpus-per-node"] == "4"
    (tmp_path / "run" / "slurm" / "jobs.json").write_text("{}")
    said = refusal(capsys, "slurm", str(tmp_path / "job.yaml"), "--dry-run", "learner.world_size=4", "run.seed=2")
    assert "run.seed was 0 and now is 2" in said


def test_a_container_gets_every_path_of_the_config_itself_and_never_the_root(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir("/")
    monkeypatch.delenv("HF_HOME", raising=False)
    job = job_of(tmp_path)
    names = ("key.json", "critic", "scorer", "one.jsonl", "venv/bin/python", "parts/0.jsonl")
    needed = [tmp_path / name for name in names]
    for path in needed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    document = msgspec.to_builtins(job)
    document["broker"]["credentials"] = str(needed[0])
    document["learner"]["critic"] = {"path": str(needed[1])}
    document["scorers"] = {"judge": {"url": "http://localhost:1/v1", "model": "m", "tokenizer": str(needed[2])}}
    document["tasks"]["dataset"] = str(needed[3])
    document["tasks"]["limits"] = {"python": str(needed[4])}
    document["evaluation"]["datasets"] = [str(tmp_path / "parts" / "*.jsonl")]
    run = RunDir(tmp_path / "run")
    found = paths(msgspec.convert(document, type(job)), run)
    assert "/" not in found and str(tmp_path) not in found
    wanted = [*needed[:4], tmp_path / "venv", tmp_path / "parts"]
    assert {str(path) for path in wanted} <= {*found}
    for name in ("a,b", "a:b"):
        (tmp_path / name).touch()
        document["broker"]["credentials"] = str(tmp_path / name)
        with refused(UsageError, "--container", name):
            paths(msgspec.convert(document, type(job)), run)


@pytest.mark.parametrize("word", ["-p gpu", "lerner:time=1", "=1"])
def test_an_unreadable_option_is_refused(word: str) -> None:
    with refused(UsageError, "--sbatch: expected", repr(word)):
        parse_options([word])


def test_weights_that_stay_on_one_machine_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = refusal(capsys, "slurm", str(write_job(tmp_path)), "--dry-run")
    assert "weights.transport: expected" in found
    assert "weights.network: trusted" in found
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", ["check", "other run"])
def test_a_refused_dry_run_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    job = str(write_job(tmp_path, **RELAY))
    if case == "check":
        assert "rollout.group_size" in refusal(capsys, "slurm", job, "rollout.group_size=1", "--dry-run")
        assert not (tmp_path / "run").exists()
        return
    prepared(job_of(tmp_path, **RELAY))
    (tmp_path / "run" / "metrics.jsonl").touch()  # it has begun
    before = sorted((tmp_path / "run").rglob("*"))
    assert "learner.optimizer.lr" in refusal(capsys, "slurm", job, "learner.optimizer.lr=0.5", "--dry-run")
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_on_a_trusted_network_collectives_may_carry_weights_and_keys_are_made_all_the_same(
    tmp_path: Path, transport: str
) -> None:
    weights = {"transport": transport, "network": "trusted"}
    for name in ("one", "several"):
        (tmp_path / name).mkdir()
    one = dry_run(tmp_path / "one", weights=weights)
    assert "'weights.address={host}'" in one["learner"]
    assert (tmp_path / "one" / "run" / "keys" / "server.json").exists()
    several = dry_run(tmp_path / "several", weights=weights, learner={"machines": 2, "world_size": 2})
    assert options_of(several["learner"])["nodes"] == "2"


@pytest.mark.usefixtures("no_slurm")
def test_without_slurm_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, **RELAY)
    assert "sbatch is" in refusal(capsys, "slurm", str(job))
    assert not (tmp_path / "run").exists()
    run = prepared(job_of(tmp_path)).path
    assert "no jobs" in refusal(capsys, "scale", str(run), "--rollouts", "2")


@pytest.mark.parametrize("word", ["3", "4..2", "0..3", "1..x"])
def test_bounds_of_the_fleet_are_checked(word: str) -> None:
    with refused(UsageError, "MIN..MAX", repr(word)):
        parse_bounds(word)


def test_the_advice_is_followed_within_bounds_and_only_for_the_fleet_it_is_about() -> None:
    more, fewer = Advice("more_nodes", "", 9, 0.5, 0.1), Advice("fewer_nodes", "", 1, 0.0, 0.0)
    window = Advice("larger_window", "", 0, 0.5, 0.1)
    assert parse_bounds("2..6") == (2, 6)
    assert wanted_nodes(more, live=3, nodes=3, bounds=(2, 6)) == 6
    assert wanted_nodes(fewer, live=3, nodes=3, bounds=(2, 6)) == 2
    assert wanted_nodes(more, live=3, nodes=5, bounds=(2, 6)) == 5  # two nodes still start
    assert wanted_nodes(window, live=3, nodes=3, bounds=(2, 6)) == 3
    assert wanted_nodes(None, live=0, nodes=0, bounds=(2, 6)) == 2


# ---------------------------------------------------------------- a controller that does not answer


@pytest.fixture
def slurm_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Makes every command of Slurm fail as often as told, by its first two words; returns what was asked."""

    def make(failures: dict[str, int], **answers: str) -> list[str]:
        asked: list[str] = []

        def answer(*words: str) -> str:
            name = " ".join(words[:2])
            asked.append(name)
            if failures.get(name, 0):
                failures[name] -= 1
                raise SlurmError("Unable to contact slurm controller")
            return answers.get(words[0], "")

        for module in (jobs, role_job):
            monkeypatch.setattr(module, "slurm", answer)
        monkeypatch.setattr(jobs, "AGAIN_S", 0.01)
        monkeypatch.setattr(role_job.signal, "signal", lambda *_: None)
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        return asked

    return make


RUNNING = "JobId=7 JobState=RUNNING EndTime=2100-01-01T00:00:00"


def test_a_requeue_that_the_controller_refuses_is_repeated_and_told_when_it_is_done(
    tmp_path: Path, slurm_of: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = slurm_of({"scontrol requeue": 2}, scontrol=RUNNING)
    drained = RoleJob(prepared(job_of(tmp_path)), "learner", ["true"])
    drained.flag.set("SIGTERM")
    assert drained.run() == EXIT_DONE
    assert asked.count("scontrol requeue") == 3
    said = capsys.readouterr().out
    assert said.count("Unable to contact") == 2 and said.rstrip().endswith("learner: requeued")


def test_a_requeue_that_is_refused_to_the_end_fails_the_job_and_is_not_told_as_one(
    tmp_path: Path, slurm_of: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    slurm_of({"scontrol requeue": 1000}, scontrol=RUNNING)
    monkeypatch.setattr(jobs, "LONGEST_S", 0.05)
    drained = RoleJob(prepared(job_of(tmp_path)), "learner", ["true"])
    drained.flag.set("SIGTERM")
    with refused(SlurmError, "Unable to contact"):
        drained.run()
    assert "requeued" not in capsys.readouterr().out


@pytest.mark.parametrize("failures", [2, 1000])
def test_a_learner_that_ends_for_good_keeps_its_exit_code_while_the_queue_cannot_be_read(
    tmp_path: Path, slurm_of: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch, failures: int
) -> None:
    asked = slurm_of({"squeue --me": failures})
    monkeypatch.setattr(jobs, "LONGEST_S", 0.1)
    run = prepared(job_of(tmp_path))
    write_json(run.slurm_jobs, jobs.Jobs(learner="7"))
    learner = RoleJob(run, "learner", ["sh", "-c", f"exit {EXIT_HOPELESS}"])
    assert learner.run() == EXIT_HOPELESS
    said = capsys.readouterr().out
    assert ("jobs may go on" in said) == (failures > 2) and asked.count("squeue --me") > failures % 1000


def test_a_step_is_told_to_drain_until_the_controller_takes_it(
    tmp_path: Path, slurm_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, told = tmp_path / "running", tmp_path / "told"
    (tmp_path / "srun").write_text(f"#!/bin/sh\ntouch {running}\nwhile ! [ -e {told} ]; do sleep 0.05; done\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    asked = slurm_of({"scancel --signal=TERM": 2}, scontrol=RUNNING)
    step = RoleJob(prepared(job_of(tmp_path)), "learner", ["srun"])

    def drain() -> None:
        until(running.exists)
        step.flag.set("SIGUSR1")
        until(lambda: asked.count("scancel --signal=TERM") == 3)
        told.touch()

    Thread(target=drain).start()
    assert step.run() == EXIT_DONE
    assert asked.count("scancel --signal=TERM") == 3


def test_what_a_person_wants_to_see_of_slurm_does_not_change_what_is_read(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "squeue").write_text(
        '#!/bin/sh\necho "$SLURM_TIME_FORMAT $SQUEUE_STATES$SQUEUE_FORMAT2$SCANCEL_INTERACTIVE $SLURM_CONF"\n'
    )
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    of_a_person = {"SQUEUE_STATES": "RUNNING", "SQUEUE_FORMAT2": "jobid", "SCANCEL_INTERACTIVE": "1"}
    for name, value in {**of_a_person, "SLURM_TIME_FORMAT": "relative", "SLURM_CONF": "/conf"}.items():
        monkeypatch.setenv(name, value)
    assert jobs.slurm("squeue").split() == ["standard", "/conf"]


@pytest.mark.parametrize("ends", ["Unknown", "10:30:00", "Tomorr 10:30"])
def test_a_job_whose_end_cannot_be_read_drains_and_is_requeued(
    tmp_path: Path, slurm_of: Callable[..., list[str]], ends: str
) -> None:
    asked = slurm_of({}, scontrol=f"JobId=7 JobState=RUNNING EndTime={ends}")
    drained = RoleJob(prepared(job_of(tmp_path)), "learner", ["true"])
    drained.flag.set("SIGTERM")
    assert drained.run() == EXIT_DONE
    assert asked[-1] == "scontrol requeue"


@pytest.mark.parametrize(("now", "ends"), [("00:29", "00:30"), ("01:29", "01:30")])
def test_a_job_that_ends_in_the_hour_that_a_clock_change_repeats_has_its_whole_time_to_drain(
    monkeypatch, now: str, ends: str
) -> None:
    began, ended = (datetime.fromisoformat(f"2026-10-25T{at}:00").replace(tzinfo=UTC) for at in (now, ends))
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        told = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(ended.timestamp()))
        monkeypatch.setattr(time, "time", began.timestamp)
        assert told == "2026-10-25T02:30:00"
        assert role_job.ends_at(told) == ended.timestamp()
    finally:
        monkeypatch.undo()
        time.tzset()
