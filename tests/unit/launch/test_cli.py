"""The command line: every bad input ends with exit code 2 and a line that says what to do."""

import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import yaml

from broker.client.connect import connect_node
from broker.main import run_info
from common.errors import EXIT_FAILED, EXIT_USAGE
from common.process.install import ENVIRONMENTS
from common.process.run_dir import RunDir
from launch.cli import COMMANDS, GROUPS, main, parse
from launch.resolve_target import load_job
from launch.up import ranks
from launch.up.roles import role_command
from rollout_fleet import main as node
from tests.rigs.brokers import new_state, serving
from tests.rigs.configs import HEAVY, imported_by, living_broker, refusal, run_cli
from tests.rigs.processes import ROOT
from tests.rigs.redis_servers import free_port
from tests.rigs.waiting import LIMIT_S


@pytest.mark.parametrize("command", ["up", "broker", "learner", "rollout"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.groupsize=8", ["<override>", "rollout.groupsize", "did you mean 'group_size'?"]),
        ("tasks.limits.memory_mib=1", ["tasks.limits.memory_mib", "an integer >= 32", "found 1"]),
        ("learner.world_size=3", ["learner.world_size", "multiple of 2"]),
    ],
)
def test_bad_config_is_refused_by_every_role(job, capsys, command, override, words):
    err = refusal(capsys, command, str(job), "learner.parallel.tensor=2", "learner.world_size=2", override)
    for word in words:
        assert word in err


def test_a_reader_that_has_gone_makes_no_work_done(job, tmp_path, monkeypatch):
    def gone(args):
        raise BrokenPipeError

    handlers = {"status": "observe.status.command", "up": "up.up.command", "sft": "up.roles.sft"}
    with (tmp_path / "stdout").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        for handler in handlers.values():
            monkeypatch.setattr(f"launch.{handler}", gone)
        assert {name: main([name, str(job)]) for name in handlers} == {"status": 0, "up": 1, "sft": 1}


@pytest.mark.parametrize("command", ["up", "broker"])
def test_without_redis_py_a_job_on_redis_is_refused_before_its_folder_is_made(job, capsys, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "redis.connection", None)
    words = [command, str(job), "broker.store=redis", "broker.redis=redis://127.0.0.1:1/0"]
    assert "slipstream-rl[redis]" in refusal(capsys, *words)
    assert not (job.parent / "run").exists()


def test_a_model_that_is_not_there_is_refused_by_those_who_read_it_and_no_matter_for_the_broker(job, capsys):
    for command in ("up", "learner", "rollout"):
        said = refusal(capsys, command, str(job), "model.path=nowhere")
        assert "model.path: expected" in said and "nowhere" in said
    words = ["broker", str(job), "model.path=nowhere", "tasks.dataset=nowhere.jsonl"]
    broker = subprocess.Popen([sys.executable, "-m", "launch.cli", *words], stderr=subprocess.PIPE)
    try:
        assert broker.stderr is not None
        assert b"listens on" in broker.stderr.readline()
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(LIMIT_S) == 0
    finally:
        broker.kill()
        broker.communicate()


