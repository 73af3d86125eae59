"""`slipstream replay`: refusals, plan, preloaded broker and words; tests/integration/learner/test_replay.py runs it."""

import json
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from broker.contract import LearnerReport, RunInfo
from broker.delivery.task_table import Entry
from broker.journal.file_store import open_file_store
from broker.journal.recording import Recording, open_recording, preloaded
from common.config.loading import build_config, load_config
from common.config.observing import WatchRule
from common.config.schema import Config
from common.errors import SlipstreamError, UsageError
from common.metrics import StepMetrics
from common.process.run_dir import RunDir
from common.rollouts import GroupMeta, Task
from common.waits import WaitFor, WaitKind
from launch.cli import main
from launch.results.replay import ReplayedStep, check_progress, compare, line, plan_replay, summary
from learner.checkpoint.folder import read_checkpoint
from tests.rigs.brokers import MemoryLearner
from tests.rigs.configs import job_of, refusal, write_checkpoint
from tests.rigs.refusals import refused

RUN_INFO = RunInfo("demo", "/runs/demo", 2, 1, 3, 60.0, 1 << 20)


class Payload:
    """As a payload in a store; MemoryLearner hands it on."""

    def read(self) -> bytes:
        return b""


def group(serial: int, filtered: bool = False) -> Entry:
    meta = GroupMeta(0, 0, 0.5, 8)
    return Entry(Task(serial, b"{}", serial, 2), nodes=["node-0"], meta=meta, filtered=filtered, stored=Payload())


def recording(*steps: int) -> Recording:
    return Recording("a-store", 40, {step: [group(2 * step), group(2 * step + 1)] for step in steps})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    sections = {
        "model": {"verify": False},
        "learner": {"groups_per_step": 2},
        "broker": {"address": "ipc:///somewhere"},
    }
    return job_of(tmp_path, run={"steps": 100}, **sections)


@pytest.fixture
def run(run: RunDir) -> RunDir:
    for step in (3, 6):
        write_checkpoint(run, step)
    return run


# ---------------------------------------------------------------- the plan


def test_from_a_checkpoint_to_the_last_step_that_follows_without_a_gap(run: RunDir, config: Config) -> None:
    plan = plan_replay(run, config, recording(2, 3, 4, 5, 7), 3, None, None, [])
    assert (list(plan.steps), plan.checkpoint) == ([3, 4, 5], run.checkpoints / "step-000003")
    assert plan.run.path == run.path / "replays/1"
    plan.run.path.mkdir(parents=True)
    again = plan_replay(run, config, recording(2, 3, 4, 5, 7), 3, 4, None, [])
    assert (list(again.steps), again.run.path.name) == ([3, 4], "2")
    start = plan_replay(run, config, recording(0, 1), 0, None, None, [])
    assert (list(start.steps), start.checkpoint) == ([0, 1], None)


