"""Commands against a broker with keys: where they find theirs, and what they say when they have none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config.network_checks import fixed_address
from common.process.run_dir import RunDir, write_json
from common.security.credentials import KeyFolder, own_node_id
from launch.cli import main
from launch.keys import make
from launch.resolve_target import load_job
from tests.rigs.configs import job_of, json_of, living_broker, prepared, refusal, write_job


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = KeyFolder(tmp_path / "keys")
    make(folder, ["node-0", "far"])
    return folder.path


@pytest.fixture
def served(tmp_path: Path, keys: Path) -> Iterator[RunDir]:
    """The run folder of a broker with keys, on a thread; the config that it hands out is none."""
    config = job_of(tmp_path, broker={"credentials": str(keys)})
    run = prepared(config)
    with living_broker(config, str(keys), b"no config"):
        yield run


def test_status_and_ledger_find_the_keys_through_the_runs_config_or_say_that_they_are_missing(
    served, keys: Path, capsys
) -> None:
    assert json_of(capsys, "status", str(served.path))["live"] is True
    assert json_of(capsys, "ledger", str(served.path)) == []
    keys.rename(keys.with_name("elsewhere"))
    write_json(served.status_json, None)
    assert main(["status", str(served.path)]) != 0
    assert f"{keys}," in capsys.readouterr().err


def test_joining_needs_the_file_of_a_node_of_this_job_and_no_more_to_get_as_far_as_its_config(
    served: RunDir, keys: Path, capsys, tmp_path: Path
) -> None:
    broker = served.broker()
    assert broker is not None
    joining = ["rollout", "--join", broker.address]
    assert "--credentials DIR" in refusal(capsys, *joining, "--join-timeout-s", "3000")
    alone = tmp_path / "far.json"
    (keys / "nodes" / "far.json").rename(alone)
    assert "readable config" in refusal(capsys, *joining, "--credentials", str(alone))
    make(KeyFolder(tmp_path / "other"), ["x"])
    for patience in ([], ["--join-timeout-s", "2"]):  # the reason is named however short the wait
        said = refusal(capsys, *joining, "--credentials", str(tmp_path / "other"), *patience)
        assert "this key" in said and broker.address in said


def test_a_nodes_id_begins_with_the_name_of_its_credential(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "k")
    make(folder, ["fleet", "node-0"])
    ids = [own_node_id(keys, name) for keys in (None, str(folder.path)) for name in ("node-0", "h3-77", "fleet:x")]
    assert ids == ["node-0", "h3-77", "fleet:x", "node-0", "fleet:h3-77", "fleet:x"]


@pytest.mark.parametrize(
    ("credentials", "words"),
    [
        ("nowhere", ["broker.credentials", "keys DIR", "not exist"]),
        ("model", ["broker.credentials", "no keys"]),
        ("train.jsonl", ["broker.credentials", "train.jsonl", "a credential"]),
    ],
)
def test_credentials_that_are_none_are_refused_before_anything_starts(
    tmp_path: Path, capsys, credentials: str, words: list[str]
) -> None:
    said = refusal(capsys, "broker", str(write_job(tmp_path, broker={"credentials": str(tmp_path / credentials)})))
    assert all(word in said for word in ["job.yaml", *words])
    assert not (tmp_path / "run").exists()


def test_an_open_address_is_refused_without_keys_and_allowed_with_them(
    tmp_path: Path, keys: Path, capsys, monkeypatch
) -> None:
    def job(host: str, **broker: str) -> str:
        return str(write_job(tmp_path, broker={"address": f"tcp://{host}:5555", **broker}))

    assert "keys DIR" in refusal(capsys, "broker", job("0.0.0.0"))
    config, _ = load_job(job("0.0.0.0", credentials=str(keys)))
    assert fixed_address(config) is None  # no client can connect to 0.0.0.0: RUN/broker.json has the address
    monkeypatch.chdir(tmp_path)
    config, _ = load_job(job("head.cluster", credentials="keys"))
    assert fixed_address(config) == "tcp://head.cluster:5555"
    assert config.broker.credentials == str(keys), "a relative path starts at the current folder"
