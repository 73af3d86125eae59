"""The check of the promise finds what is broken: a correct run's record, damaged in one place each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.contract import LedgerEntry
from learner.checkpoint.folder import StreamState
from tests.faults.options import Checkpoint, Trained
from tests.faults.promise import check_promise

STEPS = 3


def groups(step: int) -> list[list[Any]]:
    return [[n, n, f"{n}-100-{2 * n}", f"{n}-100-{2 * n + 1}"] for n in range(4 * step, 4 * step + 4)]


class Record:
    """What a run of three steps leaves behind: 12 groups trained, task 12 ready, task 13 dead."""

    def __init__(self) -> None:
        self.lines = [Trained(float(s), 1, s, groups(s), f"w{s}") for s in range(STEPS)]
        self.lines.insert(2, msgspec.structs.replace(self.lines[1], incarnation=2))  # step 1, trained again
        self.trained = [groups(s) for s in range(STEPS)]
        self.outstanding = {12: 12, 13: 13}
        self.ledger = [LedgerEntry(n, "committed", 1, ["n0"], n // 4, 0, 0, 0.5) for n in range(12)]
        self.ledger.append(LedgerEntry(12, "ready", 1, ["n0"], None, 0, 0, 0.5))
        self.ledger.append(LedgerEntry(13, "dead", 3, ["n0"] * 3, None, None, None, None, "it always fails"))

    def check(self, run_dir: Path) -> None:
        (run_dir / "learner.jsonl").write_bytes(b"".join(msgspec.json.encode(x) + b"\n" for x in self.lines))
        stream = StreamState(next_serial=14, cursor=14, outstanding=self.outstanding)
        checkpoint = Checkpoint(step=STEPS, weights="w2", trained=self.trained, stream=stream)
        (run_dir / "checkpoint.json").write_bytes(msgspec.json.encode(checkpoint))
        check_promise(run_dir, self.ledger, poisoned=14)


def damage(entry: LedgerEntry, **changes: Any) -> LedgerEntry:
    return msgspec.structs.replace(entry, **changes)


def trained_twice(r: Record) -> None:
    r.trained[2][0] = r.trained[1][0]


def other_groups_in_the_replay(r: Record) -> None:
    r.lines[2] = msgspec.structs.replace(r.lines[2], groups=groups(1)[::-1])


def other_weights_after_the_replay(r: Record) -> None:
    r.lines[2] = msgspec.structs.replace(r.lines[2], weights="else")


def a_sample_in_two_groups(r: Record) -> None:
    r.trained[2][0][2] = r.trained[2][0][3]


def a_group_of_another_prompt(r: Record) -> None:
    r.trained[0][0][2:] = ["5-100-90", "5-100-91"]


def a_skipped_prompt(r: Record) -> None:
    r.outstanding = {13: 13}


def a_prompt_twice(r: Record) -> None:
    r.outstanding = {12: 11, 13: 13}


def a_task_missing_in_the_ledger(r: Record) -> None:
    del r.ledger[5]


def another_step_in_the_ledger(r: Record) -> None:
    r.ledger[5] = damage(r.ledger[5], step=2)


def a_group_lost_by_the_ledger(r: Record) -> None:
    r.ledger[5] = damage(r.ledger[5], state="pending", step=None)


def a_group_left_taken(r: Record) -> None:
    r.ledger[12] = damage(r.ledger[12], state="taken", step=3)


def a_death_without_a_reason(r: Record) -> None:
    r.ledger[13] = damage(r.ledger[13], reason="")


def a_death_of_a_good_prompt(r: Record) -> None:
    r.ledger[12] = damage(r.ledger[12], state="dead", reason="lost")


DAMAGES: list[Callable[[Record], None]] = [
    trained_twice,
    other_groups_in_the_replay,
    other_weights_after_the_replay,
    a_sample_in_two_groups,
    a_group_of_another_prompt,
    a_skipped_prompt,
    a_prompt_twice,
    a_task_missing_in_the_ledger,
    another_step_in_the_ledger,
    a_group_lost_by_the_ledger,
    a_group_left_taken,
    a_death_without_a_reason,
    a_death_of_a_good_prompt,
]


def test_a_correct_record_passes(tmp_path: Path) -> None:
    record = Record()
    record.check(tmp_path)


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_the_check_finds(harm: Callable[[Record], None], tmp_path: Path) -> None:
    record = Record()
    harm(record)
    with pytest.raises(AssertionError):
        record.check(tmp_path)
