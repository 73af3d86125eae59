"""The views of a job: `status`, the live view and its plain line, waste, metrics, and stalls in words."""

import json
import os

import msgspec
import pytest

from broker.contract import MachineStatus
from broker.diagnosis.stalls import Stall
from common.process.run_dir import RunDir, write_json
from common.run_reader import RecentTail, read_recent
from common.waits import WaitFor, WaitKind
from common.waste import Waste
from launch.cli import main
from launch.observe import job_view
from launch.observe.job_view import BAR_WIDTH, duration, plain_line, render_live, render_status, sparkline, waste_table
from launch.observe.observation import Observation, as_json, observe
from launch.resolve_target import Target
from tests.rigs.configs import LEARNER, json_of, node_status, status_of, text_of, write_broker

PLAIN = Observation(status_of(node_status()), live=True)
WASTEFUL = Observation(
    status_of(
        node_status(waste={"lost": Waste(10, 61.0), "failed": Waste(20, 2.5)}),
        node_status("node-1", waste={"waiting": Waste(0, 7.0)}),
        node_status("node-2"),
        learner=msgspec.structs.replace(LEARNER, waste={"masked": Waste(25), "failed": Waste(5)}),
        waste={"lost": Waste(10, 61.0), "failed": Waste(20, 2.5), "waiting": Waste(0, 7.0)},
    ),
    live=True,
)


@pytest.fixture
def tail(run: RunDir) -> RecentTail:
    """The metrics of four steps."""
    with run.metrics.open("a") as file:
        for step in range(4):
            line = {"step": step, "policy_version": step + 1, "reward_mean": step / 10, "staleness_mean": 0.5,
                    "staleness_max": 1, "step_s": 2.0, "learner_idle_s": 0.5}  # fmt: skip
            file.write(json.dumps(line) + "\n")
    return read_recent(run.metrics)


def test_waste_is_shown_by_reason_for_the_run_and_for_each_node(config, run, tail):
    found = as_json(run, WASTEFUL)
    assert found["waste"]["lost"] == {"tokens": 10, "seconds": 61.0}
    assert found["waste"]["failed"] == {"tokens": 25, "seconds": 2.5}
    assert found["waste"]["masked"] == {"tokens": 25, "seconds": 0.0}
    assert found["waste"]["filtered"] == {"tokens": 0, "seconds": 0.0}
    assert found["nodes"][0]["waste"]["failed"] == {"tokens": 20, "seconds": 2.5}
    assert found["nodes"][2]["waste"]["failed"] == {"tokens": 0, "seconds": 0.0}
    shown = [line.split() for line in text_of(render_status(run, WASTEFUL)).splitlines()]
    assert ["wasted", "lost", "failed", "masked", "waiting"] in shown
    assert ["all", "10,", "61.0", "s", "25,", "2.5", "s", "25", "7.0", "s"] in shown
    assert ["node-0", "10,", "61.0", "s", "20,", "2.5", "s", "-", "-"] in shown
    assert ["node-1", "-", "-", "-", "7.0", "s"] in shown
    assert ["learner", "-", "5", "25", "-"] in shown
    said = text_of(render_live(config, WASTEFUL, tail, []))
    assert "60 tokens (12% of those generated): 25 masked, 25 failed, 10 lost" in said
    assert "nothing wasted" in text_of(render_status(run, PLAIN))
    assert "of those generated" not in text_of(render_live(config, PLAIN, tail, []))
    failed = Observation(status_of(node_status(samples_failed={"timeout": 12, "environment_flood": 1})), live=True)
    assert "13 samples failed: 12 timeout, 1 environment_flood" in text_of(render_status(run, failed))
    assert "samples failed" not in text_of(render_status(run, PLAIN))


