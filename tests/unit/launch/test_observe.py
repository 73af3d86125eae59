"""status, ledger and the views: from a living broker, and from what a run left behind."""

import json
import os
import threading
import time
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from broker.contract import BrokerStatus, LearnerReport, LedgerEntry, NodeReport, NodeStatus, RunInfo, Waste
from broker.delivery.event_log import EventLog
from broker.delivery.state import DeliveryState
from broker.main import run_info
from broker.server.server import BrokerServer
from common.config.schema import Config, ModelConfig, RunConfig, TasksConfig
from common.errors import EXIT_FAILED
from common.process.run_dir import RunDir, write_json
from launch.cli import main
from launch.observe import waste_view
from launch.observe.job_view import plain_line, render_live, render_status, sparkline
from launch.observe.metrics_tail import MetricsTail, mean
from launch.observe.number_format import duration
from launch.observe.observation import Observation, as_json, observe

RUN_INFO = RunInfo("demo", "/runs/demo", 4, 1, 3, 60.0, 1 << 20, b"{}")
LEARNER = LearnerReport(11, 0, "waiting", 7, "groups for step 7: 1 of 4 ready", 2.5)
NODE = NodeReport("node-0", 12, "here", "generating", 6, since_s=1.0, tokens_generated=500, tokens_per_s=1234.0)


def status_of(learner: LearnerReport | None = LEARNER, *nodes: NodeStatus, last_seen_s: float = 0.5) -> BrokerStatus:
    return BrokerStatus(
        pid=10, address="tcp://127.0.0.1:5", run=RUN_INFO, groups_pending=3, groups_ready=1, groups_leased=2,
        groups_taken=0, groups_committed=28, groups_dead=0, bytes_held=100, lease_expiries=0, stale_results=0,
        tokens_generated_total=500, tokens_wasted_total=0, learner=learner, learner_last_seen_s=last_seen_s,
        nodes=list(nodes) or [NodeStatus(NODE, 2, True, 0.2)],
    )  # fmt: skip


LEDGER = [
    LedgerEntry(0, "committed", 1, ["node-0"], 0, 0, 0, 0.25),
    LedgerEntry(1, "leased", 2, ["node-0", "node-1"], None, None, None, None, "lease expired"),
]


@pytest.fixture
def config(tmp_path) -> Config:
    return Config(
        run=RunConfig(name="demo", dir=str(tmp_path / "run"), steps=10),
        model=ModelConfig(path="m"),
        tasks=TasksConfig(environment="addition", dataset="d"),
    )


@pytest.fixture
def run(config) -> RunDir:
    made = RunDir(config.run.dir)
    made.prepare(config)
    return made


@pytest.fixture
def ended(run) -> RunDir:
    """A run whose broker is gone."""
    write_json(run.status_json, status_of())
    write_json(run.ledger_json, LEDGER)
    return run


def text_of(renderable) -> str:
    out = StringIO()
    Console(file=out, width=160).print(renderable)
    return out.getvalue()


