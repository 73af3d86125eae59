"""Watch rules act on a run: warnings, pauses, stops and commands, also over a restart of the learner."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config.observing import WatchRule
from common.config.schema import Config
from common.errors import EXIT_HOPELESS, HopelessError
from common.metrics import EvaluationMetrics
from launch.cli import main, parse
from learner.backend_protocol import StepResult
from learner.loop import watcher as module
from learner.loop.watcher import run_command
from tests.rigs.refusals import refused
from tests.rigs.telemetry import read_line
from tests.rigs.waiting import read_jsonl, until
from tests.unit.learner.loop_fakes import World, world

MakeConfig = Callable[..., Config]


@pytest.fixture
def watched(make_config: MakeConfig) -> Callable[..., World]:
    """A world whose config has these rules."""

    def make(*rules: WatchRule, **sections: Any) -> World:
        config = make_config(**{"run": {"steps": 8}, "staleness": {"max": 1}} | sections)
        return world(msgspec.structs.replace(config, watch=list(rules)))

    return make


def from_step(step: int, **action: Any) -> WatchRule:
    """A rule that acts at `step`, for good."""
    return WatchRule(metric="policy_version", above=step, **action)


def events(made: World, *kinds: str) -> list[dict[str, Any]]:
    return [event["detail"] for event in read_jsonl(made.run_dir.events) if event["kind"] in kinds]


def states(made: World) -> list[dict[str, Any]]:
    return [vars(state) for state in made.lead._watch._states]


# ---------------------------------------------------------------- warn


def test_a_warning_has_value_limit_sentence_groups_and_the_command_that_replays_the_step(watched) -> None:
    made = watched(
        WatchRule(metric="length_max", above=0.0), learner={"checkpoint": {"every": 2, "asynchronous": False}}
    )
    assert made.run() == "done"
    (found,) = events(made, "watch")
    assert (found["rule"], found["step"], found["limit"], found["do"]) == ("watch[0]", 0, 0.0, "warn")
    assert found["value"] == made.lines()[0].length_max == found["groups"][0]["contribution"]
    assert {one["serial"] for one in found["groups"]} == {0, 1}
    assert made.lead.reporter.snapshot().alarms == [found["text"]], "as long as the metric is not well"
    assert made.publisher.holds == set()

    later = watched(from_step(5), run={"dir": f"{made.config.run.dir}-2", "steps": 8})
    later.run()
    replay = events(later, "watch")[0]["replay"].split()
    assert replay == ["slipstream", "replay", str(later.run_dir.path), "--from", "4", "--to", "5"]
    words = parse(replay[1:])
    assert (words.command, words.first, words.last) == ("replay", 4, 5)


def test_a_spike_of_the_gradient_norm_names_the_groups_of_its_step_and_the_replay_of_it(watched) -> None:
    made = watched(
        WatchRule(metric="grad_norm", spikes=10.0),
        run={"steps": 14},
        learner={"checkpoint": {"every": 5, "asynchronous": False}},
    )
    train_step = made.backend.train_step

    def spiking(*arguments: Any) -> StepResult:
        result = train_step(*arguments)
        return dataclasses.replace(result, grad_norm=1e3 if made.trainer.version == 12 else 1.0)

    made.backend.train_step = spiking
    assert made.run() == "done"
    (found,) = events(made, "watch")
    assert (found["metric"], found["step"], found["value"], found["limit"]) == ("grad_norm", 12, 1e3, 10.0)
    trained = {entry.serial for entry in made.broker.ledger() if entry.step == 12}
    assert {one["serial"] for one in found["groups"]} <= trained
    contributions = [one["contribution"] for one in found["groups"]]
    assert contributions and contributions == sorted(contributions, reverse=True)
    assert found["replay"] == f"slipstream replay {made.run_dir.path} --from 10 --to 12"


def test_an_alarm_ends_when_the_metric_is_well_again(watched) -> None:
    made = watched()
    made.run()
    lengths = [line.tokens_trained for line in made.lines()]
    shutil.rmtree(made.run_dir.path)
    largest = max(lengths[:-1])
    rule = WatchRule(metric="tokens_trained", above=largest - 0.5)
    step = lengths.index(largest)
    assert max(lengths) == largest and lengths[step + 1] < largest, "the series of this test"
    made = watched(rule)
    made.run()
    assert events(made, "watch")[0]["step"] == step
    assert events(made, "watch_well")[0] == {"rule": "watch[0]", "step": step + 1}
    assert made.lead.reporter.snapshot().alarms == []


def test_a_full_disk_takes_the_events_and_not_the_training(watched, caplog) -> None:
    made = watched(from_step(2), from_step(3, do="stop"))
    add = made.lead.files.events.add

    def full(kind: str, **detail: object) -> None:
        if kind == "watch":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(kind, **detail)

    made.lead.files.events.add = full
    with refused(HopelessError, "watch[1]"):
        made.run()
    assert events(made, "watch") == []
    assert os.strerror(errno.ENOSPC) in caplog.text


# ---------------------------------------------------------------- pause


def waits(made: World, at: int, then: Callable[[], None]) -> list[str]:
    """Call `then` when the learner has waited for groups `at` times in a row; what it waited for."""
    take, seen = made.broker.take, []

    def patient(*words: Any, **more: Any) -> Any:
        taken = take(*words, **more)
        if taken is not None:
            seen.clear()
        else:
            seen.append(made.lead.reporter.snapshot().waiting_on)
            if len(seen) == at:
                then()
        return taken

    made.broker.take = patient
    return seen


def test_a_pause_trains_what_the_window_allows_then_waits_until_it_is_resumed(watched) -> None:
    made = watched(from_step(2, do="pause"))
    found: dict[str, Any] = {}

    def resume() -> None:
        found.update(steps=made.trainer.version, seen=made.publisher.seen, report=made.lead.reporter.snapshot())
        assert main(["resume", str(made.run_dir.path)]) == 0

    waits(made, 3, resume)
    assert made.run() == "done"
    assert found["seen"] == 3, "the version that was on its way when the rule acted"
    assert found["steps"] == 5, "with version 3 and staleness.max 1 nodes may generate for steps 3 and 4"
    text = events(made, "watch")[0]["text"]
    assert found["report"].paused == text != ""
    assert made.publisher.seen == 7 and made.lead.reporter.snapshot().paused == ""
    assert [e["reason"] for e in events(made, "publishing_paused", "publishing_resumed")] == [text, ""]
    assert [line.step for line in made.lines()] == list(range(8))


def test_a_pause_ends_by_itself_when_the_metric_is_well_again(watched) -> None:
    made = watched()
    made.run()
    lengths = [line.tokens_trained for line in made.lines()]
    shutil.rmtree(made.run_dir.path)
    made = watched(WatchRule(metric="tokens_trained", above=max(lengths) - 0.5, do="pause"))
    step = lengths.index(max(lengths))
    assert step < 7 and lengths[step + 1] < max(lengths), "the series of this test"
    assert made.run() == "done"
    assert len(events(made, "publishing_paused")) == len(events(made, "publishing_resumed")) == 1


def test_a_pause_survives_a_restart_of_the_learner(watched) -> None:
    made = watched(from_step(2, do="pause"), learner={"checkpoint": {"every": 1, "asynchronous": False}})
    made.backend.fail_at = 4
    made.run_killed()
    again = made.restart()
    assert again.publisher.holds == {"watch"}, "before the first version is published"
    waits(again, 2, lambda: main(["resume", str(made.run_dir.path)]))
    assert again.run() == "done"
    assert again.publisher.holds == set()


def held_out(version: int, reward: float) -> EvaluationMetrics:
    return read_line(version, EvaluationMetrics, dataset="held-out", mean_reward=reward)


def test_a_pause_for_an_evaluation_of_the_newest_version_can_be_resumed_and_a_later_one_pauses_again(watched) -> None:
    made = watched(
        WatchRule(metric="evaluation/held-out/mean_reward", below=0.5, do="pause"),
        WatchRule(metric="reward_mean", below=-1.0, do="pause"),
    )
    made.trainer.run()
    watch, last = made.lead._watch, made.lines()[-1]
    line = held_out(made.trainer.version, 0.25)
    made.lead.files.record(line)
    assert line.step == last.step + 1 and "mean_reward" in watch.paused and "0.25" in watch.paused
    assert main(["resume", str(made.run_dir.path)]) == 0
    watch.turn()
    assert watch.paused == ""
    watch.see(msgspec.structs.replace(last, step=last.step + 1, reward_mean=-2.0))
    assert "reward_mean" in watch.paused and "-2" in watch.paused, "that step came after the answer"
    watch.see(msgspec.structs.replace(last, step=last.step + 2))
    for version, reward in ((9, 0.75), (10, 0.25)):
        watch.see(held_out(version, reward))
    assert "step 10" in watch.paused


# ---------------------------------------------------------------- stop


def test_a_stop_writes_a_checkpoint_and_only_a_resumed_run_continues(watched, capsys) -> None:
    made = watched(from_step(2, do="stop"), learner={"checkpoint": {"every": 100}})
    run = made.run_dir.path
    with refused(HopelessError, "watch[0]", "policy_version", "step 2", f"`slipstream resume {run}`") as stopped:
        made.run()
    assert events(made, "watch")[0]["text"] in str(stopped.value)
    assert stopped.value.exit_code == EXIT_HOPELESS, "so that nothing starts it again at once"
    assert list(made.lead.files.checkpoints.steps()) == [3]
    assert made.broker.commits[-1][0] == 2

    with refused(HopelessError, "watch[0]"):
        made.restart().run()
    assert len(made.lines()) == 3, "it refused to train"
    assert main(["resume", str(run)]) == 0
    assert "step 2" in capsys.readouterr().out
    again = made.restart()
    assert again.run() == "done"
    assert [line.step for line in again.lines()] == list(range(8))


def test_a_rule_that_was_removed_no_longer_stops_the_run(watched) -> None:
    made = watched(from_step(2, do="stop"))
    with pytest.raises(HopelessError):
        made.run()
    config = msgspec.structs.replace(made.config, watch=[])
    assert world(config, made.memory).run() == "done"


@pytest.mark.slow
def test_a_learner_killed_anywhere_has_the_memory_of_one_that_never_was(watched) -> None:
    rules = [
        WatchRule(metric="reward_mean", below=0.5, steps=2),
        WatchRule(metric="tokens_trained", drops=0.1, steps=2),
        WatchRule(metric="tokens_trained", spikes=1.01),
        WatchRule(metric="loss", above=0.0),
    ]
    sections: dict[str, Any] = {"run": {"steps": 16}}
    never = watched(*rules, **sections)
    never.run()
    acted = {(e["rule"], e["step"]) for e in events(never, "watch")}
    assert len({rule for rule, _ in acted}) >= 3
    expected = states(never)
    for fail_at in (1, 7, 12):
        shutil.rmtree(never.run_dir.path)
        made = watched(*rules, **sections)
        made.backend.fail_at = fail_at
        made.run_killed()
        again = made.restart()
        again.run()
        assert states(again) == expected
        assert {(e["rule"], e["step"]) for e in events(again, "watch")} == acted


# ---------------------------------------------------------------- run


def test_a_command_gets_the_facts_and_its_output_is_in_the_log(watched, tmp_path: Path) -> None:
    words = ["sh", "-c", f"cat > {tmp_path}/told; echo $SLIPSTREAM_WATCH_RULE at $SLIPSTREAM_WATCH_STEP >&2; exit 7"]
    made = watched(from_step(2, do="run", command=words))
    made.run_dir.logs.mkdir()
    assert made.run() == "done"
    made.lead._watch.close()
    told = json.loads((tmp_path / "told").read_text())
    (event,) = events(made, "watch")
    assert told == {key: event[key] for key in told if key != "run"} | {"run": str(made.run_dir.path)}
    assert {"rule", "metric", "step", "value", "limit", "do", "text"} <= told.keys()
    log = (made.run_dir.logs / "watch.log").read_text()
    assert log.startswith(f"{event['text']}: {words}: exit code 7\n") and log.endswith("watch[0] at 2\n")
    (ended,) = events(made, "watch_command")
    assert (ended["rule"], ended["step"], ended["exit_code"]) == ("watch[0]", 2, 7)


def test_a_command_that_takes_too_long_is_killed_with_what_it_started_and_blocks_no_step(watched, tmp_path) -> None:
    words = ["sh", "-c", f"sleep 3000 & echo $! > {tmp_path}/pid; sleep 3000"]
    made = watched(from_step(0, do="run", command=words, timeout_s=1.0), run={"steps": 3})
    made.run_dir.logs.mkdir()
    assert made.run() == "done", "while it runs"
    until(lambda: events(made, "watch_command"))
    assert events(made, "watch_command")[0]["exit_code"] in (137, -9)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_one_command_of_a_rule_runs_at_a_time(watched, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    words = ["sh", "-c", f"cat {tmp_path}/gate"]
    made = watched(WatchRule(metric="reward_mean", below=0.0, do="run", command=words))
    made.run_dir.logs.mkdir()
    made.trainer.run()
    line, watch = made.lines()[0], made.lead._watch
    for step, reward in enumerate((-1.0, 1.0, -1.0, 1.0)):
        watch.see(msgspec.structs.replace(line, step=step, reward_mean=reward))
    assert [e["step"] for e in events(made, "watch")] == [0, 2]
    assert [(e["rule"], e["step"]) for e in events(made, "watch_command_skipped")] == [("watch[0]", 2)]
    (tmp_path / "gate").write_text("opened")
    watch.close()
    watch.see(msgspec.structs.replace(line, step=4, reward_mean=-1.0))
    (tmp_path / "gate").write_text("opened")
    watch.close()
    assert [e["step"] for e in events(made, "watch_command")] == [0, 4]


def test_a_command_that_does_not_exist_or_talks_too_much_costs_a_line_of_the_log(watched, caplog, tmp_path) -> None:
    made = watched(
        from_step(1, do="run", command=["/no/such/command"]),
        from_step(1, do="run", command=["sh", "-c", "yes | head -c 1000000"]),
    )
    made.run_dir.logs.mkdir()
    assert made.run() == "done"
    made.lead._watch.close()
    ended = {e["rule"]: e["exit_code"] for e in events(made, "watch_command")}
    assert ended == {"watch[0]": 127, "watch[1]": 0}
    assert "/no/such/command" in (made.run_dir.logs / "watch.log").read_text()
    made.run_dir.logs.rename(tmp_path / "away")
    run_command(made.config.watch[1], made.lead._watch._states[1].firing, made.run_dir)
    assert os.strerror(errno.ENOENT) in caplog.text, "a log that cannot be written raises nothing"
    made.run_dir.logs.mkdir()
    (tmp_path / "away" / "watch.log").rename(made.run_dir.logs / "watch.log")
    assert (made.run_dir.logs / "watch.log").stat().st_size < 70_000


def test_a_process_that_a_command_leaves_behind_is_not_waited_for(watched, tmp_path: Path) -> None:
    words = ["sh", "-c", f"sleep 3000 & echo $! > {tmp_path}/pid; echo told"]
    made = watched(from_step(0, do="run", command=words, timeout_s=0.5), run={"steps": 1})
    made.run_dir.logs.mkdir()
    try:
        made.run()
        until(lambda: events(made, "watch_command"))
        assert (made.run_dir.logs / "watch.log").read_text().endswith("exit code 0\ntold\n")
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_the_end_of_a_learner_waits_for_all_commands_together(watched, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "LAST_COMMANDS_S", 0.5)
    made = watched(*[from_step(0, do="run", command=["sleep", "9"], timeout_s=10.0)] * 6, run={"steps": 1})
    made.run_dir.logs.mkdir()
    made.trainer.run()
    began = time.monotonic()
    made.lead._watch.close()
    assert time.monotonic() - began < 2.5, "six times the wait would be 3 s"
