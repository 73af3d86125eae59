"""Which model `slipstream export` takes, and what it refuses."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from common.config.loading import load_config
from common.errors import SlipstreamError, UsageError
from common.hub import upload
from common.process.run_dir import RunDir, write_json
from launch.results import export
from learner.checkpoint.best import BEST_FILE, BestRecord
from learner.loop.run_files import write_record
from tests.rigs.configs import refusal, write_checkpoint
from tests.rigs.hub import WRITER, hub_standin
from tests.rigs.processes import ROOT
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path / "run")
    for step in (20, 1000000, 40):
        write_checkpoint(folder, step)
    (folder.checkpoints / ".step-000060.tmp").mkdir()
    folder.config.write_text("")
    return folder


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def convert(run: RunDir, checkpoint: Path, target: Path, *options: str) -> int:
        seen.append(" ".join([checkpoint.name, *options]))
        return 0

    monkeypatch.setattr(export, "convert", convert)
    return seen


def arguments(
    run: RunDir,
    target: Path,
    step: int | None = None,
    best: bool = False,
    adapter: bool = False,
    critic: bool = False,
    upload: str = "",
) -> argparse.Namespace:
    told = {"step": step, "best": best, "adapter": adapter, "critic": critic, "upload": upload}
    return argparse.Namespace(run=str(run.path), dir=str(target), **told)


@pytest.mark.parametrize(
    ("finished", "step", "expected"),
    [(True, None, []), (False, None, ["step-1000000"]), (True, 40, ["step-000040"])],
    ids=["the final model", "else the newest complete checkpoint", "a step also when the run is done"],
)
def test_which_model_is_exported(run, tmp_path: Path, converted: list[str], finished, step, expected) -> None:
    if finished:
        run.model.mkdir()
        (run.model / "config.json").write_text("{}")
    assert export.command(arguments(run, tmp_path / "out", step)) == 0
    assert converted == expected
    assert (tmp_path / "out" / "config.json").exists() == (not expected)


@pytest.mark.parametrize(("state", "critic"), [("running", False), ("drained", False), ("drained", True)])
def test_the_final_model_of_fewer_steps_is_neither_exported_nor_evaluated_once_the_run_goes_on(
    job: Path, tmp_path: Path, converted: list[str], capsys, state: str, critic: bool
) -> None:
    config = load_config(job, ["learner.critic={}", "learner.loss.advantage=gae"] if critic else [])
    run = RunDir.of(config)
    run.prepare(config)
    for final in (run.model, run.critic):
        final.mkdir()
        (final / "config.json").write_text("{}")
    write_checkpoint(run, 40)
    write_record(run, 0, "done", 20)
    assert export.command(arguments(run, tmp_path / "before", critic=critic)) == 0
    write_record(run, 1, state, 40)
    assert export.command(arguments(run, tmp_path / "after", critic=critic)) == 0
    assert converted == ["step-000040 --critic" if critic else "step-000040"]
    said = refusal(capsys, "eval", str(run.path), f"evaluation.datasets=[{config.tasks.dataset}]")
    assert str(run.model) in said and f"slipstream export {run.path} DIR" in said


def test_the_best_checkpoint_is_exported_also_when_the_run_is_done(run, tmp_path: Path, converted: list[str]) -> None:
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    with refused(UsageError, BEST_FILE, "learner.checkpoint.keep_"):
        export.command(arguments(run, tmp_path / "out", best=True))
    write_json(run.checkpoints / BEST_FILE, BestRecord(40, "reward_mean", 0.5))
    assert export.command(arguments(run, tmp_path / "out", best=True)) == 0
    assert converted == ["step-000040"]


def test_adapters_come_from_a_checkpoint_and_only_of_a_run_that_had_some(
    run, tmp_path: Path, converted: list[str]
) -> None:
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    run.config.write_text(text)
    with refused(UsageError, "--adapter", run.path, "learner.lora"):
        export.command(arguments(run, tmp_path / "out", adapter=True))
    assert converted == []
    run.config.write_text(text.replace("learner:\n", "learner:\n  lora: {rank: 8}\n"))
    assert export.command(arguments(run, tmp_path / "out", adapter=True)) == 0
    assert converted == ["step-1000000 --adapter"]
    assert not (tmp_path / "out").exists()


def test_a_critic_is_copied_or_converted_and_only_of_a_run_that_had_one(
    run, tmp_path: Path, converted: list[str]
) -> None:
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    run.config.write_text(text)
    with refused(UsageError, "--critic", run.path, "learner.critic"):
        export.command(arguments(run, tmp_path / "out", critic=True))
    run.config.write_text(text.replace("learner:\n", "learner:\n  critic: {}\n"))
    assert export.command(arguments(run, tmp_path / "none", critic=True)) == 0
    run.critic.mkdir()
    (run.critic / "config.json").write_text("{}")
    assert export.command(arguments(run, tmp_path / "out", critic=True)) == 0
    assert (tmp_path / "out" / "config.json").exists()
    assert export.command(arguments(run, tmp_path / "old", 40, critic=True)) == 0
    assert converted == ["step-1000000 --critic", "step-000040 --critic"]


def test_a_metric_that_does_not_exist_is_refused_before_anything_starts(job: Path, capsys) -> None:
    said = refusal(capsys, "broker", str(job), "learner.checkpoint.keep_best=-reward_men")
    assert "learner.checkpoint.keep_best: expected" in said and "'-reward_mean'" in said


def test_what_cannot_be_exported_is_refused_with_the_reason(run: RunDir, tmp_path: Path, converted: list[str]) -> None:
    with refused(UsageError, "step 60", "20, 40, 1000000"):
        export.command(arguments(run, tmp_path / "out", step=60))
    (run.checkpoints / "step-000040" / "model" / "weights").unlink()
    with refused(SlipstreamError, "step-000040", "weights"):
        export.command(arguments(run, tmp_path / "out", step=40))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with refused(UsageError, tmp_path / "out", "not empty"):
        export.command(arguments(run, tmp_path / "out"))
    empty = RunDir(tmp_path / "empty")
    empty.path.mkdir()
    empty.config.write_text("")
    with refused(UsageError, empty.path, "learner.checkpoint.every"):
        export.command(arguments(empty, tmp_path / "elsewhere"))
    assert converted == []


# ---------------------------------------------------------------- to the hub


@pytest.mark.slow
def test_an_exported_model_is_put_on_the_hub_and_comes_back_as_it_was(run: RunDir, tmp_path: Path) -> None:
    run.model.mkdir()
    model = {"config.json": b'{"a": 1}', "tokenizer.json": b"{}", "model.safetensors": bytes(range(256)) * 4096}
    for name, data in model.items():
        (run.model / name).write_bytes(data)
    with hub_standin() as hub:

        def exported(target: str, name: str = "me/mine", **more: str) -> subprocess.CompletedProcess[str]:
            words = [sys.executable, "-m", "launch.cli", "export", run.path, tmp_path / target, "--upload", name]
            env = hub.environment(tmp_path / "home", HF_HUB_DISABLE_XET="1", **more)
            return subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S)

        stranger = exported("one")
        assert stranger.returncode == 2 and "--upload: me/mine" in stranger.stderr and "HF_TOKEN" in stranger.stderr
        assert not (tmp_path / "one").exists() and hub.repos == {}, "before any work"
        done = exported("two", HF_TOKEN=WRITER)
        assert done.returncode == 0, done.stderr
        assert f"{hub.url}/me/mine" in done.stdout
        assert hub.requests["made private models/me/mine"] == 1
        assert hub.repos["models/me/mine"] == model
        assert hub.commits == [("models/me/mine", f"slipstream export: the final model of {run.path.name}")]
        back, error = hub.ask(tmp_path / "other", "model.path", "hf://me/mine").communicate(timeout=LIMIT_S)
        assert {file.name: file.read_bytes() for file in Path(back.strip()).iterdir()} == model, error
        (run.model / "config.json").write_bytes(b'{"a": 2}')
        again = exported("three", HF_TOKEN=WRITER)
        assert again.returncode == 0 and hub.repos["models/me/mine"]["config.json"] == b'{"a": 2}', again.stderr


def test_what_a_conversion_needs_is_looked_for_before_the_repository_is_made(
    run: RunDir, tmp_path: Path, converted: list[str], monkeypatch
) -> None:
    def lacking(role: str) -> None:
        raise UsageError(f"the role {role} needs torch")

    made = []
    monkeypatch.setattr(export, "need_packages", lacking)
    monkeypatch.setattr(export.hub, "open_upload", lambda *names: made.append(names))
    with refused(UsageError, "the role learner needs"):
        export.command(arguments(run, tmp_path / "out", upload="me/mine"))
    assert made == converted == []


@pytest.mark.parametrize("name", ["mine", "hf://me/mine", "me/mine@v1", "me/mine/model"])
def test_another_form_of_a_name_is_refused_before_the_conversion(
    run: RunDir, tmp_path: Path, converted: list[str], name: str
) -> None:
    with refused(UsageError, "--upload", "OWNER/NAME", name):
        export.command(arguments(run, tmp_path / "out", upload=name))
    assert converted == []


def test_an_upload_that_fails_says_how_it_is_tried_again(run: RunDir, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused(SlipstreamError, tmp_path, f"hf upload me/mine {tmp_path}", "HF_HUB_OFFLINE"):
        upload("me/mine", tmp_path, "x")
