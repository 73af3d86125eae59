"""Transcripts of a run: which samples are kept, what is in them, and that nothing of it can stop the training."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common.config.schema import Config
from common.process.run_dir import RunDir
from common.rollouts import Group, Sample, VersionRun, encode_group
from launch.observe.transcripts import read
from launch.quickstart.assets import build_tokenizer
from learner.batch.batch import BatchStatistics, TrainingBatch
from learner.batch.packing import Document, build
from learner.batch.updates import minibatches
from learner.loop.transcripts import MOST_PLACES, RecordingLoss, choose, items, transcript_thread
from learner.loss.advantages import ADVANTAGES
from learner.loss.types import GroupRewards
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S, until
from tests.unit.learner.conftest import BASE
from tests.unit.learner.loop_fakes import BigramBackend, MakeWorld, World, make_group

# ---------------------------------------------------------------- the choice


def groups(*rewards: list[float], version: int = 0) -> list[Group]:
    made = [make_group(serial, version, len(found)) for serial, found in enumerate(rewards)]
    return [
        Group(g.serial, [msgspec.structs.replace(s, reward=r) for s, r in zip(g.samples, found, strict=True)])
        for g, found in zip(made, rewards, strict=True)
    ]


def length(sample: Sample) -> int:
    return sample.tokens.entries()


def test_the_best_the_worst_and_the_longest_are_kept_whatever_the_share() -> None:
    step = groups([0.5, 2.0], [-1.0, 0.5], [0.5, 0.5])
    longest = max((length(s), -g.serial, -i) for g in step for i, s in enumerate(g.samples))
    chosen = choose(step, 0.0, seed=1)
    assert chosen[0, 1][:1] == ["best"]
    assert "worst" in chosen[1, 0]
    assert "longest" in chosen[-longest[1], -longest[2]]
    assert sorted(why for found in chosen.values() for why in found) == ["best", "longest", "worst"]
    assert choose(step, "none", seed=1) == choose([], 1.0, seed=1) == {}


def test_a_failed_sample_is_the_worst() -> None:
    step = groups([0.5, 2.0], [-1.0, 0.5])
    failed = msgspec.structs.replace(step[0].samples[1], error="no calculator", reward=float("nan"))
    chosen = choose([Group(0, [step[0].samples[0], failed]), step[1]], 0.0, seed=1)
    assert chosen[0, 1][0] == "worst" and chosen[0, 1][-1] == "failed"
    assert all("worst" not in why for where, why in chosen.items() if where != (0, 1))
    only = choose([Group(0, [failed])], 0.0, seed=1)
    assert only == {(0, 0): ["worst", "longest", "failed"]}


def test_the_share_is_drawn_from_seed_serial_and_sample_alone() -> None:
    step = groups(*[[0.0] * 8] * 200)
    drawn = {where for where, why in choose(step, 0.1, seed=1).items() if "share" in why}
    assert 0.05 * 1600 < len(drawn) < 0.15 * 1600
    assert drawn == {where for where, why in choose(step[::-1], 0.1, seed=1).items() if "share" in why}
    half = {where for where, why in choose(step[:100], 0.1, seed=1).items() if "share" in why}
    assert half == {where for where in drawn if where[0] < 100}
    assert drawn != {where for where, why in choose(step, 0.1, seed=2).items() if "share" in why}
    assert len(choose(step, 1.0, seed=1)) == 1600


# ---------------------------------------------------------------- log-probabilities


def test_a_step_collects_no_more_than_there_is_room_for_and_nothing_if_nothing_was_chosen() -> None:
    long = np.zeros(MOST_PLACES // 2, dtype=np.int32)
    documents = [Document(long, np.ones(len(long), dtype=np.uint8), serial=serial, sample=0) for serial in range(3)]
    loss, backend = RecordingLoss(lambda *_: None), BigramBackend()  # type: ignore[arg-type,return-value]
    loss.watch(documents, {(0, 0), (1, 0), (2, 0)})
    (batch,) = build(documents, [[0, 1, 2]])
    loss(torch.zeros(len(batch.targets)), None, batch)
    assert loss.collect(backend).keys() == {(0, 0, 0), (1, 0, 0)}
    asked: list[Any] = []
    backend.largest = lambda values: asked.append(values) or values  # type: ignore[method-assign]
    loss.watch(documents, {})
    loss(torch.zeros(len(batch.targets)), None, batch)
    assert loss.collect(backend) == {} and not asked, "no collective"


def test_tokens_of_a_turn_that_have_expired_have_the_ratio_one_because_nothing_was_computed() -> None:
    group = make_group(0, 0, 1)
    tokens = group.samples[0].tokens.numpy()
    mask = np.zeros(len(tokens), dtype=np.uint8)
    mask[-1] = 1
    behavior = np.full(len(tokens), -2.0, dtype=np.float32)
    document = Document(tokens, mask, behavior, serial=0, sample=0)
    found = {(0, 0, 0): np.where(mask[1:] > 0, np.float32(-1.5), np.float32(0.0))}  # the learner's
    batch = TrainingBatch(0, [document], BatchStatistics())
    (item,) = items(batch, [group], {}, choose([group], 1.0, 0), found)
    ratios = item.training[0].ratios
    assert ratios is not None
    np.testing.assert_allclose(ratios, [1.0] * (len(tokens) - 1) + [np.exp(0.5)], rtol=1e-6)


@pytest.mark.parametrize("critic", [True, False])
def test_a_sample_whose_tokens_have_advantages_of_their_own_from_a_critic_has_none(critic: bool) -> None:
    group = make_group(0, 0, 1)
    tokens = group.samples[0].tokens.numpy()
    rewards = np.zeros(len(tokens), np.float32) if critic else None
    document = Document(tokens, np.ones(len(tokens), np.uint8), serial=0, sample=0, advantage=0.0, rewards=rewards)
    (item,) = items(TrainingBatch(0, [document], BatchStatistics()), [group], {}, choose([group], 1.0, 0), {})
    assert item.training[0].advantage == (None if critic else 0.0)


# ---------------------------------------------------------------- a run


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model folder with the quickstart's tokenizer."""
    build_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def transcribed(make_world: MakeWorld, model: str, share: float = 1.0, **sections: Any) -> World:
    sections = {"run": {"steps": 3}, "model": {"path": model}, "telemetry": {"transcripts": share}} | sections
    return make_world(**sections)