def test_modules_of_a_jobs_folder_are_not_taken_for_ours(tmp_path: Path) -> None:
    for name in ("common", "launch", "broker", "learner", "rollout_fleet"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    done = subprocess.run(role_command(["broker", "--help"]), cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    words = ranks.torchrun(RunDir(tmp_path), ["--nproc-per-node", "1", "--standalone"], ["--help"])
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "python -m learner.main" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["up", "rollout"])
@pytest.mark.parametrize("name", ["no_such_module:Thing", "json:NoSuchClass", "adition"])
def test_environment_that_cannot_be_used_is_refused(job, capsys, command, name):
    err = refusal(capsys, command, str(job), f"tasks.environment={name}")
    assert "tasks.environment" in err
    assert str(job) in err


@pytest.mark.parametrize("command", ["up", "rollout"])
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["tasks.reward=exact_mach"], "tasks.reward"),
        (["tasks.reward=json:loads"], "tasks.reward"),
        (["tasks.reward=exact_match", "tasks.prompt={questoin}"], "tasks.prompt"),
        (["tasks.reward=exact_match", "tasks.prompt={question}", "tasks.options.column=anwser"], "tasks.reward"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_before_anything_starts(job, capsys, command, words, key):
    said = refusal(capsys, command, str(job), "tasks.environment=null", *words)
    assert f": {key}: " in said and str(job) in said
    assert not (job.parent / "run").exists()


STUCK = """
class Stuck:
    def __init__(self, problem, *, seed): ...
    async def reset(self): raise OSError("no room for the game")
    async def step(self, action): ...
"""


def test_a_reset_that_fails_is_refused_before_a_job_starts_and_not_tried_in_one_that_goes_on(job, capsys, monkeypatch):
    monkeypatch.chdir(job.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (job.parent / "stuck_game.py").write_text(STUCK)
    word = "tasks.environment=stuck_game:Stuck"
    said = refusal(capsys, "up", str(job), word)
    assert f"{job}: tasks.environment: expected an environment that begins on the dataset's rows, found " in said
    assert "train.jsonl line 1: reset raised OSError: no room for the game" in said
    run = job.parent / "run"
    assert not run.exists()
    run.mkdir()
    (run / "metrics.jsonl").touch()
    assert load_job(str(job), [word], environment=True)[1].began


@pytest.mark.parametrize("command", ["broker", "up"])
def test_address_in_use_is_refused(job, command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = run_cli(command, str(job), f"broker.address={address}")
    assert done.returncode == EXIT_USAGE, done.stderr
    assert address in done.stderr
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_without_a_job_waits_a_bounded_time_and_says_why(job, capsys):
    address = f"tcp://127.0.0.1:{free_port()}"
    assert "running" in refusal(capsys, "rollout", str(job), "--join", address, "--join-timeout-s", "1")
    assert address in refusal(capsys, "rollout", "--join", address, "--join-timeout-s", "0.5")
    assert "broker.json" in refusal(capsys, "rollout", str(job), "--join-timeout-s", "0.3")
    assert "--join" in refusal(capsys, "rollout")


@pytest.fixture
def node_here(monkeypatch):
    """`rollout` leaves this process as it is."""
    for name in ("setup_logging", "keep_gloo_here", "use_for_weights"):
        monkeypatch.setattr(f"launch.up.roles.{name}", lambda *_: None)
    monkeypatch.setattr("launch.up.roles.thread_environment", lambda _: {})


@pytest.mark.usefixtures("node_here")
def test_a_node_of_a_config_joins_no_other_job_and_may_differ_where_its_machine_does(job, capsys, monkeypatch):
    started = []
    monkeypatch.setattr("rollout_fleet.main.run_node", lambda config, address, *_: started.append(address) or 0)
    folder = job.parent
    served, _ = load_job(str(job), [f"run.dir={folder / 'elsewhere'}"])
    RunDir.of(served).prepare(served)
    with living_broker(served) as server:
        address = f"broker.address={server.address}"
        said = refusal(capsys, "rollout", str(job), address, "rollout.temperature=0.7")
        assert all(fact in said for fact in ("rollout.temperature", "0.7", "1.0", str(job), server.address))
        assert "run.name" in refusal(capsys, "rollout", str(job), "--join", server.address, "run.name=b")
        assert not started
        (folder / "model").rename(folder / "copy")
        own = [f"model.path={folder / 'copy'}", "rollout.concurrency=9", f"tasks.limits.python={sys.executable}"]
        assert main(["rollout", str(job), address, *own]) == 0
    assert started == [server.address]


def test_up_starts_nothing_beside_the_checkpoints_of_another_run(job, capsys, monkeypatch):
    jobs = []
    monkeypatch.setattr("launch.up.up.Job", lambda *_: SimpleNamespace(run=lambda *_: jobs.append("one") or 0))
    shared = job.parent / "shared"
    config, run = load_job(str(job), [f"learner.checkpoint.dir={shared}"])
    words = ["up", str(job), f"learner.checkpoint.dir={shared}"]
    assert main(words) == 0
    run.label_checkpoints(config, run.run_id)
    assert main(words) == 0
    said = refusal(capsys, *words, f"run.dir={job.parent / 'second'}")
    assert all(fact in said for fact in ("learner.checkpoint.dir", str(shared), f"run.dir={run.path}", run.run_id))
    assert len(jobs) == 2


@pytest.mark.usefixtures("node_here")
@pytest.mark.parametrize("given", [True, False])
def test_a_node_enters_no_other_run_that_took_the_address_while_it_made_ready(job, capsys, monkeypatch, given):
    config, run = load_job(str(job))
    run.prepare(config)
    other = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name="b"))

    async def joins(config, address, status):
        async with connect_node(node._access(config, address, status.node_id)) as broker:
            await node._register(broker, status, address)
        return 0

    def downloads(config, reader):
        first.close()
        second.enter_context(serving(server.address, new_state(run_info(other, b"{}", "b" * 16))))
        return config

    monkeypatch.setattr("launch.up.roles.downloaded", downloads)
    monkeypatch.setattr("rollout_fleet.engine.engine.import_ahead", lambda *_: None)
    monkeypatch.setattr(node, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(node, "_serve", joins)
    with ExitStack() as second, ExitStack() as first:
        server = first.enter_context(living_broker(config, run_id=run.identify()))
        words = ["rollout", *[str(job)] * given, "--join", server.address, "telemetry.trace_mib=0"]
        assert main(words) == EXIT_FAILED
    said = capsys.readouterr().err
    assert f"id {'b' * 16}" in said and f"id {run.run_id}" in said


def test_a_learner_joins_no_other_job_and_no_other_run_and_waits_for_a_broker_that_is_late(job, capsys, monkeypatch):
    started = []
    monkeypatch.setattr("launch.up.roles.become_torchrun", lambda config, *_: started.append(config.run.dir) or 0)
    monkeypatch.setattr("launch.up.roles.need_packages", lambda *_: None)
    folder = job.parent
    served, theirs = load_job(str(job), [f"run.dir={folder / 'elsewhere'}"])
    theirs.prepare(served)
    run = RunDir(folder / "run")
    with living_broker(served, run_id=theirs.identify()) as server:
        words = ["learner", str(job), f"broker.address={server.address}"]
        said = refusal(capsys, *words, "learner.optimizer.lr=0.5")
        assert all(fact in said for fact in ("learner.optimizer.lr", "0.5", str(job), server.address))
        assert main(words) == 0, "its folder is of this machine alone: no broker has run there"
        own = run.identify()
        said = refusal(capsys, *words)
        assert all(fact in said for fact in ("run.dir", own, theirs.run_id, str(run.run_id_file), server.address))
        assert main([*words, f"run.dir={theirs.path}"]) == 0
        address = server.address
    assert main(["learner", str(job), f"broker.address={address}", "--join-timeout-s", "0.2"]) == 0
    assert started == [str(run.path), str(theirs.path), str(run.path)]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["somewhere"], "tcp://HOST:PORT"),
        (["redis://127.0.0.1:6379/0?run=x"], "broker.store: redis"),
        (["tcp://127.0.0.1:0"], "no port"),
        (["tcp://127.0.0.1:1", "--credentials", "/no/keys"], "not exist"),
    ],
)
def test_join_to_nonsense_is_refused(capsys, words, reason):
    assert reason in refusal(capsys, "rollout", "--join", *words)