def test_the_config_computes_the_same_and_serves_nobody(run: RunDir, config: Config, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    config = msgspec.structs.replace(config, watch=[WatchRule(metric="loss", above=0.0, do="run", command=["page"])])
    plan = plan_replay(run, config, recording(3, 4), 3, None, str(out), ["learner.optimizer.lr=0.5"])
    found = plan.config
    assert found.watch == [], "the steps that made a rule act are to be trained"
    assert (found.run.dir, found.run.steps, found.learner.optimizer.lr) == (str(out), 5, 0.5)
    assert found.learner.optimizer.decay_steps == 100  # the schedule ended with run.steps
    assert (found.broker.address, found.weights.canary_every) == ("tcp://127.0.0.1:0", 0)
    assert not out.exists(), "nothing is written before everything is checked"
    plan.run.prepare(found)
    assert load_config(plan.run.config) == found


@pytest.mark.parametrize("last", [40, 9])
def test_with_a_critic_both_schedules_end_as_in_the_run_also_in_a_replay_of_the_warm_up(
    run: RunDir, config: Config, last: int
) -> None:
    critic = {"warmup_steps": 20, "optimizer": {"schedule": "cosine"}}
    words = [f"learner.critic={json.dumps(critic)}", "learner.loss.advantage=gae", "learner.epochs=2"]
    config = build_config(msgspec.to_builtins(config), "job.yaml", words)
    found = plan_replay(run, config, recording(*range(last + 1)), 0, None, None, []).config
    assert found.run.steps == last + 1 and found.learner.critic is not None
    assert (found.learner.optimizer.decay_steps, found.learner.critic.optimizer.decay_steps) == (160, 200)


def test_the_schedule_ends_where_it_did_when_the_steps_were_trained(
    run: RunDir, config: Config, tmp_path: Path, capsys
) -> None:
    """The run had 10 steps until step 3, 50 until its newest checkpoint, and has 100 now."""

    def written(ends: dict[int, tuple[int, int]]) -> None:
        for step in (3, 6):
            state = read_checkpoint(run.checkpoints / f"step-00000{step}")
            known = {first: end for first, end in ends.items() if first < step}
            path = run.checkpoints / f"step-00000{step}/trainer.json"
            path.write_bytes(msgspec.json.encode(msgspec.structs.replace(state, schedule_ends=known)))

    def end(first: int, last: int) -> int:
        plan = plan_replay(run, config, recording(*range(9)), first, last, str(tmp_path / "out"), [])
        return plan.config.learner.optimizer.decay_steps

    written({0: (10, 0), 3: (50, 0)})
    assert (end(0, 2), end(3, 5), end(6, 8)) == (10, 50, 100)
    assert capsys.readouterr().out == ""
    assert end(0, 5) == 10
    assert "from step 3 on" in capsys.readouterr().out
    written({3: (100, 0)})
    assert (end(0, 2), end(3, 8)) == (100, 100), "nothing is known of the steps of an earlier release"
    assert capsys.readouterr().out == ""


def test_a_missing_or_a_torn_checkpoint_and_a_folder_in_use_are_refused(
    run: RunDir, config: Config, tmp_path: Path
) -> None:
    with refused(UsageError, "--from 4: ", "steps 3, 6"):
        plan_replay(run, config, recording(3, 4, 5), 4, None, None, [])
    with refused(UsageError, "--from 4: ", "has none"):
        plan_replay(RunDir(tmp_path / "other"), config, recording(4), 4, None, None, [])
    with refused(UsageError, f"--out {run.path}: expected"):
        plan_replay(run, config, recording(0), 0, None, str(run.path), [])
    (run.checkpoints / "step-000003" / "trainer.json").unlink()
    with refused(SlipstreamError, "step-000003", "trainer.json"):
        plan_replay(run, config, recording(3, 4), 3, None, None, [])


def test_a_folder_that_cannot_be_written_is_refused(run: RunDir, config: Config, monkeypatch, capsys) -> None:
    run.prepare(config)
    monkeypatch.setattr("launch.results.replay.open_recording", lambda *_: nullcontext(recording(0)))
    assert str(run.config / "out") in refusal(capsys, "replay", str(run.path), "--out", str(run.config / "out"))


def test_steps_that_are_not_retained_are_named_with_those_that_are(run: RunDir, config: Config) -> None:
    kept = recording(*range(5, 21))
    with refused(UsageError, "step 0", "steps 5 to 20", "broker.retain_steps: 16", "--from 6"):
        plan_replay(run, config, kept, 0, None, None, [])
    with refused(UsageError, "step 21", "retained"):
        plan_replay(run, config, kept, 6, 30, None, [])
    with refused(UsageError, "--to 5: expected", "from 6"):
        plan_replay(run, config, kept, 6, 5, None, [])
    with refused(UsageError, "step 0", "no step"):
        plan_replay(run, config, recording(), 0, None, None, [])


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("run.steps=3", "--to STEP"),
        ("run.dir=x", "--out DIR"),
        ("broker.address=tcp://127.0.0.1:1", "broker"),
        ("tasks.shuffle=false", "tasks"),
        ("learner.groups_per_step=4", "groups"),
        ("rollout.group_size=4", "samples"),
    ],
)
def test_what_the_recording_fixes_cannot_be_overridden(run: RunDir, config: Config, word: str, instead: str) -> None:
    with refused(UsageError, f"override {word.partition('=')[0]}: ", instead):
        plan_replay(run, config, recording(0), 0, None, None, [word])