def finish(world: World) -> None:
    assert world.run() == "done"
    world.lead._transcripts.close(LIMIT_S)
    world.lead.close("done", world.trainer.version, "")


@pytest.mark.parametrize("updates", [1, 4])
def test_every_transcript_has_the_texts_advantage_and_ratios_of_its_sample(
    make_world: MakeWorld, model: str, updates: int
) -> None:
    """The ratios are those of the policy that began the step, whatever the number of its updates."""
    several = {"epochs": 2, "minibatches": 2} if updates > 1 else {}
    world = transcribed(make_world, model, rollout={"group_size": 4}, learner=several)
    tables: list[torch.Tensor] = []
    train_step = world.backend.train_step

    def remembering(*arguments: Any) -> Any:
        tables.append(world.backend.table.detach().clone())
        return train_step(*arguments)

    world.backend.train_step = remembering  # type: ignore[method-assign]
    finish(world)
    found = list(read(world.run_dir))
    steps = {entry.serial: entry.step for entry in world.memory.learner().ledger()}
    assert sorted((t.serial, t.sample) for t in found) == [(n, i) for n in range(6) for i in range(4)]
    tokenizer = build_tokenizer()
    for t in found:
        group = make_group(t.serial, 0, 4)
        sample = group.samples[t.sample]
        (advantages,) = ADVANTAGES["grpo"]([GroupRewards.of(np.array([s.reward for s in group.samples]))])
        assert t.advantage == pytest.approx(float(advantages[t.sample]))
        assert (t.step, t.node_id, t.reward) == (steps[t.serial], "fake", sample.reward)
        prompt, said = t.turns
        assert prompt.tokens + said.tokens == sample.tokens.numpy().tolist()
        for turn in t.turns:
            assert turn.text == "".join(turn.pieces) == tokenizer.decode(turn.tokens)
        ids = torch.tensor(sample.tokens.numpy().tolist())
        logprobs = torch.log_softmax(tables[(t.step or 0) * updates], -1)[ids[:-1], ids[1:]]
        np.testing.assert_allclose(said.ratios, np.exp(logprobs[1:].numpy() + 2.0), atol=2e-5)
        assert said.logprobs == [-2.0] * len(said.tokens) and said.trained == [1] * len(said.tokens)
    assert world.lines()[-1].transcripts_dropped_total == 0


