"""The check of the promise finds what is broken: a correct run's record, damaged in one place each."""

from collections.abc import Callable
from operator import setitem
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.contract import LedgerEntry
from learner.checkpoint.folder import StreamState
from tests.rigs.promise import Checkpoint, Trained, check_promise

STEPS = 3


def groups(step: int) -> list[list[Any]]:
    return [[n, n, f"{n}-100-{2 * n}", f"{n}-100-{2 * n + 1}"] for n in range(4 * step, 4 * step + 4)]


class Record:
    """The files of a run of three steps: 12 groups trained, task 12 ready, task 13 dead."""

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


def other(r: Record, number: int, **changes: Any) -> None:
    """Entry `number` of the ledger with changes."""
    r.ledger[number] = msgspec.structs.replace(r.ledger[number], **changes)


def replayed(r: Record, **changes: Any) -> None:
    """The second training of step 1 with changes."""
    r.lines[2] = msgspec.structs.replace(r.lines[2], **changes)


DAMAGES: dict[str, Callable[[Record], object]] = {
    "trained twice": lambda r: setitem(r.trained[2], 0, r.trained[1][0]),
    "other groups in the replay": lambda r: replayed(r, groups=groups(1)[::-1]),
    "other weights after the replay": lambda r: replayed(r, weights="else"),
    "a sample in two groups": lambda r: setitem(r.trained[2][0], 2, r.trained[2][0][3]),
    "a group of another prompt": lambda r: setitem(r.trained[0][0], slice(2, None), ["5-100-90", "5-100-91"]),
    "a skipped prompt": lambda r: r.outstanding.pop(12),
    "a prompt twice": lambda r: setitem(r.outstanding, 12, 11),
    "a task missing in the ledger": lambda r: r.ledger.pop(5),
    "another step in the ledger": lambda r: other(r, 5, step=2),
    "a group lost by the ledger": lambda r: other(r, 5, state="pending", step=None),
    "a group left taken": lambda r: other(r, 12, state="taken", step=3),
    "a death without a reason": lambda r: other(r, 13, reason=""),
    "a death of a good prompt": lambda r: other(r, 12, state="dead", reason="lost"),
}


def test_a_correct_record_passes(tmp_path: Path) -> None:
    record = Record()
    record.check(tmp_path)


@pytest.mark.parametrize("harm", DAMAGES)
def test_the_check_finds(harm: str, tmp_path: Path) -> None:
    record = Record()
    DAMAGES[harm](record)
    with pytest.raises(AssertionError):
        record.check(tmp_path)
