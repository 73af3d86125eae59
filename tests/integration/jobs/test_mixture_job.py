"""A job of two real sources whose weights change while it runs; its learner is killed before that has an effect.

Its model is a converted one: the learner alone reads its weights, the node gets them from the learner.
"""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from broker.contract import WeightRequest
from broker.journal.recording import open_recording
from common.config.converted import WEIGHTS
from common.process.run_dir import RunDir
from common.rollouts import Task
from launch.observe.transcripts import read
from launch.resolve_target import config_of
from learner.loop.tasks import TaskStream, task_source
from tests.rigs.configs import run_cli
from tests.rigs.jobs import assert_trained_exactly_once, events, ledger, metrics, slipstream, status, warm, write_config
from tests.rigs.processes import Command, kill, until

STEPS = 30
GUESSING = "tasks.sources.guessing.weight"


def mixture(folder: Path, assets: Path) -> Path:
    """Three parts of addition and one of the number game, each with its own estimator, KL term and limits."""
    config = write_config(folder / "job.yaml", assets, folder / "run", STEPS, telemetry={"transcripts": 1.0})
    document = yaml.safe_load(config.read_text())
    document["model"]["path"] = str(folder / "converted")
    warm("convert", str(assets / "model"), str(folder / "converted"))
    document["learner"]["loss"] = {"reference": str(folder / "converted")}
    document["tasks"] = {
        "sources": {
            "sums": {
                "environment": "tests.rigs.environments:EvenDigits",
                "dataset": str(assets / "addition" / "train.jsonl"),
                "options": {"pause_s": 0.25}, "weight": 3, "kl_coefficient": 0.05, "max_tokens": 12,
            },
            "guessing": {
                "environment": "number_guessing", "dataset": str(assets / "number_guessing" / "train.jsonl"),
                "options": {"guesses": 2}, "advantage": "rloo", "truncated": "masked", "max_turns": 2,
            },
        },
    }  # fmt: skip
    document["learner"]["checkpoint"]["every"] = 4
    document["broker"]["retain_steps"] = STEPS
    config.write_text(yaml.safe_dump(document))
    return config


def of(kind: str, run_dir: Path) -> list[dict[str, Any]]:
    return [event["detail"] for event in events(run_dir) if event["kind"] == kind]


def trained(run_dir: Path) -> dict[int, Task]:
    config = config_of(RunDir(run_dir))
    assert config is not None
    with open_recording(RunDir(run_dir), config) as recording:
        return {entry.serial: entry.task for entries in recording.steps.values() for entry in entries}


def test_weights_change_while_a_job_runs_and_a_learner_killed_before_their_effect_goes_on_as_one_that_was_not(
    assets: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = mixture(tmp_path, assets)
    with Command(tmp_path, "up", "up", str(config)) as up:
        until("some steps", lambda: len(metrics(run_dir)) >= 6, up)
        learner = status(run_dir)["learner"]["pid"]
        os.kill(learner, signal.SIGSTOP)  # it offers nothing more
        refused = run_cli("set", str(run_dir), "tasks.sources.guesing.weight=1")
        assert refused.returncode == 2 and GUESSING in refused.stderr
        slipstream("set", str(run_dir), f"{GUESSING}=9")
        (asked,) = of("weights_requested", run_dir)
        assert [request["id"] for request in status(run_dir)["broker"]["weight_requests"]] == [asked["request"]]
        kill(learner)
        (change,) = until("the effect", lambda: of("weights_changed", run_dir)[1:], up)
        assert (change["position"], change["requests"]) == (asked["serial"], asked["request"]), (
            "the first task after it"
        )
        assert up.wait() == 0
    assert_trained_exactly_once(run_dir, STEPS)
    assert (run_dir / "model" / "model.safetensors").is_file() and not (run_dir / "model" / WEIGHTS).exists()

    job = config_of(RunDir(run_dir))
    assert job is not None
    unkilled = TaskStream(task_source(job))
    expected = unkilled.next(asked["serial"])
    unkilled.change([WeightRequest(asked["request"], {"guessing": 9.0})])
    expected += unkilled.next(len(ledger(run_dir)) - asked["serial"])
    found = trained(run_dir)
    assert len(found) > asked["serial"], "tasks of both weights are among them"
    assert found == {serial: expected[serial] for serial in found}
    sources = {entry["serial"]: entry["source"] for entry in ledger(run_dir)}
    assert sources == {task.serial: task.source for task in expected}
    before = Counter(task.source for task in expected[: asked["serial"]])
    after = Counter(task.source for task in expected[asked["serial"] :])
    assert before["sums"] > 2 * before["guessing"] and after["guessing"] > 2 * after["sums"]

    lines = metrics(run_dir)
    for line in lines:
        own, step = line["sources"], line["step"]
        of_step = Counter(entry["source"] for entry in ledger(run_dir) if entry["step"] == step)
        assert {name: own[f"{name}/groups"] for name in ("sums", "guessing")} == {
            name: of_step[name] for name in ("sums", "guessing")
        }
    assert lines[0]["sources"]["sums/weight"] == 0.75 and lines[-1]["sources"]["sums/weight"] == 0.25
    assert lines[-1]["kl_mean"] > 0
    written = list(read(RunDir(run_dir)))
    assert {(t.serial, t.source) for t in written} <= set(sources.items())
    assert {transcript.source for transcript in written} == {"sums", "guessing"}
    for transcript in written:
        turns = [turn for turn in transcript.turns if turn.author == "policy"]
        assert len(turns) <= (2 if transcript.source == "guessing" else 1)
        assert transcript.source == "guessing" or transcript.sampled_tokens <= 12
    assert "sums" in slipstream("ledger", str(run_dir))
    warm("replay", str(run_dir), "--from", "28")
    (told,) = (run_dir / "replays").glob("*/replay.json")
    steps = json.loads(told.read_text())["steps"]
    assert [step["step"] for step in steps] == [28, 29]
    assert all(step["original"] == step["replayed"] for step in steps)
