"""Stalls in words: of a living job, of one whose broker is away, and in `status`, `top` and --json."""

import json
import os

import msgspec
import pytest

from broker.diagnosis.stalls import Stall
from common.process.run_dir import write_json
from launch.cli import main
from launch.observe import stall_text
from launch.observe.job_view import render_live, render_status
from launch.observe.metrics_tail import MetricsTail
from launch.observe.observation import Observation, observe
from tests.launch_rig import LEARNER, json_of, node_status, status_of, text_of, write_broker

WAITING = status_of(groups_leased=0, learner=msgspec.structs.replace(LEARNER, groups_missing=4))


def seen(status=WAITING, **changes) -> Observation:
    return Observation(status, **{"live": True, **changes})


def test_a_broker_that_does_not_answer_is_what_everyone_waits_for(run):
    write_json(run.status_json, WAITING)
    write_broker(run)
    os.utime(run.status_json, (1.0, 1.0))
    (stall,) = stall_text.stalls_of(observe(run, timeout_s=0.2))
    assert (stall.kind, stall.who) == ("broker_away", "everyone")
    assert stall.waits_for.startswith("the broker at tcp://127.0.0.1:5, which does not answer (broker not reachable: ")
    assert stall.since_s is not None and stall.since_s > 1e9


@pytest.mark.parametrize(("state", "kinds"), [("waiting", ["broker_gone"]), ("done", [])])
def test_a_broker_that_ended_is_a_stall_only_while_the_learner_has_work(state, kinds):
    status = status_of(learner=msgspec.structs.replace(LEARNER, state=state))
    stalls = stall_text.stalls_of(seen(status, live=False, note="broker 10 has ended"))
    assert [(stall.kind, stall.since_s) for stall in stalls] == [(kind, None) for kind in kinds]


def test_sentences_agree_with_who_waits():
    assert stall_text.sentence(Stall("k", "node-0", "weights", 3.0, "they come")) == (
        "node-0 waits for weights, since 3.0 s; until: they come"
    )
    assert stall_text.sentence(Stall("k", "a and b", "room", None, "x")) == "a and b wait for room; until: x"


def test_status_and_the_live_view_show_who_waits_for_whom(config, run, capsys):
    text = text_of(render_status(run, seen()))
    assert "and no node is alive" in text and "a node joins" in text
    view = text_of(render_live(config, seen(), MetricsTail(run.metrics), []))
    assert "the learner waits for groups for step 7: 1 of 4 ready, and no node is alive, since 3.0 s" in view
    write_json(run.status_json, WAITING)
    (stall,) = json_of(capsys, "status", str(run.path))["stalls"]
    assert set(stall) == {"kind", "who", "waits_for", "since_s", "release"}


def test_a_job_that_moves_is_said_to(run):
    training = msgspec.structs.replace(LEARNER, state="training")
    moving = status_of(node_status("n0"), node_status("n1"), learner=training)
    assert "The learner is training; 2 nodes alive." in text_of(render_status(run, seen(moving)))


def test_of_many_stalls_the_first_are_shown_and_the_rest_counted(monkeypatch):
    many = [Stall("k", f"w{i}", "x", None, "y") for i in range(stall_text.SHOWN + 3)]
    monkeypatch.setattr(stall_text, "stalls_of", lambda seen: many)
    assert "and 3 more" in text_of(stall_text.page(seen()))


def test_status_ends_with_the_advisors_line(config, run, capsys):
    line = {"step_s": 10.0, "learner_idle_s": 4.1, "nodes_live": 2, "incarnation": 0, "seconds_wasted_waiting": 0.0}
    run.metrics.write_text("".join(json.dumps({"step": i, **line}) + "\n" for i in range(8)))
    write_json(run.status_json, WAITING)
    assert json_of(capsys, "status", str(run.path))["advice"]["change"] == "more_nodes"
    assert main(["status", str(run.path)]) == 0
    assert "advice: 2 more nodes: learner idle 41% -> about 0%" in capsys.readouterr().out
    tail = MetricsTail(run.metrics)
    tail.update()
    assert "2 more nodes" in text_of(render_live(config, seen(), tail, []))
