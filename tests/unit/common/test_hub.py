"""Names of the hub: what is one, what is downloaded and how often, and what is said where it cannot be had.

The hub is a stand-in on loopback; the client is the real huggingface_hub, in processes with a cache of their own.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UsageError
from common.hub import absolute
from tests.rigs.hub import COMMIT, StandIn, hub_standin
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S, until

SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * (1 << 20) for n in (1, 2)}
CONFIG = "config.json"
NOWHERE = "http://127.0.0.1:9"
MODEL = {CONFIG: b'{"a": 1}', "tokenizer.json": b"{}", "merges.txt": b"a b", **SHARDS}
UNWANTED = dict.fromkeys(("modeling.py", "pytorch_model.bin", "original/x.safetensors", "README.md"), b"")
ROWS = {f"main/{name}-00000-of-00001.parquet": name.encode() for name in ("train", "test")}
NAME, DATA = "hf://Qwen/Tiny", "hf://datasets/openai/gsm8k"


@pytest.fixture
def hub() -> Iterator[StandIn]:
    with hub_standin() as standin:
        standin.repos = {"models/Qwen/Tiny": MODEL | UNWANTED, "datasets/openai/gsm8k": dict(ROWS)}
        yield standin


def said(asked: subprocess.Popen[str], code: int = 0) -> str:
    """The output of the process, or the last line of its stderr when it failed."""
    out, error = asked.communicate(timeout=LIMIT_S)
    assert asked.returncode == code, error
    return error.strip().splitlines()[-1] if code else out.strip()


def bodies(hub: StandIn) -> dict[str, int]:
    """How often the body of each file was sent; the counts begin anew."""
    found = {name.removeprefix("GET "): n for name, n in hub.requests.items() if n and name != "API"}
    hub.requests.clear()
    return found


def test_an_existing_folder_a_path_and_a_name_of_the_hub_are_told_apart(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for key in ("model.path", "learner.loss.reference"):
        assert absolute(key, "Qwen/Tiny") == NAME
        assert absolute(key, "Qwen/Tiny@v1.0") == f"{NAME}@v1.0"
    (tmp_path / "Qwen" / "Tiny").mkdir(parents=True)
    assert absolute("model.path", "Qwen/Tiny") == str(tmp_path / "Qwen" / "Tiny"), "an existing folder wins"
    for path in ("./no/model", "../x/y", "one", "a/b/c", "/a/b"):
        assert absolute("model.path", path) == str((tmp_path / path).resolve())
    assert absolute("model.path", "~/b") == str(Path.home() / "b")
    assert absolute("run.dir", "./$HOME") == str(tmp_path / "$HOME")
    assert absolute("tasks.dataset", "openai/gsm8k") == str(tmp_path / "openai" / "gsm8k"), "files are named in full"
    assert absolute("tasks.dataset", f"{DATA}@v1/main/train-*.parquet") == f"{DATA}@v1/main/train-*.parquet"


@pytest.mark.parametrize(
    ("key", "name", "form"),
    [
        ("model.path", "hf://Tiny", "hf://OWNER/NAME"),
        ("model.path", "hf://Qwen/Tiny/config.json", "hf://OWNER/NAME"),
        ("tasks.dataset", "hf://openai/gsm8k/main/train", "hf://datasets/OWNER/NAME"),
        ("tasks.dataset", f"{DATA}/main", "FILES.jsonl or .parquet"),
        ("evaluation.datasets", f"{DATA}/*/test.parquet", "FILES.jsonl or .parquet"),
    ],
)
def test_a_name_in_another_form_is_refused(key: str, name: str, form: str) -> None:
    with pytest.raises(UsageError) as error:
        absolute(key, name)
    assert str(error.value).startswith(f"{key}: expected ") and form in str(error.value) and name in str(error.value)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("key", ["model.path", "run.dir"])
@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x", "loop", "x" * 300, "$HOME/x", "${HOME}/x"])
def test_what_no_file_can_be_called_is_refused(tmp_path: Path, monkeypatch, key: str, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError) as error:
        absolute(key, path)
    assert str(error.value).startswith(f"{key}: expected a path, found {path[:100]!r}: ")


def test_a_model_comes_once_without_code_or_pickle_and_the_hub_is_not_asked_again(hub: StandIn, tmp_path: Path) -> None:
    folder = Path(said(hub.ask(tmp_path, "model.path", NAME)))
    assert folder.name == COMMIT and {f.name: f.read_bytes() for f in folder.iterdir()} == MODEL
    assert bodies(hub) == dict.fromkeys(MODEL, 1)
    for more in ({}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": NOWHERE}):
        assert said(hub.ask(tmp_path, "model.path", NAME, **more)) == str(folder)
    assert said(hub.ask(tmp_path, "learner.loss.reference", f"{NAME}@{COMMIT}")) == str(folder)
    assert not hub.requests


@pytest.mark.slow
def test_two_processes_that_want_a_model_at_once_download_it_once(hub: StandIn, tmp_path: Path) -> None:
    hub.held_back = "*.safetensors"
    first = hub.ask(tmp_path, "model.path", NAME)
    until(hub.arrived.is_set, "a shard is half sent", check=lambda: first.poll())
    second = hub.ask(tmp_path, "model.path", NAME)
    until(lambda: hub.requests["API"] > 2, "the second has looked at the hub", check=lambda: second.poll())
    hub.go_on.set()
    assert said(first) == said(second)
    assert bodies(hub) == dict.fromkeys(MODEL, 1)


@pytest.mark.slow
def test_a_killed_download_leaves_no_model_in_use_and_is_continued(hub: StandIn, tmp_path: Path) -> None:
    first, second = SHARDS
    hub.held_back = second
    killed = hub.ask(tmp_path, "model.path", NAME)
    until(
        lambda: hub.arrived.is_set() and [*tmp_path.rglob(f"snapshots/*/{first}")], "one shard, and half of the other"
    )
    killed.kill()
    killed.communicate()
    assert "HF_HUB_OFFLINE" in said(hub.ask(tmp_path, "model.path", NAME, HF_HUB_OFFLINE="1"), 1)
    hub.go_on.set()
    folder = Path(said(hub.ask(tmp_path, "model.path", NAME)))
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == MODEL
    assert bodies(hub) == {**dict.fromkeys(MODEL, 1), second: 2}, "files that were complete are not sent again"


@pytest.mark.slow
def test_files_of_a_dataset_are_those_that_its_pattern_matches(hub: StandIn, tmp_path: Path) -> None:
    found = said(hub.ask(tmp_path, "tasks.dataset", f"{DATA}/main/train-*.parquet"))
    assert [file.read_bytes() for file in Path(found).parent.glob("*")] == [b"train"]
    assert said(hub.ask(tmp_path, "tasks.dataset", f"{DATA}/main/train-*.parquet", HF_HUB_OFFLINE="1")) == found
    wrong = said(hub.ask(tmp_path, "tasks.dataset", f"{DATA}/main/tests.parquet"), 1)
    assert all(f"'{file}'" in wrong for file in ROWS) and "main/tests.parquet" in wrong
    hub.repos["datasets/openai/gsm8k"] |= {"data/0.jsonl": b"0", "data/1.jsonl": b"1"}
    numbered = f"{DATA}/data/*.jsonl"
    shutil.rmtree(tmp_path / "hub")
    for name in ("data/0.jsonl", "data/*.jsonl"):  # their names do not say that there are two
        folder = Path(said(hub.ask(tmp_path, "tasks.dataset", f"{DATA}/{name}"))).parent
    assert sorted(file.name for file in folder.iterdir()) == ["0.jsonl", "1.jsonl"]
    assert said(hub.ask(tmp_path, "tasks.dataset", numbered, HF_HUB_OFFLINE="1")) == str(folder / "*.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "cause"),
    [
        ("hf://nobody/qwen", {}, "the hub has no such repository, or it is private and HF_TOKEN does not open it"),
        ("hf://gated/qwen", {}, "accept its terms on its page, and set HF_TOKEN"),
        (f"{NAME}@v2", {}, "the repository has no such revision"),
        (NAME, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and "),
        (NAME, {"HF_ENDPOINT": NOWHERE}, "Connection refused"),
    ],
)
def test_a_name_that_cannot_be_had_says_why_and_that_no_folder_has_it(
    hub: StandIn, tmp_path: Path, name: str, more: dict[str, str], cause: str
) -> None:
    text = said(hub.ask(tmp_path, "model.path", name, **more), 1)
    assert text.startswith("model.path: ") and f" {name[5:]} " in text and f" {name} " in text, text
    assert cause in text and ("HF_ENDPOINT" in more) == (f"HF_ENDPOINT is {NOWHERE};" in text)


@pytest.mark.slow
def test_a_model_without_safetensors_is_refused(hub: StandIn, tmp_path: Path) -> None:
    hub.repos["models/Qwen/Tiny"] = {CONFIG: b"{}", "tokenizer.json": b"[]", "pytorch_model.bin": b"pickle"}
    assert "lacks config.json" in said(hub.ask(tmp_path, "model.path", NAME), 1)


@pytest.mark.slow
@pytest.mark.slow
def test_a_plan_downloads_config_json_only_and_says_when_it_cannot(hub: StandIn, tmp_path: Path) -> None:
    config = (ROOT / "configs" / "models" / "Qwen3-0.6B" / CONFIG).read_bytes()
    hub.repos["models/Qwen/Qwen3-0.6B"] = {CONFIG: config, "tokenizer.json": b"{}", "model.safetensors": b""}
    words = [sys.executable, "-m", "launch.cli", "plan", "configs/qwen3-0.6b-gsm8k.yaml", "--json"]

    def plan(home: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = hub.environment(tmp_path / home, **more)
        return subprocess.run(words, cwd=ROOT, env=env, text=True, capture_output=True, timeout=LIMIT_S)

    made = json.loads(plan("one").stdout)
    assert bodies(hub) == {CONFIG: 1}
    assert (made["ok"], made["before_launch"], made["plan"]["parameters"]) == (True, [], 596_049_920)
    made = json.loads(plan("two", HF_ENDPOINT=NOWHERE).stdout)
    assert (made["ok"], made["plan"]["parameters"]) == (True, 596_049_920)
    assert "Connection refused" in made["before_launch"][0] and "configs/models/Qwen3-0.6B/" in made["remarks"][0]
    words.append("model.path=Qwen/Tiny")
    done = plan("two", HF_ENDPOINT=NOWHERE)
    assert done.returncode == 2 and "Connection refused" in done.stderr and f"(HF_ENDPOINT is {NOWHERE}" in done.stderr
    words[3:] = ["doctor", *words[4:-1]]
    problems = [one["what"] for one in json.loads(plan("two", HF_HUB_OFFLINE="1").stdout) if one["level"] == "problem"]
    assert any("model.path" in what and "Qwen/Qwen3-0.6B" in what for what in problems), problems
