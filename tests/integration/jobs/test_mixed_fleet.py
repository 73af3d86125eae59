"""A whole job of roles that are started one by one, with engines of different sizes: tensor parallelism 1 and 2.

The learner has two pipeline stages. Each sends its part of the weights, which go on from node to node.
"""

import re
from pathlib import Path
from typing import Any

import psutil

from tests.rigs.jobs import assert_trained_exactly_once, events, ledger, metrics, slipstream, status, write_config
from tests.rigs.processes import Command, descendants, until
from tests.rigs.telemetry import ChromeTrace
from tests.rigs.waiting import LIMIT_S
from tests.rigs.warm_engines import Node

TOLERANCE = 2e-4  # nat, between two float32 implementations of one model
WIDE = "rollout.engine.tensor_parallel=2"
IDS = {"narrow", "wide"}
STAGES = ("registered", "engine", "staged", "active", "leased", "delivered")


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


def test_roles_started_separately_with_engines_of_one_and_of_two_workers_train_one_policy_and_drain(assets, tmp_path):
    run_dir = tmp_path / "run"
    sections: dict[str, dict[str, Any]] = {
        "weights": {"encoding": "full", "canary_every": 1, "transport": "relay"},
        "learner": {"world_size": 2, "parallel": {"pipeline": 2}},
        # Every token is sampled by the version that trains: only arithmetic may separate log-probabilities.
        "staleness": {"max": 0},
        # A node leases three of a step's four groups at most, so the slower one finds work in each step.
        "rollout": {"concurrency": 4},
    }
    config = str(write_config(tmp_path / "job.yaml", assets, run_dir, 2000, **sections))
    with (
        Node(tmp_path, "narrow", config, "--node-id", "narrow") as narrow,  # waits for its broker
        Command(tmp_path, "broker", "broker", config) as broker,
    ):
        until("broker", (run_dir / "broker.json").exists, broker)
        address = status(run_dir)["broker"]["address"]
        with Node(tmp_path, "wide", "--join", address, WIDE, "--node-id", "wide") as wide:

            def engines_are_up() -> bool:
                return [n["joined"]["engine"] > 0 for n in nodes(run_dir).values()] == [True, True]

            until("both engines", engines_are_up, broker, narrow, wide)
            assert workers(wide.process.pid) == ["Worker_TP0", "Worker_TP1"]
            assert workers(narrow.process.pid) == []
            with Command(tmp_path, "learner", "learner", config) as learner:  # from here on the policy changes fast
                roles = (broker, learner, narrow, wide)

                def groups_of_new_versions(version: int) -> bool:
                    newest = {n: max((e["version_min"] for e in committed(run_dir, n)), default=-1) for n in IDS}
                    return all(v >= version for v in newest.values())

                until("groups of both nodes", lambda: groups_of_new_versions(0), *roles)
                later = status(run_dir)["learner"]["policy_version"] + 3
                until("groups of newer versions", lambda: groups_of_new_versions(later), *roles)
                seen = nodes(run_dir)
                assert seen.keys() == IDS
                for node in seen.values():
                    assert node["policy_version"] >= later
                    assert node["flips"] >= 4, "each is proven before its version counts"
                    assert 0 < node["canary_max_difference"] < TOLERANCE
                    reached = [node["joined"][stage] for stage in STAGES]
                    assert reached[0] > 0 and reached == sorted(reached)
                for command in (wide, learner, narrow, broker):
                    command.drain()
    assert "2 parts" in (run_dir / "logs" / "learner-0.log").read_text()
    lines = metrics(run_dir)
    assert status(run_dir)["learner"]["policy_version"] == len(lines)
    assert not [entry for entry in ledger(run_dir) if entry["state"] == "leased"]
    assert_trained_exactly_once(run_dir, len(lines))
    assert max(line["mismatch_abs_mean"] for line in lines) < TOLERANCE
    assert abs(lines[-1]["entropy"] - lines[0]["entropy"]) > 100 * TOLERANCE, (
        "no learning: an old version would not show"
    )
    assert_traced(run_dir, len(lines))


def assert_traced(run_dir: Path, steps: int) -> None:
    """The trace has what metrics, events and ledger know, and its arrows say which groups a step trained on."""
    slipstream("trace", str(run_dir))
    trace = ChromeTrace(run_dir / "trace.json")
    found = trace.slices("step", "learner")
    assert [step["args"]["step"] for step in found] == list(range(steps))
    inside = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in trace.slices("phase") + trace.slices("microbatch")]
    for step in found:
        names = {name for name, ts, end in inside if step["ts"] <= ts and end <= step["ts"] + step["dur"]}
        assert names >= {"batch", "train", "snapshot", "microbatch 0"}
    trained = {(a["args"]["serial"], b["args"]["step"]) for a, b in trace.arrows if a["cat"] == "lease"}
    assert trained == {(e["serial"], e["step"]) for e in ledger(run_dir) if e["state"] == "committed"}
    ran = {(e["args"]["serial"], e["args"]["sample"]) for e in trace.slices("episode")}
    assert ran >= {(serial, sample) for serial, _ in trained for sample in range(4)}
    versions = [event["detail"]["version"] for event in events(run_dir) if event["kind"] == "publish"]
    assert {e["args"]["version"] for e in trace.slices("publish")} >= set(versions[:-1]), "the last may be cut short"
    flips = {(e["pid"], e["args"]["version"]) for e in trace.slices("flip")}
    drawn = {(b["pid"], b["args"]["version"]) for a, b in trace.arrows if a["cat"] == "publish"}
    assert drawn >= {(pid, version) for pid, version in flips if version < versions[-1]}
    names = {pid: name.split()[0] for pid, name in trace.processes.items()}
    assert {names[pid] for pid, _ in flips} == {names[e["pid"]] for e in trace.slices("stage")} == IDS
    assert trace.slices("state", "learner") and trace.slices("state", "narrow") and trace.slices("state", "wide")
    assert 0 < trace.document["otherData"]["clock_error_s"] < LIMIT_S
