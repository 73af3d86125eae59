"""Whole jobs with every real part: ZeroMQ broker, Megatron learner under torchrun, vLLM nodes."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from broker.journal.recording import open_recording
from common.errors import EXIT_HOPELESS
from common.process.run_dir import RunDir
from common.transcripts import Transcript
from launch.cli import parse
from launch.observe.transcripts import read
from launch.resolve_target import config_of, find_run
from launch.results.replay import plan_replay
from learner.loss.advantages import ADVANTAGES
from learner.loss.types import GroupRewards
from tests.rigs.jobs import (
    GROUPS,
    STALENESS,
    assert_trained_exactly_once,
    events,
    ledger,
    metrics,
    slipstream,
    status,
    write_config,
)
from tests.rigs.processes import Command, descendants, kill, survivors, until
from tests.rigs.redis_servers import RedisServer, durable_redis

SLOW = {"options": {"pause_s": 0.25}}  # a step takes about this long at least, however fast the machine is


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that forgets nothing."""
    server = durable_redis(tmp_path / "redis")
    yield server
    server.stop()


def pids(seen: dict[str, Any], *roles: str) -> list[int]:
    """Process ids of broker, learner or of the nodes that are there."""
    nodes = [node["pid"] for node in seen["nodes"] if node["state"] != "gone"]
    return [pid for role in roles for pid in (nodes if role == "nodes" else [seen[role]["pid"]])]


def assert_transcripts(run_dir: Path, assets: Path, steps: int) -> None:
    """Every sample of every step has one, with its text, and with the advantage that its group gives it."""
    found = list(read(RunDir(run_dir)))
    told = slipstream("transcripts", str(run_dir), "--json", "--step", "0").splitlines()
    shown = [msgspec.json.decode(line, type=Transcript) for line in told]
    assert sorted(shown, key=lambda t: t.time_s) == sorted((t for t in found if t.step == 0), key=lambda t: t.time_s)
    tokenizer = Tokenizer.from_file(str(assets / "model" / "tokenizer.json"))
    size = GROUPS * 4
    for step in range(steps):
        mine = [t for t in found if t.step == step]
        assert len({(t.serial, t.sample) for t in mine}) == len(mine) == size
        assert {"best", "worst", "longest"} <= {why for t in mine for why in t.why}
    for serial in {t.serial for t in found}:
        group = sorted((t for t in found if t.serial == serial), key=lambda t: t.sample)
        (advantages,) = ADVANTAGES["grpo"]([GroupRewards.of(np.array([t.reward for t in group]))])
        for t, advantage in zip(group, advantages, strict=True):
            trained = [m for turn in t.turns for m in turn.trained]
            assert t.advantage == (pytest.approx(float(advantage)) if any(trained) else None)
    for turn in (turn for t in found for turn in t.turns):
        assert turn.text == "".join(turn.pieces) == tokenizer.decode(turn.tokens, skip_special_tokens=False)
        if turn.author == "policy":
            assert {len(column) for column in (turn.pieces, turn.logprobs, turn.trained)} == {len(turn.tokens)}
            assert len(turn.ratios) == len(turn.tokens) or not (turn.ratios or any(turn.trained)), "all too old"
    fresh = [(x, t.step) for t in found for turn in t.turns if turn.version_runs == [(0, t.step)] for x in turn.ratios]
    assert fresh and all(0.9 < ratio < 1.1 for ratio, _ in fresh), "only arithmetic differs"
    assert metrics(run_dir)[-1]["transcripts_dropped_total"] == 0


def assert_paused_and_resumed(run_dir: Path, first: int, up: Command) -> None:
    """A rule acts at step `first`: nodes get no later version until `slipstream resume`; then training goes on."""
    rule, version = f"watch[0]: incarnation was 1, above 0 at step {first}", first + 1

    def node_versions(shown: dict[str, Any]) -> list[int]:
        return [node["policy_version"] for node in shown["nodes"] if node["state"] != "gone"]

    def told(kind: str) -> list[str]:
        return [event["detail"]["reason"] for event in events(run_dir) if event["kind"] == kind]

    def waits() -> dict[str, Any]:
        """The status once the learner has used up the window of the nodes' version."""
        shown = status(run_dir)
        reached = shown["learner"]["policy_version"] == version + STALENESS + 1
        reason = f"publishing is paused, `slipstream resume` ends that: {rule}"
        return shown if reached and reason in shown["learner"]["waiting_on"] else {}

    assert until("the pause", lambda: told("publishing_paused"), up) == [rule]
    shown = until("the end of the window", waits, up)
    assert (shown["learner"]["state"], node_versions(shown)) == ("waiting", [version])
    assert f"the end of a pause in publishing: {rule}" in [stall["waits_for"] for stall in shown["stalls"]]
    assert rule in " ".join(slipstream("status", str(run_dir)).split())
    assert node_versions(status(run_dir)) == [version], "nothing was published meanwhile"
    assert f"step {version + STALENESS}" in slipstream("resume", str(run_dir))
    until("steps after the pause", lambda: len(metrics(run_dir)) >= version + 6, up)
    until("newer versions on the node", lambda: min(node_versions(status(run_dir)), default=0) > version + 2, up)
    assert (told("publishing_paused"), told("publishing_resumed")) == ([rule], [""])
    assert "publishing is paused" not in status(run_dir)["learner"]["waiting_on"]