def test_status_json_has_the_keys_that_programs_rely_on(ended, capsys):
    assert main(["status", str(ended.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    learner = {key: found["learner"][key] for key in ("pid", "state", "policy_version", "waiting_on", "since_s")}
    assert learner == {
        "pid": 11, "state": "waiting", "policy_version": 7, "waiting_on": LEARNER.waiting_on, "since_s": 2.5,
    }  # fmt: skip
    broker = {key: found["broker"][key] for key in ("pid", "address", "groups_ready", "groups_leased")}
    assert broker == {"pid": 10, "address": "tcp://127.0.0.1:5", "groups_ready": 1, "groups_leased": 2}
    (node,) = found["nodes"]
    assert {key: node[key] for key in ("id", "pid", "state", "policy_version", "leases")} == {
        "id": "node-0", "pid": 12, "state": "generating", "policy_version": 6, "leases": 2,
    }  # fmt: skip
    assert found["live"] is False
    assert "broker has ended" in found["note"]


def test_status_without_a_learner_keeps_its_shape(run):
    found = as_json(run, Observation(status_of(None), live=True))
    assert found["learner"]["pid"] is None
    assert found["learner"]["state"] == "absent"


def test_silent_learner_and_dead_node_are_told_from_living_ones(run):
    dead = NodeStatus(NODE, 0, False, 30.0)
    found = as_json(run, Observation(status_of(LEARNER, dead, last_seen_s=45.0), live=True))
    assert found["learner"]["state"] == "silent"
    assert found["learner"]["since_s"] == 47.5
    assert found["nodes"][0]["state"] == "gone"


def test_ledger_json_of_an_ended_run(ended, capsys):
    assert main(["ledger", str(ended.path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    expected = {
        "serial": 0, "state": "committed", "attempts": 1, "nodes": ["node-0"], "step": 0,
        "version_min": 0, "version_max": 0, "reward_mean": 0.25,
    }  # fmt: skip
    assert {key: first[key] for key in expected} == expected
    assert (second["step"], second["nodes"], second["reason"]) == (None, ["node-0", "node-1"], "lease expired")


def test_ledger_for_people_counts_states_and_retries(ended, capsys):
    assert main(["ledger", str(ended.path)]) == 0
    out = capsys.readouterr().out
    assert "2 tasks: 1 committed, 1 leased; 1 with more than one attempt" in out


@pytest.mark.parametrize("command", ["status", "ledger"])
def test_run_without_a_broker_so_far_fails_with_the_reason(run, capsys, command):
    assert main([command, str(run.path)]) == EXIT_FAILED
    assert "no broker has run here yet" in capsys.readouterr().err


def test_broker_that_was_killed_is_named_with_its_last_status(ended, capsys):
    write_json(ended.broker_json, {"pid": 2147483000, "address": "tcp://127.0.0.1:5", "started_s": 0.0})
    assert main(["status", str(ended.path), "--json"]) == 0
    assert "broker 2147483000 has ended" in json.loads(capsys.readouterr().out)["note"]


def test_broker_that_does_not_answer_is_not_called_ended(ended, capsys):
    write_json(ended.broker_json, {"pid": os.getpid(), "address": "ipc:///nobody/listens/here", "started_s": 0.0})
    seen = observe(ended, timeout_s=0.2)
    assert seen.note.startswith("broker not reachable:")
    shown = [line.split() for line in text_of(render_status(ended, seen)).splitlines()]
    assert ["broker", "10", "unreachable"] in [words[:3] for words in shown]


@pytest.fixture
def living_broker(config, run):
    """A real broker on a thread, found through RUN/broker.json."""
    info = run_info(config, msgspec.json.encode(config))
    state = DeliveryState(info, time.monotonic, lambda: "token", EventLog())
    server = BrokerServer(state, "tcp://127.0.0.1:0", 1 << 20, lambda: None)
    write_json(run.broker_json, {"pid": os.getpid(), "address": server.address, "started_s": time.time()})
    thread = threading.Thread(target=server.run)
    thread.start()
    yield
    server.stop()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_living_broker_is_asked(run, living_broker, capsys):
    assert main(["status", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["live"] is True
    assert found["broker"]["pid"] == os.getpid()
    assert found["learner"]["state"] == "absent"
    assert main(["ledger", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["status", str(run.path)]) == 0
    assert "everyone waits for a learner: none has attached" in capsys.readouterr().out


WASTEFUL = msgspec.structs.replace(
    status_of(
        msgspec.structs.replace(LEARNER, waste={"masked": Waste(25), "failed": Waste(5)}),
        NodeStatus(NODE, 2, True, 0.2, waste={"lost": Waste(10, 61.0), "failed": Waste(20, 2.5)}),
        NodeStatus(msgspec.structs.replace(NODE, node_id="node-1"), 2, True, 0.2, waste={"waiting": Waste(0, 7.0)}),
        NodeStatus(msgspec.structs.replace(NODE, node_id="node-2"), 2, True, 0.2),
    ),
    waste={"lost": Waste(10, 61.0), "failed": Waste(20, 2.5), "waiting": Waste(0, 7.0)},
)


def test_waste_is_shown_by_reason_for_the_run_and_for_each_node(run):
    found = as_json(run, Observation(WASTEFUL, live=True))
    assert found["waste"]["lost"] == {"tokens": 10, "seconds": 61.0}
    assert found["waste"]["failed"] == {"tokens": 25, "seconds": 2.5}
    assert found["waste"]["masked"] == {"tokens": 25, "seconds": 0.0}
    assert found["waste"]["filtered"] == {"tokens": 0, "seconds": 0.0}
    assert found["nodes"][0]["waste"]["failed"] == {"tokens": 20, "seconds": 2.5}
    assert found["nodes"][2]["waste"]["failed"] == {"tokens": 0, "seconds": 0.0}
    shown = [line.split() for line in text_of(render_status(run, Observation(WASTEFUL, live=True))).splitlines()]
    assert ["wasted", "lost", "failed", "masked", "waiting"] in shown
    assert ["all", "10,", "61.0", "s", "25,", "2.5", "s", "25", "7.0", "s"] in shown
    assert ["node-0", "10,", "61.0", "s", "20,", "2.5", "s", "-", "-"] in shown
    assert ["node-1", "-", "-", "-", "7.0", "s"] in shown
    assert ["learner", "-", "5", "25", "-"] in shown
    assert "nothing wasted" in text_of(render_status(run, Observation(status_of(), live=True)))


def test_the_live_view_says_how_much_was_wasted_and_on_what(config):
    tail = MetricsTail(Path(config.run.dir) / "metrics.jsonl")
    said = text_of(render_live(config, Observation(WASTEFUL, live=True), tail, []))
    assert "60 tokens (12% of those generated): 25 masked, 25 failed, 10 lost" in said
    assert "of those generated" not in text_of(render_live(config, Observation(status_of(), live=True), tail, []))


def test_of_many_nodes_the_first_are_shown_and_the_rest_counted():
    nodes = [
        NodeStatus(msgspec.structs.replace(NODE, node_id=f"n{i}"), 0, True, 0.1, waste={"failed": Waste(1)})
        for i in range(20)
    ]
    shown = text_of(waste_view.table(msgspec.structs.replace(status_of(None, *nodes), waste={"failed": Waste(20)})))
    assert "n15" in shown and "n16" not in shown
    assert "and 4 more" in shown


def test_status_for_people_shows_every_process(run):
    text = text_of(render_status(run, Observation(status_of(), live=True)))
    for word in ("learner", "broker", "node-0", "generating", "2 leases", "1 groups ready", "1 of 4 ready"):
        assert word in text


def write_steps(run: RunDir, count: int) -> MetricsTail:
    with run.metrics.open("a") as file:
        for step in range(count):
            line = {"step": step, "policy_version": step + 1, "reward_mean": step / 10, "staleness_mean": 0.5,
                    "staleness_max": 1, "step_s": 2.0, "learner_idle_s": 0.5}  # fmt: skip
            file.write(json.dumps(line) + "\n")
    tail = MetricsTail(run.metrics)
    tail.update()
    return tail


def test_live_view_shows_progress_and_waits(config, run):
    tail = write_steps(run, 4)
    text = text_of(render_live(config, Observation(status_of(), live=True), tail, ["12:00:00 node-1: restarted"]))
    words = ("step 4/10", "12 s left", "reward", "0.300", "max 1 of 2", "25% waiting", "1,234 tokens/s", "restarted")
    for word in words:
        assert word in text


def test_live_view_before_the_broker_answers(config, run):
    assert "waiting for the broker" in text_of(render_live(config, None, MetricsTail(run.metrics), []))


def test_a_node_whose_environments_start_is_not_said_to_generate(config, run):
    report = msgspec.structs.replace(NODE, state="environments", waiting_on="the start of 8 environments")
    seen = Observation(status_of(LEARNER, NodeStatus(report, 2, True, 0.2)), live=True)
    line = plain_line(config, seen, MetricsTail(run.metrics))
    assert "node-0: environments (the start of 8 environments)" in line
    assert "the start of 8 environments" in text_of(render_live(config, seen, MetricsTail(run.metrics), []))
    assert "generating" not in line


def test_plain_line_says_the_same_in_one_line(config, run):
    line = plain_line(config, Observation(status_of(), live=True), write_steps(run, 4))
    for word in ("step 4/10", "reward 0.300", "learner: waiting (groups for step 7", "1 ready 2 leased", "node-0"):
        assert word in line
    assert "\n" not in line
    assert "broker: no answer yet" in plain_line(config, None, MetricsTail(run.metrics))


def test_tail_reads_only_whole_lines_and_starts_over_with_a_new_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert not tail.update()
    path.write_text('{"step": 0, "x": 1}\n{"step": 1, "x"')
    assert tail.update()
    assert tail.series("x") == [1.0]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.update()
    assert not tail.update()
    assert tail.series("x") == [1.0, 2.0]
    fresh = tmp_path / "new"
    fresh.write_text('{"step": 0, "x": 5}\n')
    fresh.replace(path)
    tail.update()
    assert tail.series("x") == [5.0]


def test_small_formats():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" or sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(500)], width=40)) == 40
    assert sparkline([]) == ""
    assert [duration(s) for s in (0.42, 12.0, 180.0, 7560.0)] == ["0.4 s", "12 s", "3 min", "2.1 h"]
    assert mean([]) is None
