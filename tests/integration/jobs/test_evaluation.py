"""Evaluation while a real job trains: a pool node, a shared fleet, and kills of everyone in between.

The learner of the shared fleet runs in another environment than broker and node: the one with the learner's pins.
"""

import json
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.evaluation import EvaluationResult
from common.json_lines import lines_of
from tests.rigs.jobs import Run, assert_trained_exactly_once, events, metrics, status, write_config
from tests.rigs.processes import Command, Process, kill, until
from tests.rigs.waiting import read_jsonl
from tests.rigs.warm_engines import Node

PROBLEMS = {"first": 96, "second": 8}


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


def test_pool_nodes_evaluate_versions_once_although_node_broker_and_learner_are_killed(assets, tmp_path):
    run_dir, steps, every = tmp_path / "run", 40, 20
    told = {"every": every, "datasets": held_out(tmp_path), "samples": 2, "temperature": 0.0}
    learner = {"checkpoint": {"every": every, "keep": 2}}
    slow = {"options": {"pause_s": 0.5}}
    config = write_config(tmp_path / "job.yaml", assets, run_dir, steps, tasks=slow, evaluation=told, learner=learner)
    with ExitStack() as stack:
        enter = stack.enter_context
        broker = enter(Command(tmp_path, "broker", "broker", str(config)))
        until("the broker", lambda: (run_dir / "broker.json").exists(), broker)
        names = ("eval-0", "eval-1")
        pool = [enter(Node(tmp_path, name, str(config), "--node-id", name, "--pool", "eval")) for name in names]
        node = enter(Node(tmp_path, "node-0", str(config), "--node-id", "node-0"))
        until("engines", lambda: [n["state"] for n in status(run_dir)["nodes"]] == ["joining"] * 3, broker, node, *pool)
        learner = Run(tmp_path)
        learner.start()
        learner.until(lambda: len(results(run_dir, 0)) > 2)
        kill(pool[0].process.pid)
        assert not lines(run_dir), "the round is under way"
        kill(broker.process.pid)
        broker.process.wait()
        broker = enter(Command(tmp_path, "broker-1", "broker", str(config)))
        learner.until(lambda: len(lines(run_dir)) >= 2)
        learner.until(lambda: results(run_dir, every))
        learner.kill()
        learner.finish()
        for one in (node, pool[1]):
            assert one.wait() == 0, one.output()
        shown = status(run_dir)
        broker.drain()
    assert_evaluated_once(run_dir, [0, every, steps], samples=2)
    assert_trained_exactly_once(run_dir, steps)
    assert metrics(run_dir)[-1]["incarnation"] == 1
    kinds = Counter(event["kind"] for event in events(run_dir))
    assert kinds["evaluation_finished"] == 3
    assert kinds["evaluation_abandoned"] == kinds["evaluation_skipped"] == 0
    assert (
        shown["broker"]["tokens_generated_total"] < sum(line["tokens_trained"] for line in metrics(run_dir)) * 2 + 2000
    )


def test_a_learner_of_its_pinned_environment_trains_a_fleet_of_another_that_also_evaluates(assets, tmp_path):
    """The environment with the learner's pins is that of SLIPSTREAM_LEARNER_PYTHON, as on CI; else this one is used."""
    python = os.environ.get("SLIPSTREAM_LEARNER_PYTHON") or sys.executable
    run_dir, steps, every = tmp_path / "run", 6, 3
    told = {"every": every, "datasets": held_out(tmp_path), "samples": 1, "fleet": "shared"}
    weights = {"encoding": "delta", "canary_every": 1}  # versions and log-probabilities cross the environments
    config = str(write_config(tmp_path / "job.yaml", assets, run_dir, steps, evaluation=told, weights=weights))
    with (
        Command(tmp_path, "broker", "broker", config) as broker,
        Process(tmp_path / "learner.out", [python, "-m", "launch.cli", "learner", config]) as learner,
        Node(tmp_path, "node", config) as node,
    ):
        until("a step", lambda: metrics(run_dir), broker, learner, node)
        for role in (learner, node):
            assert role.wait() == 0, role.output()
        assert_trained_exactly_once(run_dir, steps)
        broker.drain()
    assert max(line["canary_max_difference"] for line in metrics(run_dir)) < 1e-3
    assert_evaluated_once(run_dir, [0, every, steps], samples=1)
    for line in lines(run_dir):
        assert line["held_s"] > 0 and line["seconds"] > 0 and line["tokens"] > 0
        assert set(line["pass_at"]) == {"1"}
