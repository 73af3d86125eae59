"""status and ledger: from a living broker, from the files that a run left behind, and over several brokers."""

import msgspec
import pytest

from broker.contract import JoinTimes, LedgerEntry, NodeReport
from broker.delivery.learner_rules import LearnerRules
from common.errors import EXIT_FAILED
from common.process.lock_file import take_lock
from common.process.run_dir import BrokerFile, RunDir, write_json
from common.run_reader import read_recent
from launch.cli import main
from launch.observe.job_view import plain_line, render_live, render_status
from launch.observe.ledger import observe_ledger, show, whole_ledger
from launch.observe.observation import Observation, as_json, failed_samples, outcome_of
from launch.resolve_target import Target
from tests.rigs.brokers import DurableRig
from tests.rigs.configs import LEARNER, json_of, living_broker, node_status, status_of, text_of, write_broker

LEDGER = [
    LedgerEntry(0, "committed", 1, ["node-0"], 0, 0, 0, 0.25),
    LedgerEntry(1, "leased", 2, ["node-0", "node-1"], None, None, None, None, "lease expired"),
]
TIMES = JoinTimes(1000.0, registered=2.0, engine=11.4, staged=11.6, active=11.7, leased=11.75, delivered=12.35)
SENTENCE = "joined in 12.35 s: engine 11.40, weights 0.30, lease 0.05, first group 0.60"


@pytest.fixture
def ended(run):
    """A run whose broker is gone."""
    write_json(run.status_json, status_of(node_status()))
    write_json(run.ledger_json, LEDGER)
    return run


def test_status_json_has_the_keys_that_programs_rely_on(ended, capsys):
    found = json_of(capsys, "status", str(ended.path))
    learner = {"pid": 11, "state": "waiting", "policy_version": 7, "waiting_on": LEARNER.waiting_on, "since_s": 2.5}
    assert learner.items() <= found["learner"].items()
    broker = {"pid": 10, "address": "tcp://127.0.0.1:5", "groups_ready": 1, "groups_leased": 2}
    assert broker.items() <= found["broker"].items()
    (node,) = found["nodes"]
    expected = {"id": "node-0", "pid": 12, "state": "generating", "policy_version": 6, "leases": 2}
    assert expected.items() <= node.items()
    assert found["live"] is False
    assert "broker has ended" in found["note"]
    write_broker(ended, pid=2147483000)
    assert "broker 2147483000" in json_of(capsys, "status", str(ended.path))["note"], "it was killed"


def test_learners_and_nodes_that_are_not_there_are_told_from_living_ones(run):
    absent = as_json(run, Observation(status_of(learner=None), live=True))["learner"]
    assert absent.items() >= {"pid": None, "state": "absent"}.items()
    found = as_json(run, Observation(status_of(node_status(alive=False), learner_last_seen_s=45.0), live=True))
    assert (found["learner"]["state"], found["learner"]["since_s"]) == ("silent", 47.5)
    assert found["nodes"][0]["state"] == "gone"


def test_the_ledger_and_the_view_of_an_ended_run(ended, capsys):
    first, second = json_of(capsys, "ledger", str(ended.path))
    expected = {
        "serial": 0, "state": "committed", "attempts": 1, "nodes": ["node-0"], "step": 0,
        "version_min": 0, "version_max": 0, "reward_mean": 0.25,
    }  # fmt: skip
    assert expected.items() <= first.items()
    assert (second["step"], second["nodes"], second["reason"]) == (None, ["node-0", "node-1"], "lease expired")
    assert main(["ledger", str(ended.path)]) == 0
    assert "2 tasks: 1 committed, 1 leased; 1 with more than one attempt" in capsys.readouterr().out
    assert main(["top", "--plain", str(ended.path)]) == 0
    assert "last known" in capsys.readouterr().out, "the view ends with the job"


@pytest.mark.parametrize("command", ["status", "ledger", "top"])
def test_run_without_a_broker_so_far_fails_with_the_reason(run, capsys, command):
    assert main([command, str(run.path)]) == EXIT_FAILED
    assert "no broker has run here yet" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "ledger"])
def test_files_with_bytes_that_are_no_text_fail_with_the_reason(run, capsys, command):
    run.broker_json.write_bytes(b'{"pid": 1, "address": "\xff", "started_s": 1}')
    run.status_json.write_bytes(b'{"pid": 1, "address": "\xff"}')
    run.ledger_json.write_bytes(b'[{"serial": 1, "state": "\xff"}]')
    assert main([command, str(run.path)]) == EXIT_FAILED
    assert str(run.path) in capsys.readouterr().err


