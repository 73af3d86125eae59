"""A whole job whose learner runs in another environment than broker and node: the one with the learner's pins."""

import os

import pytest

from tests.rigs.jobs import assert_trained_exactly_once, metrics, write_config
from tests.rigs.processes import Command, Process, until

STEPS = 8


def test_a_learner_of_its_pinned_environment_trains_a_fleet_of_another_to_the_end(assets, tmp_path):
    python = os.environ.get("SLIPSTREAM_LEARNER_PYTHON")
    if not python:
        pytest.skip("SLIPSTREAM_LEARNER_PYTHON names no interpreter; `bash launch/setup.sh learner --cpu` builds one")
    run_dir = tmp_path / "run"
    weights = {"encoding": "delta", "canary_every": 1}  # versions and log-probabilities cross the environments
    config = str(write_config(tmp_path / "job.yaml", assets, run_dir, STEPS, weights=weights))
    with (
        Command(tmp_path, "broker", "broker", config) as broker,
        Process(tmp_path / "learner.out", [python, "-m", "launch.cli", "learner", config]) as learner,
        Command(tmp_path, "node", "rollout", config) as node,
    ):
        until("a step", lambda: metrics(run_dir), broker, learner, node)
        for role in (learner, node):
            assert role.wait() == 0, role.output()
        assert_trained_exactly_once(run_dir, STEPS)
        broker.drain()
    assert max(line["canary_max_difference"] for line in metrics(run_dir)) < 1e-3
