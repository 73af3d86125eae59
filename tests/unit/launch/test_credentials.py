"""Commands against a broker with keys: where they find theirs, and what they say when they have none."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from broker.contract import RunInfo
from broker.delivery.event_log import EventLog
from broker.delivery.state import DeliveryState
from broker.server.server import BrokerServer
from common.config.network_checks import fixed_address
from common.errors import EXIT_USAGE
from common.process.run_dir import RunDir, write_json
from common.security.credentials import KeyFolder
from launch.cli import main
from launch.keys import make
from launch.resolve_target import load_job

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 1024}

Job = Callable[..., Path]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = KeyFolder(tmp_path / "keys")
    make(folder, ["node-0", "far"])
    return folder.path


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Writes a config with these keys under `broker`."""

    def write(**broker: object) -> Path:
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(SHAPE))
        (model / "tokenizer.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"")
        (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
        document = {
            "run": {"name": "demo", "dir": str(tmp_path / "run"), "steps": 5},
            "model": {"path": str(model), "dtype": "float32"},
            "tasks": {"environment": "addition", "dataset": str(tmp_path / "train.jsonl")},
            "rollout": {"max_tokens": 16, "engine": {"max_model_len": 64}},
            "broker": broker,
        }
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


@pytest.fixture
def served(job: Job, keys: Path) -> Iterator[RunDir]:
    """The run folder of a broker with keys, on a thread; the config that it hands out is none."""
    config, run = load_job(str(job(credentials=str(keys))))
    run.prepare(config)
    info = RunInfo("demo", str(run.path), 2, 1, 3, 30.0, 1 << 30, b"no config")
    state = DeliveryState(info, time.monotonic, lambda: "token", EventLog())
    server = BrokerServer(state, "tcp://127.0.0.1:0", 1 << 20, credentials=str(keys))
    write_json(run.broker_json, {"pid": os.getpid(), "address": server.address, "started_s": time.time()})
    thread = threading.Thread(target=server.run)
    thread.start()
    yield run
    server.stop()
    thread.join(20)
    assert not thread.is_alive()


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == EXIT_USAGE
    return capsys.readouterr().err.strip()


def address(run: RunDir) -> str:
    found = run.broker()
    assert found is not None
    return found.address


def test_status_and_ledger_find_the_keys_through_the_runs_config(
    served: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(served.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["live"] is True
    assert main(["ledger", str(served.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_status_without_the_keys_says_that_they_are_missing(
    served: RunDir, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys.rename(keys.with_name("elsewhere"))
    write_json(served.status_json, None)
    assert main(["status", str(served.path)]) != 0
    assert "keys, which does not exist" in capsys.readouterr().err


def test_joining_without_credentials_is_refused_at_once_and_says_what_to_add(
    served: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    said = refusal(capsys, "rollout", "--join", address(served))
    assert "--credentials DIR" in said
    assert time.monotonic() - began < 25


def test_joining_with_the_file_of_a_node_alone_gets_as_far_as_the_jobs_config(
    served: RunDir, keys: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alone = tmp_path / "far.json"
    (keys / "nodes" / "far.json").rename(alone)
    said = refusal(capsys, "rollout", "--join", address(served), "--credentials", str(alone))
    assert "has no readable config" in said


def test_joining_with_keys_of_another_job_names_the_reason(
    served: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make(KeyFolder(tmp_path / "other"), ["x"])
    said = refusal(capsys, "rollout", "--join", address(served), "--credentials", str(tmp_path / "other"))
    assert "refused this key" in said


def test_a_refused_key_is_named_as_the_reason_however_short_the_wait(
    served: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make(KeyFolder(other), ["x"])
    joining = ["rollout", "--join", address(served), "--credentials", str(other)]
    said = refusal(capsys, *joining, "--join-timeout-s", "2")
    assert "refused this key" in said
    assert "are both from one key folder?" in said


@pytest.mark.parametrize(
    ("credentials", "words"),
    [
        ("nowhere", ["broker.credentials", "slipstream keys DIR", "which does not exist"]),
        ("model", ["broker.credentials", "which has no keys"]),
        ("train.jsonl", ["broker.credentials", "train.jsonl", "expected a credential"]),
    ],
)
def test_credentials_that_are_none_are_refused_before_anything_starts(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], credentials: str, words: list[str]
) -> None:
    said = refusal(capsys, "broker", str(job(credentials=str(tmp_path / credentials))))
    assert all(word in said for word in ["job.yaml", *words])
    assert not (tmp_path / "run").exists()


def test_an_open_address_is_refused_without_keys_and_allowed_with_them(
    job: Job, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "slipstream keys DIR" in refusal(capsys, "broker", str(job(address="tcp://0.0.0.0:5555")))
    config, _ = load_job(str(job(address="tcp://0.0.0.0:5555", credentials=str(keys))))
    assert fixed_address(config) is None  # nobody can connect to 0.0.0.0: RUN/broker.json has the address
    config, _ = load_job(str(job(address="tcp://head.cluster:5555", credentials=str(keys))))
    assert fixed_address(config) == "tcp://head.cluster:5555"


def test_relative_credentials_start_at_the_current_folder(
    job: Job, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = load_job(str(job(credentials="keys")))
    assert config.broker.credentials == str(keys)
    assert msgspec.to_builtins(config)["broker"]["credentials"] == str(keys)