def test_a_token_that_staleness_max_updates_leaves_out_of_every_update_is_not_shown_as_trained(
    make_world: MakeWorld, model: str
) -> None:
    """Four updates a version; the first sampled token of each sample is a version older than its others."""
    most, oldest, parts = 8, 3, 2

    def aged(sample: Sample) -> Sample:
        version = sample.version_runs[0].version
        return msgspec.structs.replace(sample, version_runs=[VersionRun(2, version - 1), VersionRun(3, version)])

    bounds = {"staleness": {"max": oldest, "max_updates": most}, "learner": {"epochs": 2, "minibatches": parts}}
    world = transcribed(make_world, model, rollout={"group_size": 4}, lag=1, **bounds)
    world.fleet.spoil = lambda group: encode_group(Group(group.serial, [aged(sample) for sample in group.samples]))
    tables: dict[int, torch.Tensor] = {}
    train_step = world.backend.train_step

    def remembering(*arguments: Any) -> Any:
        tables.setdefault(world.trainer.version, world.backend.table.detach().clone())
        return train_step(*arguments)

    world.backend.train_step = remembering  # type: ignore[method-assign]
    finish(world)
    found = list(read(world.run_dir))
    kinds = set[tuple[bool, bool]]()
    for step in range(3):
        own = [t for t in found if t.step == step]
        ages = {t.serial: step - t.turns[1].version_runs[-1][1] for t in own}
        serials = sorted(serial for serial, age in ages.items() if age <= oldest)  # others have expired
        order = minibatches(serials, parts, seed=world.config.run.seed, step=step, epoch=0)
        first = {serials[n]: update for update, numbers in enumerate(order) for n in numbers}
        for t in own:
            said, age = t.turns[1], ages[t.serial]
            old, young = ((a <= oldest and a * 4 + first.get(t.serial, 0) <= most) for a in (age + 1, age))
            kinds.add((old, young))
            assert said.trained == [int(old)] + [int(young)] * (len(said.tokens) - 1)
            if young:
                ids = torch.tensor(t.turns[0].tokens + said.tokens)
                ratios = (tables[step].log_softmax(-1)[ids[:-1], ids[1:]] + 2.0).exp().numpy()[1:]
                np.testing.assert_allclose(said.ratios, np.where(said.trained, ratios, 1.0), atol=2e-5)
            else:
                assert not said.ratios and t.advantage is None
    assert kinds == {(True, True), (False, True), (False, False)}


def test_a_document_whose_updates_kl_stop_leaves_out_is_not_shown_as_trained(make_world: MakeWorld, model: str) -> None:
    learner = {"epochs": 2, "minibatches": 2, "loss": {"kl_stop": 1e-9}}
    world = transcribed(make_world, model, rollout={"group_size": 4}, learner=learner)
    finish(world)
    found = list(read(world.run_dir))
    lines = world.lines()
    for line in lines:
        shown = [turn.trained for t in found if t.step == line.step for turn in t.turns]
        assert sum(map(sum, shown)) == line.tokens_trained
    assert any(line.tokens_unused for line in lines)