def test_a_job_on_redis_survives_kills_of_the_server_node_broker_and_learner(assets, redis, tmp_path):
    run_dir, steps = tmp_path / "run", 24
    broker = {"store": "redis", "redis": redis.address}
    more = {"broker": broker, "telemetry": {"transcripts": 1.0}}
    config = write_config(tmp_path / "job.yaml", assets, run_dir, steps, tasks=SLOW, **more)
    with Command(tmp_path, "up", "up", str(config)) as up:

        def go_on(what: str) -> dict[str, Any]:
            """The status after more steps."""
            reached = len(metrics(run_dir))
            until(f"steps after {what}", lambda: len(metrics(run_dir)) > reached + 3, up)
            return status(run_dir)

        first = go_on("the start")
        assert first["live"] and first["broker"]["address"].startswith("tcp://")
        assert {"pid", "state", "policy_version", "waiting_on", "since_s"} <= first["learner"].keys()
        assert {"pid", "address", "groups_ready", "groups_leased"} <= first["broker"].keys()
        (node,) = first["nodes"]
        assert {"id", "pid", "state", "policy_version", "leases"} <= node.keys()
        assert node["id"] == "node-0"
        assert any(entry["state"] == "committed" for entry in until("commit", lambda: ledger(run_dir), up))

        redis.kill()
        redis.start()
        second = go_on("Redis came back")
        everyone = ("broker", "learner", "nodes")
        assert pids(second, *everyone) == pids(first, *everyone), "nobody had to restart"

        kill(second["broker"]["pid"])
        third = go_on("the broker came back")
        assert third["broker"]["pid"] != second["broker"]["pid"]
        rest = ("learner", "nodes")
        assert pids(third, *rest) == pids(second, *rest), "the others noticed no more than a slow answer"

        kill(third["nodes"][0]["pid"])
        fourth = go_on("the node came back")
        assert [n["id"] for n in fourth["nodes"] if n["state"] != "gone"] == ["node-0"]
        assert pids(fourth, "nodes") != pids(third, "nodes")

        kill(fourth["learner"]["pid"])
        processes = descendants(up.process.pid)
        assert up.wait() == 0, up.output()
    assert survivors(processes) == []
    assert_trained_exactly_once(run_dir, steps)
    assert metrics(run_dir)[-1]["incarnation"] == 1
    assert {entry["state"] for entry in ledger(run_dir)} <= {"committed", "pending", "ready"}
    told = events(run_dir)
    kinds = [event["kind"] for event in told]
    assert kinds.count("role_crashed") == kinds.count("role_restarted") == 3
    assert sum(event["detail"]["groups"] for event in told if event["kind"] == "commit") == steps * GROUPS
    assert f"done: {steps} of {steps} steps" in up.output()
    assert (run_dir / "model" / "model.safetensors").is_file()
    ended = status(run_dir)
    assert (ended["live"], ended["learner"]["state"]) == (False, "done")
    assert_transcripts(run_dir, assets, steps)
    assert "is finished" in slipstream("up", str(config))


def test_an_interrupted_job_goes_on_and_one_killed_whole_loses_nothing(assets, tmp_path):
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
    done = len(metrics(run_dir))
    assert 2 <= done < steps
    assert (run_dir / "checkpoints" / f"step-{done:06d}").is_dir()
    assert not [entry for entry in ledger(run_dir) if entry["state"] == "leased"]
    assert [entry["state"] for entry in ledger(run_dir)].count("committed") == done * GROUPS

    often, pause = "learner.checkpoint.every=1", "watch=[{metric: incarnation, above: 0, do: pause}]"
    with Command(tmp_path, "second", "up", str(config), often, pause) as up:
        assert_paused_and_resumed(run_dir, done, up)
        kill(status(run_dir)["broker"]["pid"])
        reached = len(metrics(run_dir))
        until("steps after the broker's death", lambda: len(metrics(run_dir)) > reached + 3, up)
        processes = descendants(up.process.pid)
        assert len(processes) >= 5  # broker, torchrun, a rank, node, engine
        kill(up.process.pid)
        assert survivors(processes) == []
    assert metrics(run_dir)[-1]["incarnation"] == 1

    rule = "watch=[{metric: incarnation, above: 1, do: stop}]"
    with Command(tmp_path, "third", "up", str(config), often, rule) as up:
        assert up.wait() == EXIT_HOPELESS, up.output()
    assert "watch[0]: incarnation" in up.output()
    assert_trained_exactly_once(run_dir, len(metrics(run_dir)))
    stopped_at = len(metrics(run_dir)) - 1  # at its first step; another start refuses to train: learner/test_resume.py
    paused, found = [event["detail"] for event in events(run_dir) if event["kind"] == "watch"]
    assert (paused["step"], paused["do"]) == (done, "pause")
    assert (found["rule"], found["step"], found["value"], found["do"]) == ("watch[0]", stopped_at, 2.0, "stop")
    assert (run_dir / "checkpoints" / f"step-{stopped_at + 1:06d}").is_dir()
    learner = status(run_dir)["learner"]
    assert learner["state"] == "failed" and "watch[0]" in learner["waiting_on"]
    assert {e["detail"]["role"] for e in events(run_dir) if e["kind"] == "role_restarted"} == {"broker"}
    words = parse(found["replay"].split()[1:])
    run = find_run(words.run)
    with open_recording(run, config_of(run)) as recording:
        plan = plan_replay(run, config_of(run), recording, words.first, words.last, None, ())
    assert list(plan.steps) == [stopped_at], "from the checkpoint that the step began with"