def test_living_broker_is_asked(config, run, capsys):
    with living_broker(config) as server:
        found = json_of(capsys, "status", str(run.path))
        assert (found["live"], found["learner"]["state"]) == (True, "absent")
        assert found["broker"]["address"] == server.address
        assert json_of(capsys, "ledger", str(run.path)) == []


def test_a_learner_that_up_has_started_is_starting_and_nobody_is_told_to_start_one(config, run, capsys):
    with living_broker(config), take_lock(run.path / "up.lock"):
        found = json_of(capsys, "status", str(run.path))
        assert (found["learner"]["state"], found["stalls"]) == ("starting", [])
        assert main(["status", str(run.path)]) == 0
        assert "RUN/logs/learner-0.log" in capsys.readouterr().out
    with living_broker(config):
        assert [stall["kind"] for stall in json_of(capsys, "status", str(run.path))["stalls"]] == ["no_learner"]


def test_tasks_that_were_given_up_are_told_while_a_job_runs_and_after_it(config, run):
    status = status_of(node_status(), groups_dead=3)
    said = "3 tasks given up, every try failed: `slipstream ledger RUN` says why"
    tail = read_recent(run.metrics)
    seen = Observation(status, live=True)
    assert said in text_of(render_status(run, seen))
    assert said in text_of(render_live(config, seen, tail, []))
    assert said in plain_line(config, seen, tail)
    assert said not in outcome_of(run, config, tail).words()
    write_json(run.status_json, status)
    assert said in outcome_of(run, config, tail).words()


