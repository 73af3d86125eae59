"""A whole job on Redis: `slipstream up`, its learner and its node; the server gets `kill -9` and comes back."""

from pathlib import Path

from tests.integration.job_rig import (
    GROUPS,
    Command,
    assert_trained_exactly_once,
    descendants,
    events,
    ledger,
    make_assets,
    metrics,
    slipstream,
    status,
    survivors,
    until,
    write_config,
)
from tests.redis_server import RedisServer

STEPS = 30
SLOW = {"options": {"pause_s": 0.25}}  # a step takes about this long at least, however fast the machine is


def test_up_trains_on_redis_through_kill_9_of_the_server_and_commits_every_group_once(tmp_path: Path) -> None:
    assets, run_dir = make_assets(tmp_path / "assets"), tmp_path / "run"
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis", {"appendonly": "yes", "appendfsync": "always"})
    try:
        broker = {"store": "redis", "redis": server.address}
        config = write_config(tmp_path / "job.yaml", assets, run_dir, STEPS, tasks=SLOW, broker=broker)
        with Command(tmp_path, "up", "up", str(config)) as up:
            until("third step", lambda: len(metrics(run_dir)) >= 3, up)
            running = status(run_dir)
            assert running["live"] and running["broker"]["address"].startswith("tcp://")
            pids = running["learner"]["pid"], [node["pid"] for node in running["nodes"]]

            server.kill()
            server.start()
            reached = metrics(run_dir)[-1]["step"]
            until("steps after Redis came back", lambda: len(metrics(run_dir)) > reached + 3, up)
            again = status(run_dir)
            assert (again["learner"]["pid"], [node["pid"] for node in again["nodes"]]) == pids, "nobody had to restart"
            processes = descendants(up.process.pid)
            assert up.wait() == 0, up.output()
        assert survivors(processes) == []
        assert f"done: {STEPS} of {STEPS} steps" in up.output()
        assert_trained_exactly_once(run_dir, STEPS)
        assert metrics(run_dir)[-1]["incarnation"] == 0
        assert {e["state"] for e in ledger(run_dir)} <= {"committed", "pending", "ready"}
        commits = [e["detail"]["groups"] for e in events(run_dir) if e["kind"] == "commit"]
        assert sum(commits) == STEPS * GROUPS
        assert (run_dir / "model" / "model.safetensors").is_file()
        assert "is finished" in slipstream("up", str(config))
    finally:
        server.stop()
