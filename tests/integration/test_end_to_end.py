"""Whole jobs with every real part: ZeroMQ broker, Megatron learner under torchrun, vLLM nodes."""

import signal

from tests.integration.job_rig import (
    GROUPS,
    STALENESS,
    Command,
    assert_trained_exactly_once,
    descendants,
    events,
    kill,
    ledger,
    metrics,
    slipstream,
    status,
    survivors,
    until,
    write_config,
)

SLOW = {"options": {"pause_s": 0.25}}  # a step takes about this long at least, however fast the machine is


def test_job_survives_kills_of_node_broker_and_learner(assets, tmp_path):
    run_dir, steps = tmp_path / "run", 60
    config = write_config(tmp_path / "job.yaml", assets, run_dir, steps, tasks=SLOW)
    with Command(tmp_path, "up", "up", str(config)) as up:
        until("second step", lambda: len(metrics(run_dir)) >= 2, up)
        running = status(run_dir)
        assert running["live"]
        assert {"pid", "state", "policy_version", "waiting_on", "since_s"} <= running["learner"].keys()
        assert {"pid", "address", "groups_ready", "groups_leased"} <= running["broker"].keys()
        (node,) = running["nodes"]
        assert {"id", "pid", "state", "policy_version", "leases"} <= node.keys()
        assert node["id"] == "node-0"
        assert any(entry["state"] == "committed" for entry in until("commit", lambda: ledger(run_dir), up))

        kill(node["pid"])
        reached = metrics(run_dir)[-1]["step"]
        until("steps after the node came back", lambda: len(metrics(run_dir)) > reached + 4, up)
        second = status(run_dir)
        assert [n["id"] for n in second["nodes"] if n["state"] != "gone"] == ["node-0"]
        assert all(n["pid"] != node["pid"] for n in second["nodes"] if n["state"] != "gone")

        kill(second["broker"]["pid"])
        reached = metrics(run_dir)[-1]["step"]
        until("steps after the broker came back", lambda: len(metrics(run_dir)) > reached + 4, up)
        third = status(run_dir)
        assert third["broker"]["pid"] != second["broker"]["pid"]
        assert third["learner"]["pid"] == second["learner"]["pid"], "the learner noticed no more than a slow answer"
        assert [n["pid"] for n in third["nodes"] if n["state"] != "gone"] == [
            n["pid"] for n in second["nodes"] if n["state"] != "gone"
        ]

        kill(third["learner"]["pid"])
        processes = descendants(up.process.pid)
        assert up.wait() == 0, up.output()
    assert survivors(processes) == []
    assert_trained_exactly_once(run_dir, steps)
    assert metrics(run_dir)[-1]["incarnation"] == 1
    kinds = [event["kind"] for event in events(run_dir)]
    assert kinds.count("role_crashed") == kinds.count("role_restarted") == 3
    assert f"done: {steps} of {steps} steps" in up.output()
    assert (run_dir / "model" / "model.safetensors").is_file()
    ended = status(run_dir)
    assert (ended["live"], ended["learner"]["state"]) == (False, "done")
    assert "is finished" in slipstream("up", str(config))
    slipstream("report", str(run_dir))
    assert (run_dir / "report" / "overview.png").stat().st_size > 10_000


def test_interrupted_job_drains_the_same_command_goes_on_and_nothing_survives_a_killed_supervisor(assets, tmp_path):
    run_dir, steps = tmp_path / "run", 2000
    config = write_config(
        tmp_path / "job.yaml", assets, run_dir, steps, tasks=SLOW, learner={"checkpoint": {"every": 5000}}
    )
    with Command(tmp_path, "first", "up", str(config)) as up:
        until("second step", lambda: len(metrics(run_dir)) >= 2, up)
        processes = descendants(up.process.pid)
        up.signal(signal.SIGINT)
        assert up.wait() == 0, up.output()
    assert survivors(processes) == []
    assert "stopped; the same command goes on" in up.output()
    done = len(metrics(run_dir))
    assert 2 <= done < steps
    assert (run_dir / "checkpoints" / f"step-{done:06d}").is_dir()
    assert not [entry for entry in ledger(run_dir) if entry["state"] == "leased"]
    assert [entry["state"] for entry in ledger(run_dir)].count("committed") == done * GROUPS
    with Command(tmp_path, "second", "up", str(config)) as up:
        until("steps after the stop", lambda: len(metrics(run_dir)) >= done + 2, up)
        processes = descendants(up.process.pid)
        assert len(processes) >= 5  # broker, torchrun, a rank, node, engine
        kill(up.process.pid)
        assert survivors(processes) == []
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert lines[-1]["incarnation"] == 1
    assert all(line["staleness_max"] <= STALENESS for line in lines)