def test_a_run_that_works_or_never_had_a_store_is_not_replayed(run: RunDir, config: Config, capsys) -> None:
    with refused(UsageError, f"{run.store}: expected", "broker.durability"), open_recording(run, config):
        raise AssertionError("there is nothing to open")
    assert not run.store.exists()
    store = open_file_store(run.store, "demo")
    assert main(["replay", str(run.path)]) == 2
    assert "is running:" in capsys.readouterr().err
    store.close()
    assert main(["replay", str(run.path)]) == 2
    assert "no step" in capsys.readouterr().err


def test_the_preloaded_broker_hands_out_the_recorded_steps_in_their_order() -> None:
    taken = Recording("a-store", 9, {4: [group(7), group(3, filtered=True), group(8)], 5: [group(5), group(6)]})
    state = preloaded(RUN_INFO, taken, [4, 5])
    learner = MemoryLearner(state)
    attached = learner.attach(LearnerReport(1, 0, "starting", 4, step=4))
    assert (attached.next_serial, attached.store_id, attached.committed_step) == (9, "a-store", 3)
    assert learner.status().steps_taken == 2
    assert [g.serial for g in learner.take(4, 2, 0.0) or []] == [7, 3, 8]
    learner.filter(4, [3], 8)
    assert [g.serial for g in learner.take(4, 2, 0.0) or []] == [7, 3, 8]
    assert [(g.serial, g.node_id) for g in learner.take(5, 2, 0.0) or []] == [(5, "node-0"), (6, "node-0")]
    assert learner.take(6, 2, 0.0) is None
    learner.commit(5)
    found = {entry.serial: entry.filtered for entry in learner.ledger()}
    assert found == {3: True, **dict.fromkeys((5, 6, 7, 8), False)}


def test_a_learner_that_waits_for_groups_nobody_makes_is_told_so() -> None:
    report = LearnerReport(1, 0, "waiting", 7, WaitFor(WaitKind.GROUPS, version=7, of=1), 61.0, step=7)
    for fine in (None, msgspec.structs.replace(report, since_s=5.0), msgspec.structs.replace(report, state="training")):
        check_progress(fine)
    with refused(UsageError, "step 7 waits"):
        check_progress(report)


# ---------------------------------------------------------------- the comparison


def metrics(step: int, loss: float, grad_norm: float = 1.5) -> StepMetrics:
    required = {
        field.encode_name: 0
        for field in msgspec.structs.fields(StepMetrics)
        if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
    }
    return msgspec.convert({**required, "step": step, "loss": loss, "grad_norm": grad_norm}, StepMetrics)


def test_steps_are_compared_bit_for_bit() -> None:
    nan = float("nan")
    same = compare(metrics(3, 0.1), metrics(3, 0.1))
    assert same.equal
    assert line(same) == "step     3  loss 0.1 =  grad_norm 1.5 =  reward_mean 0 ="
    assert compare(metrics(3, nan), metrics(3, nan)).equal
    other = compare(metrics(4, 0.1), metrics(4, 0.1 + 2**-50))
    assert not other.equal
    assert "loss 0.1 -> 0.1 (+8.88e-16)" in line(other)
    new = compare(None, metrics(5, 0.1))
    assert not new.equal
    assert "loss 0.1 (the run has none)" in line(new)
    assert summary([same, same]) == "all 2 steps equal the run's, bit for bit"
    differs = "1 of 2 steps equal the run's; the first that differs: step     4  loss"
    assert summary([same, other, new]).startswith(differs)
    assert summary([new]) == "1 steps replayed; the run has no metrics of them"
    assert msgspec.json.decode(msgspec.json.encode(other), type=ReplayedStep) == other
