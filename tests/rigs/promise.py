"""The options of the processes of a fault test, the files that they leave, and the promise that is checked from those.

The promise: each group is in one committed step; nothing is lost or skipped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from broker.contract import LedgerEntry
from learner.checkpoint.folder import StreamState

GROUP_SIZE = 2
PROMPTS = 1009  # rows of the dataset
GROUPS_PER_STEP = 4
MAX_STALENESS = 1
LEASE_S = 1.0
HEARTBEAT_S = 0.2
RETRY_S = 0.5  # clients repeat a request after it; in the product 2 s


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The behaviour of one node."""

    address: str
    name: str
    seed: int = 0
    think_s: float = 0.05  # mean time of an episode
    concurrency: int = 6  # episodes at once
    heartbeat_s: float = HEARTBEAT_S
    padding_tokens: int = 0  # added to every sample, to make groups large
    hang_after: int | None = None  # from this episode on the node's loop stands still; its heartbeats continue
    repeats: bool = False  # hand in every group three times


class LearnerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str
    run_dir: str
    incarnation: int
    step_s: float = 0.03
    in_order: bool = False
    deadline_s: float = 30.0  # how long it waits for an answer of the broker
    every: int = 3  # steps between checkpoints
    store_may_change: bool = False  # else a broker that has forgotten something is an error


class Trained(msgspec.Struct, frozen=True):
    """A line of learner.jsonl: a step was trained, or trained again."""

    at_s: float  # monotonic seconds, the same clock for every process of the machine
    incarnation: int
    step: int
    groups: list[list[Any]]  # [serial, position in the dataset, marks of the samples...] of each, in order
    weights: str  # hash over the payloads of all steps up to this one
    ahead: int = 0  # groups of this step that were there before the take


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the learner resumes from: next step, weights, the groups behind them, and the task stream."""

    step: int = 0
    weights: str = ""
    trained: list[list[list[Any]]] = []
    stream: StreamState = msgspec.field(default_factory=StreamState)
    first: int = 0  # the broker's store knows the steps from this one on; another store had those before

    @classmethod
    def load(cls, run_dir: Path) -> "Checkpoint":
        """The checkpoint of a run, an empty one when there is none yet."""
        path = run_dir / "checkpoint.json"
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()


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