def test_of_many_nodes_and_stalls_the_first_are_shown_and_the_rest_counted(monkeypatch):
    nodes = [node_status(f"n{i}", waste={"failed": Waste(1)}) for i in range(20)]
    shown = text_of(waste_table(status_of(*nodes, learner=None, waste={"failed": Waste(20)})))
    assert "n15" in shown and "n16" not in shown
    assert "and 4 more" in shown
    many = [Stall("k", f"w{i}", "x", None, "y") for i in range(job_view.SHOWN_STALLS + 3)]
    monkeypatch.setattr(job_view, "stalls_of", lambda seen: many)
    assert "and 3 more" in text_of(job_view.stalls_page(PLAIN))


def test_the_views_show_every_process_progress_and_waits(config, run, tail):
    text = text_of(render_status(run, PLAIN))
    words = ("learner", "broker", "node-0", "generating", "2 leases", "1 groups ready", "1 of 4 ready")
    assert [word for word in words if word not in text] == []
    text = text_of(render_live(config, PLAIN, tail, ["12:00:00 node-1: restarted"]), width=160)
    words = ("step 4/10", "12 s left", "reward", "0.300", "max 1 of 2", "25% waiting", "1,234 tokens/s", "restarted")
    assert [word for word in words if word not in text] == []
    line = plain_line(config, PLAIN, tail)
    words = ("step 4/10", "reward 0.300", "learner: waiting (groups for step 7", "1 ready 2 leased", "node-0")
    assert [word for word in words if word not in line] == []
    assert "\n" not in line
    assert "waiting for the broker" in text_of(render_live(config, None, tail, []))
    assert "broker: no answer yet" in plain_line(config, None, tail)
    fewer = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=2))
    view = text_of(render_live(fewer, None, tail, []))
    assert view.count("█") == BAR_WIDTH + 1, "a full bar, and the highest reward"
    # a node whose environments start is not said to generate
    node = node_status(state="environments", wait=WaitFor(WaitKind.ENVIRONMENTS, count=8))
    seen = Observation(status_of(node), live=True)
    line = plain_line(config, seen, tail)
    assert "node-0: environments (the start of 8 environments)" in line
    assert "the start of 8 environments" in text_of(render_live(config, seen, tail, []))
    assert "generating" not in line


def test_a_metric_that_was_no_number_is_left_out_of_the_views(config, run, tail):
    names = ("ratio_max", "entropy", "grad_norm", "staleness_mean", "staleness_max", "policy_version", "reward_mean")
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 4, "step_s": None, **dict.fromkeys(names)}) + "\n")
    tail.update()
    assert "reward 0.000" in plain_line(config, PLAIN, tail)
    said = text_of(render_live(config, PLAIN, tail, []))
    assert "0.300  last ten 0.150" in said and "ratio max 1.00" in said


FOREIGN = "judge: 400 [/INST] wants [int]\x1b]0;owned\x07\x1b[2J\u202e\nbroker 1 serving"
ESCAPED = r"judge: 400 [/INST] wants [int]\x1b]0;owned\x07\x1b[2J\u202e\nbroker 1 serving"


def test_words_of_a_judge_or_of_another_machine_are_shown_and_never_obeyed(config, run, tail, capsys):
    learner = msgspec.structs.replace(LEARNER, alarms=[FOREIGN])
    wait = WaitFor(WaitKind.REPAIR, cause=FOREIGN)
    node = node_status(FOREIGN, state=FOREIGN, wait=wait, waste={"failed": Waste(3)}, samples_failed={FOREIGN: 1})
    machines = [MachineStatus(FOREIGN, FOREIGN, FOREIGN, 0, 1.0)]
    status = status_of(node, learner=learner, machines=machines, waste={"failed": Waste(3)})
    named = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=FOREIGN))
    found = seen(status)
    views = [(render_status(run, found), 10), (render_live(named, found, tail, [FOREIGN]), 8), (waste_table(status), 1)]
    for view, times in views:
        text = text_of(view, width=2000)
        assert text.count(ESCAPED) >= times
        assert all(line.isprintable() and not line.startswith("broker 1") for line in text.split("\n"))
    line = plain_line(config, found, tail)
    assert ESCAPED in line and line.isprintable()
    job_view.Display(config, tail, None).note(FOREIGN)
    job_view.say(FOREIGN)
    assert capsys.readouterr().out == 2 * (ESCAPED.replace(r"\n", "\n") + "\n")