def test_no_word_of_an_error_is_obeyed_by_the_terminal(capsys):
    assert r"no\x1b[2Jrun is neither" in refusal(capsys, "status", "no\x1b[2Jrun")


def test_what_names_no_run_and_the_config_of_another_kind_of_job_are_refused(job, capsys, tmp_path):
    document = yaml.safe_load(job.read_text())
    del document["tasks"]["environment"], document["rollout"]
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(document))
    assert "slipstream sft" in refusal(capsys, "up", str(tmp_path / "sft.yaml"))
    assert "slipstream up" in refusal(capsys, "sft", str(job))
    for command in ("status", "ledger", "report", "top", "resume", "web"):
        assert "neither the folder of a run nor a config" in refusal(capsys, command, str(tmp_path / "nothing"))
    for command in ("status", "web"):
        assert "not the folder of a run" in refusal(capsys, command, str(job.parent))
    assert "does not exist yet" in refusal(capsys, "status", str(job))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["reprot", "run"], "did you mean 'report'?"),
        (["up", "job.yaml", "--webb"], "did you mean '--web'?"),
        (["status", "run", "second"], "`slipstream status --help`"),
    ],
)
def test_a_mistyped_command_or_option_is_told_with_the_nearest(capsys, words, hint):
    with pytest.raises(SystemExit, match=str(EXIT_USAGE)):
        main(words)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "report", "ledger", "doctor", "export", "init"])
def test_a_path_that_cannot_be_is_refused_with_the_reason(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, command, "x" * 300, *["new"] * (command == "export"))
    assert "x" * 100 in said and "File name too long" in said


@pytest.mark.parametrize("words", [["keys", "~nobody-of-this-name/x"], ["convert", "m", "~nobody-of-this-name/x"]])
def test_the_home_of_nobody_is_refused(capsys, words):
    assert "DIR: expected a path, found '~nobody-of-this-name/x'" in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["init", "\udcff"], "words of UTF-8, found '\\udcff'"),
        (["stop", "run", "--timeout-s", "nan"], "--timeout-s: invalid"),
        (["stop", "run", "--timeout-s", "-1"], "--timeout-s: invalid"),
        (["rollout", "--join", "tcp://a:1", "--join-timeout-s", "nan"], "--join-timeout-s: invalid"),
        (["selftest", "--minutes", "inf"], "--minutes: invalid"),
    ],
)
def test_words_that_are_no_text_and_times_that_never_end_are_refused(capsys, words, reason):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and reason in capsys.readouterr().err


