"""Stalls in words: of a living job, of one whose broker is away, and in `status`, `top` and --json."""

import json
import os
import sys
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from broker.contract import BrokerStatus, LearnerReport, NodeReport, NodeStatus, RunInfo
from broker.diagnosis.stalls import Stall
from common.config.schema import Config, ModelConfig, RunConfig, TasksConfig
from common.process.run_dir import RunDir, write_json
from launch.cli import main
from launch.observe import stall_text
from launch.observe.job_view import render_live, render_status
from launch.observe.metrics_tail import MetricsTail
from launch.observe.observation import Observation, observe

LEARNER = LearnerReport(11, 0, "waiting", 7, "groups", 2.5, step=7, groups_missing=4)


def status_of(learner: LearnerReport | None = LEARNER, nodes: int = 0) -> BrokerStatus:
    return BrokerStatus(
        pid=10, address="tcp://127.0.0.1:5", run=RunInfo("demo", "/runs/demo", 4, 1, 3, 60.0, 1 << 20),
        groups_pending=3, groups_ready=1, groups_leased=0, groups_taken=0, groups_committed=28, groups_dead=0,
        bytes_held=100, lease_expiries=0, stale_results=0, tokens_generated_total=500, tokens_wasted_total=0,
        learner=learner, learner_last_seen_s=0.5,
        nodes=[NodeStatus(NodeReport(f"n{i}", i, "h", "generating", 7), 1, True, 0.1) for i in range(nodes)],
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.prepare(config_of(made))
    return made


def config_of(run: RunDir) -> Config:
    return Config(
        run=RunConfig(name="demo", dir=str(run.path), steps=10),
        model=ModelConfig(path="m"),
        tasks=TasksConfig(environment="addition", dataset="d"),
    )


def text_of(renderable: object) -> str:
    out = StringIO()
    Console(file=out, width=200).print(renderable)
    return out.getvalue()


def test_a_broker_that_does_not_answer_is_what_everyone_waits_for(run: RunDir) -> None:
    write_json(run.status_json, status_of())
    write_json(run.broker_json, {"pid": os.getpid(), "address": "ipc:///nobody/listens/here", "started_s": 0.0})
    os.utime(run.status_json, (1.0, 1.0))
    (stall,) = stall_text.stalls_of(observe(run, timeout_s=0.2))
    assert (stall.kind, stall.who) == ("broker_away", "everyone")
    assert stall.waits_for.startswith("the broker at tcp://127.0.0.1:5, which does not answer (broker not reachable: ")
    assert stall.since_s is not None and stall.since_s > 1e9


def test_a_broker_that_ended_is_a_stall_only_while_the_learner_has_work() -> None:
    (stall,) = stall_text.stalls_of(Observation(status_of(), live=False, note="broker 10 has ended"))
    assert (stall.kind, stall.since_s) == ("broker_gone", None)
    done = status_of(msgspec.structs.replace(LEARNER, state="done"))
    assert stall_text.stalls_of(Observation(done, live=False, note="broker 10 has ended")) == []


def test_sentences_agree_with_who_waits() -> None:
    assert stall_text.sentence(Stall("k", "node-0", "weights", 3.0, "they come")) == (
        "node-0 waits for weights, since 3.0 s; until: they come"
    )
    assert stall_text.sentence(Stall("k", "a and b", "room", None, "x")) == "a and b wait for room; until: x"


def test_status_shows_who_waits_for_whom(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(render_status(run, Observation(status_of(), live=True)))
    assert "and no node is alive" in text and "a node joins" in text
    write_json(run.status_json, status_of())
    assert main(["status", str(run.path), "--json"]) == 0
    (stall,) = json.loads(capsys.readouterr().out)["stalls"]
    assert set(stall) == {"kind", "who", "waits_for", "since_s", "release"}


def test_a_job_that_moves_is_said_to(run: RunDir) -> None:
    training = msgspec.structs.replace(LEARNER, state="training")
    assert "The learner is training; 2 nodes alive." in text_of(
        render_status(run, Observation(status_of(training, 2), live=True))
    )


def test_the_live_view_has_the_first_stalls(run: RunDir) -> None:
    view = render_live(config_of(run), Observation(status_of(), live=True), MetricsTail(run.metrics), [])
    assert "the learner waits for groups for step 7: 1 of 4 ready, and no node is alive, since 3.0 s" in text_of(view)


def test_of_many_stalls_the_first_are_shown_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Stall("k", f"w{i}", "x", None, "y") for i in range(stall_text.SHOWN + 3)]
    monkeypatch.setattr(sys.modules["launch.observe.stall_text"], "stalls_of", lambda seen: many)
    assert "and 3 more" in text_of(stall_text.page(Observation(status_of(), live=True)))


def test_status_ends_with_the_advisors_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"step_s": 10.0, "learner_idle_s": 4.1, "nodes_live": 2, "incarnation": 0, "seconds_wasted_waiting": 0.0}
    run.metrics.write_text("".join(json.dumps({"step": i, **line}) + "\n" for i in range(8)))
    write_json(run.status_json, status_of())
    assert main(["status", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"]["change"] == "more_nodes"
    assert main(["status", str(run.path)]) == 0
    assert "advice: 2 more nodes: learner idle 41% -> about 0%" in capsys.readouterr().out
    tail = MetricsTail(run.metrics)
    tail.update()
    assert "2 more nodes" in text_of(render_live(config_of(run), Observation(status_of(), live=True), tail, []))
