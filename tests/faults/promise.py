"""The promise, checked from what a run left behind: each group in one committed step, nothing lost or skipped."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from broker.contract import LedgerEntry
from tests.faults.options import GROUP_SIZE, GROUPS_PER_STEP, PROMPTS, Checkpoint, Trained


def trained_lines(run_dir: Path) -> list[Trained]:
    """learner.jsonl so far."""
    path = run_dir / "learner.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # without what is being written now
    return [msgspec.json.decode(line, type=Trained) for line in lines]


def check_promise(run_dir: Path, ledger: Sequence[LedgerEntry], poisoned: int | None = None) -> None:
    """Compare the ledger with the learner's last checkpoint; AssertionError says what is broken.

    Args:
        run_dir: the folder of a run whose learner has drained: every step that it trained is committed.
        ledger: the broker's.
        poisoned: the last one of so many prompts always fails.
    """
    durable = Checkpoint.load(run_dir)
    steps = [[group[0] for group in step] for step in durable.trained]
    serials = [serial for step in steps[durable.first :] for serial in step]
    assert durable.step == len(steps), "a checkpoint holds every step up to its own"
    assert [len(step) for step in steps] == [GROUPS_PER_STEP] * len(steps), "every step was full"
    assert len(set(serials)) == len(serials), "no group is trained by two steps"
    known = enumerate(steps[durable.first :], durable.first)
    _check_ledger(ledger, {serial: step for step, groups in known for serial in groups})
    _check_samples(durable)
    _check_prompts(durable, ledger, poisoned)
    _check_replays(trained_lines(run_dir), durable)


def _check_ledger(ledger: Sequence[LedgerEntry], in_steps: dict[int, int]) -> None:
    assert [e.serial for e in ledger] == list(range(len(ledger))), "every task is in the ledger, once"
    committed = {e.serial: e.step for e in ledger if e.state == "committed"}
    assert committed == in_steps, "the ledger says what the learner's checkpoint says"
    assert all(e.reason for e in ledger if e.state == "dead"), "a dead task says why"
    left = [e for e in ledger if e.state not in ("committed", "dead")]
    assert {e.state for e in left} <= {"pending", "leased", "ready"}, "nothing is taken and not committed"
    assert all(e.nodes for e in ledger if e.state == "committed")


def _check_samples(durable: Checkpoint) -> None:
    """A sample's marks name its prompt, the process that made it and the number of the episode there."""
    marks = [mark for step in durable.trained for group in step for mark in group[2:]]
    assert len(set(marks)) == len(marks), "no sample is trained twice"
    for step in durable.trained:
        for _, position, *samples in step:
            assert len(samples) == GROUP_SIZE
            assert {mark.split("-")[0] for mark in samples} == {str(position % PROMPTS)}, "a group is of its own prompt"


def _check_prompts(durable: Checkpoint, ledger: Sequence[LedgerEntry], poisoned: int | None) -> None:
    trained = [group[1] for step in durable.trained for group in step]
    outstanding = list(durable.stream.outstanding.values())
    assert sorted([*trained, *outstanding, *durable.stream.backlog]) == list(range(durable.stream.cursor)), (
        "every prompt up to the cursor is trained, or still on its way, once"
    )
    dead = {durable.stream.outstanding[e.serial] for e in ledger if e.state == "dead"}
    assert all(always_fails(n, poisoned) for n in dead), "only prompts that always fail are given up"
    assert not any(always_fails(n, poisoned) for n in trained)


def always_fails(position: int, poisoned: int | None) -> bool:
    """Whether the prompt at this position of the dataset is one of those that always fail."""
    return poisoned is not None and position % PROMPTS % poisoned == poisoned - 1


def _check_replays(lines: Sequence[Trained], durable: Checkpoint) -> None:
    """A step that was trained again had the same groups in the same order, and led to the same weights."""
    first: dict[int, Trained] = {}
    for line in lines:
        before = first.setdefault(line.step, line)
        assert line.groups == before.groups, f"step {line.step} was replayed with other groups"
        assert line.weights == before.weights
    for step, groups in enumerate(durable.trained):
        assert first[step].groups == groups
    if durable.trained:
        assert durable.weights == first[durable.step - 1].weights


def final_ledger(run_dir: Path) -> list[LedgerEntry]:
    """RUN/ledger.json, as the broker left it."""
    return msgspec.json.decode((run_dir / "ledger.json").read_bytes(), type=list[LedgerEntry])