@pytest.mark.parametrize("words", [["unknown"], ["up"], ["status"], ["up", "c.yaml", "--nope"], ["up", "c.yaml", "x"]])
def test_bad_usage_exits_with_two(words):
    done = run_cli(*words)
    assert done.returncode == EXIT_USAGE
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["up", "c.yaml", "a.b=1", "--plain", "c.d=2"], {"plain": True, "overrides": ["a.b=1", "c.d=2"]}),
        (["rollout", "--join", "tcp://h:1", "a.b=4"], {"config": None, "overrides": ["a.b=4"]}),
        (
            ["replay", "RUN", "--from", "3", "--to", "5", "a.b=1"],
            {"run": "RUN", "first": 3, "last": 5, "out": None, "overrides": ["a.b=1"]},
        ),
    ],
)
def test_overrides_stand_before_and_after_options(words, expected):
    assert expected.items() <= vars(parse(words)).items()


def test_a_function_in_place_of_an_environment_is_refused_with_the_key_that_takes_it(job, capsys):
    assert main(["up", str(job), "tasks.environment=json:loads"]) == EXIT_USAGE
    err = capsys.readouterr().err
    assert "'json:loads'" in err and "tasks.reward: json:loads" in err


def test_help_has_every_command_in_a_group_also_without_a_word(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert main([]) == 0 and capsys.readouterr().out == out
    listed = [line.split()[0] for line in out.splitlines() if re.match(r"(\w+:$|  [a-z]+ {2})", line)]
    assert listed[-len(COMMANDS) - len(GROUPS) :] == [
        word for group, names in GROUPS.items() for word in (f"{group}:", *names.split())
    ]
    assert sorted(" ".join(GROUPS.values()).split()) == sorted(COMMANDS)


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"slipstream {metadata.version('slipstream-rl')}\n"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import launch.cli; launch.cli.parse(['up', 'c.yaml'])", HEAVY | {"rich", "numpy", "zmq"}),
        ("import launch.checks.plan", HEAVY),
        ("import launch.up.roles", HEAVY | {"rich"}),
        ("from launch.checks.machine import look; m = look(); assert m.cores and m.memory_bytes", HEAVY),
    ],
    ids=["help", "plan", "role", "doctor"],
)
def test_commands_that_train_nothing_import_nothing_heavy(code, heavy):
    assert imported_by(code) & heavy == set()


@pytest.mark.parametrize("extra", ["web", "report"])
def test_every_environment_that_has_an_extra_s_packages_is_named(extra: str) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    names = [re.split(r"[>=]", package)[0] for package in wanted]
    pins = {role: (ROOT / "requirements" / f"{role}.txt").read_text() for role in ("learner", "rollout", "cpu")}
    having = {role for role, text in pins.items() if all(f"\n{name}==" in text for name in names)}
    assert having == {*ENVIRONMENTS[extra]}


def test_missing_package_is_explained(monkeypatch, job, capsys):
    missing = ["launch.nothing", "pandas", "torch.distributed", "vllm"]

    def fail(_args):
        raise ModuleNotFoundError("No module", name=missing.pop())

    monkeypatch.setattr("launch.up.roles.rollout", fail)
    assert "'vllm' is not installed here; run launch/setup.sh rollout or cpu" in refusal(capsys, "rollout", str(job))
    assert "'torch' is" in refusal(capsys, "rollout", str(job))
    for _ in ("of a plugin", "ours"):
        with pytest.raises(ModuleNotFoundError):
            main(["rollout", str(job)])


@pytest.mark.parametrize("broken", [">&-", "2>&-", "2>/dev/full", ">&- 2>&-"])
def test_output_that_goes_nowhere_changes_no_exit_code(tmp_path: Path, broken: str) -> None:
    command = f"{sys.executable} -m launch.cli status {tmp_path / 'none'} {broken}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done


def test_a_command_works_with_a_closed_stdout_and_mixes_no_words_into_its_files(tmp_path: Path, job: Path) -> None:
    said = tmp_path / "said"
    for command in (f"plan {job} 2>&1 >&-", f"status {tmp_path / 'none'} >{said} 2>&-"):
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m launch.cli {command}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stdout + done.stderr
    assert said.read_text() == "", "the reason of an error is no result"


def test_a_terminal_of_two_columns_without_utf_8_shows_what_it_can() -> None:
    environment = os.environ | {"COLUMNS": "2", "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "launch.cli", "doctor"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout and not done.stderr, done
