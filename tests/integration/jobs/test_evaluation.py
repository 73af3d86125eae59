"""Evaluation while a real job trains: a pool node, a shared fleet, and kills of everyone in between."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.evaluation import EvaluationResult
from common.json_lines import lines_of, read_jsonl
from tests.integration.jobs.job_rig import (
    Command,
    assert_trained_exactly_once,
    events,
    kill,
    metrics,
    status,
    until,
    write_config,
)

SLOW = {"options": {"pause_s": 0.25}}
PROBLEMS = {"first": 24, "second": 8}


def held_out(folder: Path) -> list[str]:
    """Two datasets."""
    for name, count in PROBLEMS.items():
        rows = "".join(json.dumps({"question": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in range(count))
        (folder / f"{name}.jsonl").write_text(rows)
    return [str(folder / f"{name}.jsonl") for name in PROBLEMS]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics lines of evaluations."""
    return [line for line in read_jsonl(run_dir / "metrics.jsonl") if line.get("kind") == "evaluation"]


def results(run_dir: Path, version: int) -> list[EvaluationResult]:
    paths = sorted((run_dir / "evaluation").glob(f"{version:06d}-*.jsonl"))
    return [result for path in paths for result in lines_of(path.read_bytes(), EvaluationResult)]


def assert_evaluated_once(run_dir: Path, versions: list[int], samples: int) -> None:
    """One line per version and dataset, each problem once, and every token from the version."""
    found = Counter((line["policy_version"], line["dataset"].split("-")[-1]) for line in lines(run_dir))
    assert found == {(version, name): 1 for version in versions for name in PROBLEMS}
    for line in lines(run_dir):
        assert line["problems"] == PROBLEMS[line["dataset"].split("-")[-1]]
        assert (line["samples"], line["failed"]) == (samples, 0)
        assert line["mean_reward_low"] <= line["mean_reward"] <= line["mean_reward_high"]
    for version in versions:
        of_version = results(run_dir, version)
        assert len(of_version) == sum(PROBLEMS.values()), "no problem twice"
        assert {(r.version_min, r.version_max) for r in of_version} == {(version, version)}


@pytest.mark.slow
def test_a_pool_node_evaluates_versions_once_although_node_broker_and_learner_are_killed(assets, tmp_path):
    run_dir, steps, every = tmp_path / "run", 18, 6
    told = {"every": every, "datasets": held_out(tmp_path), "samples": 2, "temperature": 0.0}
    learner = {"checkpoint": {"every": every, "keep": 2}}
    config = write_config(tmp_path / "job.yaml", assets, run_dir, steps, tasks=SLOW, evaluation=told, learner=learner)

    def pool_node(name: str) -> Command:
        return Command(tmp_path, name, "rollout", str(config), "--pool", "eval", "--node-id", name)

    with Command(tmp_path, "up", "up", str(config)) as up:
        until("the broker", lambda: (run_dir / "broker.json").exists(), up)
        with pool_node("eval-0") as first:
            until("results of version 0", lambda: len(results(run_dir, 0)) > 2, up, first)
            kill(first.process.pid)
            first.process.wait()
        stalls = until(
            "the pool's stall", lambda: [s for s in status(run_dir)["stalls"] if s["kind"] == "evaluation"], up
        )
        assert "none is alive" in stalls[0]["waits_for"]
        with pool_node("eval-1") as second:
            until("more results", lambda: len({r.node_id for r in results(run_dir, 0)}) > 1, up, second)
            kill(status(run_dir)["broker"]["pid"])
            until("the line of version 0", lambda: len(lines(run_dir)) >= 2, up, second)
            until("results of version 6", lambda: results(run_dir, every), up, second)
            kill(status(run_dir)["learner"]["pid"])
            assert up.wait() == 0, up.output()
            assert second.wait() == 0, second.output()
    assert_evaluated_once(run_dir, [0, every, 2 * every, steps], samples=2)
    assert_trained_exactly_once(run_dir, steps)
    assert metrics(run_dir)[-1]["incarnation"] == 1
    last = metrics(run_dir)[-1]
    known = last["tokens_trained_total"] + last["tokens_wasted_total"] + last["groups_ready"] * 4 * 16
    assert last["tokens_generated_total"] <= known + 64 * 16, "evaluated tokens are no training tokens"
    assert not [e for e in events(run_dir) if e["kind"] in ("evaluation_abandoned", "evaluation_skipped")]


@pytest.mark.slow
def test_a_shared_fleet_evaluates_between_its_tasks_and_the_line_says_its_cost(assets, tmp_path):
    run_dir, steps, every = tmp_path / "run", 6, 3
    told = {"every": every, "datasets": held_out(tmp_path), "samples": 1, "fleet": "shared"}
    config = write_config(tmp_path / "job.yaml", assets, run_dir, steps, evaluation=told)
    with Command(tmp_path, "up", "up", str(config)) as up:
        assert up.wait() == 0, up.output()
    assert_evaluated_once(run_dir, [0, every, steps], samples=1)
    assert_trained_exactly_once(run_dir, steps)
    for line in lines(run_dir):
        assert line["held_s"] > 0 and line["node_seconds"] > 0 and line["tokens"] > 0
        assert set(line["pass_at"]) == {"1"}