def test_a_narrow_terminal_still_shows_the_state_of_each_task(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show([LedgerEntry(1, "dead", 3, ["node-0"] * 3, None, None, None, None, "every sample failed: " + "long " * 40)])
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["1", "dead"]


def test_a_long_ledger_is_printed_in_plain_lines_at_once(capsys, monkeypatch):
    def entry(serial: int) -> LedgerEntry:
        return LedgerEntry(serial, "committed", 2, ["node-0"] * 2, serial // 8, 3, 4, 0.5)

    monkeypatch.setenv("COLUMNS", "200")
    show([entry(serial) for serial in range(995, 1001)])
    laid_out = capsys.readouterr().out.splitlines()
    monkeypatch.setattr("launch.observe.ledger.Table", lambda **options: pytest.fail("a table of so many rows"))
    show([entry(serial) for serial in range(1001)])
    plain = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in plain[-7:-1]] == [line.rstrip() for line in laid_out[1:-1]]
    assert plain[0].split() == laid_out[0].split()
    assert plain[-1] == "1001 tasks: 1001 committed; 1001 with more than one attempt"


def test_a_reason_in_the_words_of_a_model_is_shown_and_never_obeyed(capsys, monkeypatch):
    hostile = "invalid answer '[/think]' [up] list[int]\x1b]0;owned\x07\x1b[2J\u202e"
    entry = LedgerEntry(7, hostile, 1, [hostile], None, None, None, None, hostile, source=hostile)
    monkeypatch.setenv("COLUMNS", "1000")
    for laid_out in (True, False):
        monkeypatch.setattr("launch.observe.ledger.MOST_LAID_OUT", int(laid_out))
        show([entry])
        shown = capsys.readouterr().out
        assert shown.count(r"invalid answer '[/think]' [up] list[int]\x1b]0;owned\x07\x1b[2J\u202e") == 5
        assert all(line.isprintable() for line in shown.split("\n"))


def test_a_broker_of_another_machine_is_asked_though_its_process_is_not_seen_here(config, run, capsys):
    with living_broker(config) as server:
        write_json(run.broker_json, BrokerFile(2147483000, server.address, 0.0, host="elsewhere"))
        assert json_of(capsys, "status", str(run.path))["live"]


def test_the_ledger_after_the_death_of_a_broker_is_that_of_its_store(config, run, capsys):
    """RUN/ledger.json is some seconds old then: it still has the last step as taken."""
    with DurableRig(run.store) as rig:
        rig.begin()
        rig.offer(2)
        for lease in rig.lease(2):
            rig.complete(lease)
        LearnerRules(rig.state).take(0, 2)
        write_json(run.ledger_json, rig.state.ledger())
        write_broker(run, pid=2147483000)
        LearnerRules(rig.state).commit(0)
        rig.settle()
        assert [entry["state"] for entry in json_of(capsys, "ledger", str(run.path))] == ["committed"] * 2
    for segment in run.store.glob("0*.log"):
        segment.write_bytes(b"damaged" + segment.read_bytes()[7:])
    assert [entry["state"] for entry in json_of(capsys, "ledger", str(run.path))] == ["taken"] * 2, "better than none"


def test_failed_samples_are_summed_by_reason(run):
    counts = {"timeout": 3, "environment_flood": 1}, {"timeout": 9}, {}
    found = status_of(*(node_status(f"node-{i}", samples_failed=failed) for i, failed in enumerate(counts)))
    assert failed_samples(found, None) == {"environment_flood": 1, "timeout": 12}
    told = as_json(run, Observation(found, live=True))
    assert told["samples_failed"] == {"environment_flood": 1, "timeout": 12}
    assert told["nodes"][1]["samples_failed"] == {"timeout": 9}
    # without nodes they are those of the groups that were trained on
    failed = {"timeout": 3}, {"environment_error": 2, "timeout": 1}
    lines = [{"step": i, "policy_version": i + 1, "samples_failed_by_reason": f} for i, f in enumerate(failed)]
    run.metrics.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    tail = read_recent(run.metrics)
    assert failed_samples(status_of(), tail) == {"environment_error": 2, "timeout": 4}
    assert "6 samples failed" in text_of(render_status(run, Observation(status_of(), live=True), tail=tail))
    assert failed_samples(status_of(node_status()), tail) == {}, "the nodes that are there have had none"


def test_the_join_of_the_newest_living_node_that_works_is_told_by_stages(run):
    assert TIMES.sentence == SENTENCE
    assert msgspec.structs.replace(TIMES, delivered=0.0).sentence == "", "before the first group"
    assert status_of(node_status("a", joined=JoinTimes(1000.0, engine=3.0))).newest_join == ""
    later = msgspec.structs.replace(TIMES, started_s=2000.0)
    nodes = [node_status("a", joined=TIMES), node_status("b", joined=later)]
    nodes += [node_status("c", joined=JoinTimes(3000.0)), node_status("d", alive=False, joined=later)]
    assert status_of(*nodes).newest_join == f"b {SENTENCE}"
    seen = Observation(status_of(*nodes), live=True)
    assert f"newest node: b {SENTENCE}" in text_of(render_status(run, seen))
    assert as_json(run, seen)["nodes"][0]["joined"]["active"] == 11.7


@pytest.mark.parametrize(("name", "without"), [("joined", JoinTimes()), ("samples_failed", {})])
def test_a_report_of_an_earlier_release_still_decodes(name, without):
    report = node_status(joined=TIMES, samples_failed={"timeout": 3}).report
    older = {key: value for key, value in msgspec.to_builtins(report).items() if key != name}
    assert getattr(msgspec.convert(older, NodeReport), name) == without


# ---------------------------------------------------------------- brokers one after another


def entry(serial: int, state: str, step: int | None) -> LedgerEntry:
    return LedgerEntry(serial, state, 1, ["n"], step, 0, 0, 0.5)


STOPPED = [entry(0, "committed", 0), entry(1, "taken", 1), entry(2, "taken", 2), entry(3, "ready", None)]


def test_every_step_stands_once_with_the_groups_that_lasted(tmp_path) -> None:
    assert whole_ledger([], STOPPED) == STOPPED, "one broker alone"
    newest = [entry(0, "committed", 2), entry(1, "pending", None)]
    found = whole_ledger([STOPPED], newest)
    assert [(e.serial, e.state, e.step) for e in found] == [
        (0, "committed", 0),
        (1, "committed", 1),  # the next learner started behind it, so its checkpoint was durable
        (4, "committed", 2),  # step 2 was trained again: the first try is no part of the record
        (5, "pending", None),
    ]
    # a learner that starts further back repeats the steps between
    found = whole_ledger([STOPPED, [entry(0, "taken", 2)]], [entry(0, "committed", 1), entry(1, "committed", 2)])
    assert [(e.serial, e.step) for e in found] == [(0, 0), (5, 1), (6, 2)]
    # before a learner continues, former steps stay as they were left
    found = whole_ledger([STOPPED], [entry(0, "leased", None)])
    assert [(e.serial, e.state) for e in found] == [(0, "committed"), (1, "taken"), (2, "taken"), (4, "leased")]
    write_json(tmp_path / "ledger-1.json", STOPPED)
    write_json(tmp_path / "ledger.json", [entry(0, "committed", 2)])
    found = observe_ledger(Target(RunDir(tmp_path)))
    assert [(e.serial, e.step) for e in found] == [(0, 0), (1, 1), (4, 2)], "the ledgers of all brokers of a run"
