"""`slipstream init` and the job that it writes, end to end: real learner, real engine, rewards of two functions."""

import json
from pathlib import Path

import yaml

from common.errors import EXIT_USAGE
from tests.rigs.jobs import metrics
from tests.rigs.processes import SLIPSTREAM, Process
from tests.rigs.waiting import read_jsonl

STEPS = 6  # test_scored_job.py lets the example learn
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def test_the_example_of_init_trains_and_shows_each_reward(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "first"
    with Process(tmp_path / "init.log", [*SLIPSTREAM, "init", str(folder)], **OFFLINE) as made:
        assert made.wait() == 0, made.output()
    monkeypatch.chdir(folder)
    words = [f"run.steps={STEPS}", "telemetry.transcripts=1"]
    with Process(tmp_path / "bad.log", [*SLIPSTREAM, "up", "config.yaml", "tasks.prompt={kimd}"], **OFFLINE) as refused:
        assert refused.wait() == EXIT_USAGE
    assert "tasks.prompt" in refused.output() and not (folder / "run").exists()
    with Process(tmp_path / "up.log", [*SLIPSTREAM, "up", "config.yaml", *words, "--plain"], **OFFLINE) as job:
        assert job.wait() == 0, job.output()
    lines = metrics(folder / "run")
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line in lines:
        own = line["environment"]
        assert set(own) == {"right_kind", "length_penalty"}
        assert abs(line["reward_mean"] - (own["right_kind"] + 0.2 * own["length_penalty"])) < 1e-6
    assert all(line["grad_norm"] > 0 for line in lines)
    kept = [line for path in (folder / "run" / "transcripts").glob("*.jsonl") for line in read_jsonl(path)]
    assert kept and all(set(line["metrics"]) == {"right_kind", "length_penalty"} for line in kept)
    assert yaml.safe_load((folder / "run" / "config.yaml").read_text())["tasks"]["environment"] is None
    with Process(tmp_path / "report.log", [*SLIPSTREAM, "report", "run"]) as report:
        assert report.wait() == 0, report.output()
    page = (folder / "run" / "report" / "report.html").read_text()
    assert (folder / "run" / "report" / "over_steps.png").stat().st_size > 10_000
    assert "right_kind" in page and "length_penalty" in page
    assert json.loads((folder / "data.jsonl").read_text().splitlines()[0]) == {"kind": "digits"}
