"""Whole jobs that `slipstream stop` ends while they train: over separate run folders with keys, and under `up`."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.process.run_dir import RunDir
from common.security.credentials import KeyFolder
from launch.keys import make
from launch.observe.transcripts import read
from tests.rigs.jobs import (
    GROUPS,
    Run,
    assert_trained_exactly_once,
    events,
    ledger,
    metrics,
    slipstream,
    status,
    write_config,
)
from tests.rigs.processes import Command, kill, until
from tests.rigs.warm_engines import Node

SLOW = {"options": {"pause_s": 0.25}}  # a step takes about this long at least, however fast the machine is
ENDED = {"committed", "pending", "ready", "taken"}


def test_a_job_over_several_run_folders_is_stopped_through_its_address_and_continues(assets, tmp_path: Path) -> None:
    keys, run_dir, far = KeyFolder(tmp_path / "keys"), tmp_path / "run", tmp_path / "far"
    make(keys, ["far"])
    sections: dict[str, Any] = {"tasks": SLOW, "broker": {"credentials": str(keys.path)}}
    config = str(write_config(tmp_path / "job.yaml", assets, run_dir, 2000, **sections))
    done = 0
    for time in ("first", "second"):
        with ExitStack() as running:
            broker = running.enter_context(Command(tmp_path, f"{time}-broker", "broker", config))
            until("broker", (run_dir / "broker.json").exists, broker)
            address = json.loads((run_dir / "broker.json").read_text())["address"]
            words = ["--join", address, "--credentials", str(keys.nodes / "far.json"), "--node-id", "far"]
            node = running.enter_context(Node(tmp_path, f"{time}-node", *words, f"run.dir={far}"))
            learner = Run(tmp_path)
            learner.start()
            learner.until(lambda done=done: len(metrics(run_dir)) >= done + 3)
            if time == "first":
                learner.until(lambda: list(read(RunDir(run_dir))))
                assert {transcript.node_id for transcript in read(RunDir(run_dir))} == {"far"}
                assert not RunDir(far).transcripts.exists(), "its text came over the wire"
                asked = [address, "--credentials", str(keys.observer)]
                seen = json.loads(slipstream("status", *asked, "--json"))
                assert seen["run"] == str(run_dir) and [n["id"] for n in seen["nodes"]] == ["far"]
                assert any(
                    entry["state"] == "committed" for entry in json.loads(slipstream("ledger", *asked, "--json"))
                )
                assert "'end-to-end'" in slipstream("logs", *asked, "far", "--lines", "1000")
                assert (far / "logs" / "rollout-far.log").exists() and not (
                    run_dir / "logs" / "rollout-far.log"
                ).exists()
                assert "learner-0" in slipstream("logs", *asked, "learner")
                assert "listens on" in slipstream("logs", *asked, "broker")
            said = slipstream("stop", address, "--credentials", str(keys.learner))
            assert said.startswith("waiting for ") and said.endswith("stopped; the same commands continue the job\n")
            assert learner.ended() == 0
            assert [role.wait() for role in (node, broker)] == [0, 0], node.output() + broker.output()
        done = len(metrics(run_dir))
        assert (run_dir / "checkpoints" / f"step-{done:06d}").is_dir()
        entries = ledger(run_dir)
        assert {entry["state"] for entry in entries} <= ENDED, "every lease was handed in or given back"
        assert sum(entry["state"] == "committed" for entry in entries) == done * GROUPS
    assert metrics(run_dir)[-1]["incarnation"] == 1
    assert_trained_exactly_once(run_dir, done)
    assert "nothing to stop: the broker has ended" in slipstream("stop", str(run_dir))


def test_up_ends_well_and_starts_nothing_again_also_when_the_broker_is_killed_while_the_job_stops(
    assets, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = str(write_config(tmp_path / "job.yaml", assets, run_dir, 2000, tasks=SLOW))
    with Command(tmp_path, "up", "up", config) as up:
        until("second step", lambda: len(metrics(run_dir)) >= 2, up)
        broker = status(run_dir)["broker"]["pid"]
        with Command(tmp_path, "stop", "stop", str(run_dir)) as stop:
            until("the request", lambda: "stop_requested" in [event["kind"] for event in events(run_dir)], up)
            kill(broker)
            assert (up.wait(), stop.wait()) == (0, 0), up.output() + stop.output()
    done = len(metrics(run_dir))
    assert done < 2000
    assert (run_dir / "checkpoints" / f"step-{done:06d}").is_dir()
    assert {e["detail"]["role"] for e in events(run_dir) if e["kind"] == "role_restarted"} <= {"broker"}
    assert_trained_exactly_once(run_dir, done)