def test_small_formats_and_sentences_that_agree_with_who_waits():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" or sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(500)], width=40)) == 40
    assert sparkline([]) == ""
    assert [duration(s) for s in (0.42, 12.0, 180.0, 7560.0)] == ["0.4 s", "12 s", "3 min", "2.1 h"]
    said = "node-0 waits for weights, since 3.0 s; until: they come"
    assert job_view.stall_sentence(Stall("k", "node-0", "weights", 3.0, "they come")) == said
    assert job_view.stall_sentence(Stall("k", "a and b", "room", None, "x")) == "a and b wait for room; until: x"
    late = Stall("straggler", "task 3, which later ones have overtaken", "the engine", None, "x")
    assert job_view.stall_sentence(late) == "task 3, which later ones have overtaken, waits for the engine; until: x"


# ---------------------------------------------------------------- stalls in words


WAITING = status_of(groups_leased=0, learner=msgspec.structs.replace(LEARNER, groups_missing=4))


def seen(status=WAITING, **changes) -> Observation:
    return Observation(status, **{"live": True, **changes})


def test_a_broker_that_does_not_answer_is_not_called_ended_and_everyone_waits_for_it(run):
    write_json(run.status_json, WAITING)
    write_broker(run)
    os.utime(run.status_json, (1.0, 1.0))
    unanswered = observe(Target(run), timeout_s=0.2)
    assert unanswered.note.startswith("broker not reachable:")
    shown = [line.split() for line in text_of(render_status(run, unanswered)).splitlines()]
    assert ["broker", "10", "unreachable"] in [words[:3] for words in shown]
    (stall,) = job_view.stalls_of(unanswered)
    assert (stall.kind, stall.who) == ("broker_away", "everyone")
    assert stall.waits_for.startswith("the broker at tcp://127.0.0.1:5, which does not answer (broker not reachable: ")
    assert stall.since_s is not None and stall.since_s > 1e9


@pytest.mark.parametrize(("state", "kinds"), [("waiting", ["broker_gone"]), ("done", [])])
def test_a_broker_that_ended_is_a_stall_only_while_the_learner_has_work(state, kinds):
    status = status_of(learner=msgspec.structs.replace(LEARNER, state=state))
    stalls = job_view.stalls_of(seen(status, live=False, note="broker 10 has ended"))
    assert [(stall.kind, stall.since_s) for stall in stalls] == [(kind, None) for kind in kinds]


def test_status_and_the_live_view_show_who_waits_for_whom_or_that_the_job_moves(config, run, capsys):
    text = text_of(render_status(run, seen()))
    assert "and no node is alive" in text and "a node joins" in text
    view = text_of(render_live(config, seen(), RecentTail(run.metrics), []))
    assert "the learner waits for groups for step 7: 1 of 4 ready, and no node is alive, since 3.0 s" in view
    write_json(run.status_json, WAITING)
    (stall,) = json_of(capsys, "status", str(run.path))["stalls"]
    assert set(stall) == {"kind", "who", "waits_for", "since_s", "release", "nodes", "task"}
    training = msgspec.structs.replace(LEARNER, state="training")
    moving = status_of(node_status("n0"), node_status("n1"), learner=training)
    assert "The learner is training; 2 nodes alive." in text_of(render_status(run, seen(moving)))


def test_status_ends_with_the_advisors_line(config, run, capsys):
    line = {"step_s": 10.0, "learner_idle_s": 4.1, "nodes_live": 2, "incarnation": 0, "seconds_wasted_waiting": 0.0}
    run.metrics.write_text("".join(json.dumps({"step": i, **line}) + "\n" for i in range(8)))
    write_json(run.status_json, WAITING)
    assert json_of(capsys, "status", str(run.path))["advice"]["change"] == "more_nodes"
    assert main(["status", str(run.path)]) == 0
    assert "advice: 2 more nodes: learner idle 41% -> about 0%" in capsys.readouterr().out
    assert "2 more nodes" in text_of(render_live(config, seen(), read_recent(run.metrics), []))
