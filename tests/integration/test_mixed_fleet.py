"""A whole job whose nodes have engines of different sizes: tensor parallelism 1 and 2, one learner, one broker."""

import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.job_rig import (
    Command,
    assert_trained_exactly_once,
    descendants,
    ledger,
    make_assets,
    metrics,
    status,
    until,
    write_config,
)

START_S = 150.0  # three processes of an engine of two and a learner, starting on two busy cores
TOLERANCE = 2e-4  # nat, between two float32 implementations of one model
WIDE = "rollout.engine.tensor_parallel=2"


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets") / "assets")


def nodes(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {node["id"]: node for node in status(run_dir)["nodes"] if node["state"] != "gone"}


def committed(run_dir: Path, node_id: str) -> list[dict[str, Any]]:
    """Groups of this node that were trained on."""
    return [e for e in ledger(run_dir) if e["state"] == "committed" and e["nodes"] == [node_id]]


def workers(pid: int) -> list[str]:
    """vLLM's names of the engine workers below a process."""
    names: list[str] = []
    for process in descendants(pid):
        try:
            names += re.findall(r"Worker_TP\d", " ".join(process.cmdline()))
        except psutil.Error:
            continue
    return sorted(names)


def test_engines_of_one_and_of_two_workers_train_one_policy(assets, tmp_path):
    run_dir = tmp_path / "run"
    config = str(
        write_config(
            tmp_path / "job.yaml",
            assets,
            run_dir,
            2000,
            tasks={"options": {"pause_s": 0.25}},
            weights={"encoding": "full", "canary_every": 1},
        )
    )
    with (
        Command(tmp_path, "broker", "broker", config) as broker,
        Command(tmp_path, "learner", "learner", config) as learner,
        Command(tmp_path, "narrow", "rollout", config, "--node-id", "narrow") as narrow,
    ):
        until("broker", (run_dir / "broker.json").exists, 30, broker)
        address = status(run_dir)["broker"]["address"]
        with Command(tmp_path, "wide", "rollout", "--join", address, WIDE, "--node-id", "wide") as wide:
            roles = (broker, learner, narrow, wide)

            def both_were_trained_on() -> bool:
                return all(len(committed(run_dir, name)) >= 3 for name in ("narrow", "wide"))

            until("groups of both nodes", both_were_trained_on, START_S, *roles)
            assert workers(wide.process.pid) == ["Worker_TP0", "Worker_TP1"]
            assert workers(narrow.process.pid) == []

            newest = status(run_dir)["learner"]["policy_version"]

            def both_follow() -> bool:
                return all(e["policy_version"] >= newest + 3 for e in nodes(run_dir).values())

            until("newer versions on both nodes", both_follow, 60, *roles)
            until("newer groups of both nodes", lambda: all(
                max(e["version_min"] for e in committed(run_dir, name)) >= newest for name in ("narrow", "wide")
            ), 60, *roles)  # fmt: skip
            seen = nodes(run_dir)
            assert seen.keys() == {"narrow", "wide"}
            for node in seen.values():
                assert node["flips"] >= 4, "each flip is proven before its version counts"
                assert 0 < node["canary_max_difference"] < TOLERANCE
                joined = node["joined"]
                assert 0 < joined["registered"] < joined["engine"] < joined["staged"] < joined["active"]
                assert joined["active"] < joined["leased"] < joined["delivered"]
            for command in (wide, learner, narrow, broker):
                command.signal(signal.SIGTERM)
                assert command.wait(60) == 0, command.output()
    lines = metrics(run_dir)
    assert_trained_exactly_once(run_dir, len(lines))
    assert max(line["mismatch_abs_mean"] for line in lines) < TOLERANCE