def test_a_filtered_groups_transcript_names_no_step_and_an_expired_one_trained_nothing(
    make_world: MakeWorld, model: str
) -> None:
    world = transcribed(make_world, model, learner={"dynamic_sampling": True})
    finish(world)
    filtered = {entry.serial for entry in world.memory.learner().ledger() if entry.filtered}
    found = list(read(world.run_dir))
    assert filtered and {t.serial for t in found if t.step is None} == filtered
    assert all(t.advantage is None and not any(t.turns[1].trained) for t in found if t.step is None)

    stale = transcribed(make_world, model, learner={"groups_per_step": 1}, staleness={"max": 0}, run={
        "steps": 2, "dir": str(Path(model).parent / "stale"),
    })  # fmt: skip
    stale.fleet.spoil = lambda group: encode_group(make_group(group.serial, -1, 2) if group.serial == 1 else group)
    finish(stale)
    (old,) = (t for t in read(stale.run_dir, task=1) if t.sample == 0)
    assert old.step == 1
    assert not any(old.turns[1].trained) and old.turns[1].version_runs == [(0, -1)]
    assert old.turns[1].logprobs and not old.turns[1].ratios, "the learner has not computed its log-probabilities"


def test_off_keeps_nothing(make_world: MakeWorld, model: str) -> None:
    world = transcribed(make_world, model, share="none")  # type: ignore[arg-type]
    finish(world)
    assert not world.run_dir.transcripts.exists()


def test_without_a_tokenizer_the_run_trains_the_same_and_counts_what_it_dropped(
    make_world: MakeWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make_world().unbroken()
    (tmp_path / "empty").mkdir()
    world = transcribed(make_world, str(tmp_path / "empty"), run={"steps": 4})
    take = world.broker.take
    world.broker.take = lambda *a, **k: (until(settled), take(*a, **k))[1]  # type: ignore[method-assign]

    def settled() -> bool:
        """The thread has counted what the steps so far gave it."""
        return world.lead._transcripts.dropped == 4 * world.trainer.version

    finish(world)
    np.testing.assert_array_equal(world.final_table(), expected)
    assert [line.transcripts_dropped_total for line in world.lines()][-1] >= 12
    assert world.lead._transcripts.dropped == 16
    assert len([r for r in caplog.records if r.name == "common.segments"]) == 1


WRITER = """
import sys
from tests.unit.learner.test_transcripts import write
write(sys.argv[1], sys.argv[2], range(10**9))
"""


def write(run_dir: str, model: str, steps: range) -> None:
    """A transcript of every sample of a group of eight per step."""
    document = BASE | {"run": {"name": "t", "dir": run_dir, "steps": 1}, "model": {"path": model}}
    document |= {"telemetry": {"transcripts": 1.0, "transcripts_mib": 1}}
    writer = transcript_thread(msgspec.convert(document, Config))
    for step in steps:
        group = make_group(step, 0, 8)
        for item in items(TrainingBatch(step, [], BatchStatistics()), [group], {}, choose([group], 1.0, 0), {}):
            writer.put(item)
    writer.close(LIMIT_S)


@pytest.mark.slow
def test_a_killed_writer_leaves_a_folder_that_can_be_read_and_written_on(tmp_path: Path, model: str) -> None:
    run = RunDir(tmp_path / "run")
    command = [sys.executable, "-c", WRITER, str(run.path), model]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL) as writer:
        ended = lambda: writer.poll() is None or pytest.fail("it has ended")  # noqa: E731
        until(lambda: len(list(run.transcripts.glob("*"))) > 2, check=ended)
        writer.send_signal(signal.SIGKILL)
        writer.wait(LIMIT_S)
    found = list(read(run))
    assert len(found) > 100 and all(t.turns[1].text for t in found)
    after = 10**9
    write(str(run.path), model, range(after, after + 1))
    assert [t.sample for t in read(run, step=after)] == list(range(8))[::-1]
    assert len(list(read(run))) == len(found) + 8
    assert sum(path.stat().st_size for path in run.transcripts.iterdir()) <= 1 << 20
