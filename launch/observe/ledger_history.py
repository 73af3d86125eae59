"""One ledger out of those that the brokers of one run left behind: a run stopped and continued has several.

Every broker numbers its tasks from 0. Tasks that an earlier broker gave to no lasting step are offered again by the
next one, so its entries of them are left out. Tasks of a lasting step are kept. A step that no later learner repeated
is committed, because learners continue from durable checkpoints only. So every step appears once, with its groups.
"""

from collections.abc import Sequence

import msgspec

from broker.contract import LedgerEntry
from common.process.run_dir import RunDir

COMMITTED = "committed"


def former_ledgers(run: RunDir) -> list[list[LedgerEntry]]:
    """RUN/ledger-1.json, ledger-2.json, ...: those of earlier brokers, oldest first; raises msgspec.DecodeError."""
    found: list[list[LedgerEntry]] = []
    while (path := run.path / f"ledger-{len(found) + 1}.json").exists():
        found.append(msgspec.json.decode(path.read_bytes(), type=list[LedgerEntry]))
    return found


def whole_ledger(former: Sequence[list[LedgerEntry]], newest: list[LedgerEntry]) -> list[LedgerEntry]:
    """The run's ledger, ascending by serial; serials go on from broker to broker, with gaps where tasks came again."""
    ledgers = [*former, newest]
    entries: list[LedgerEntry] = []
    offset = 0
    for index, ledger in enumerate(ledgers):
        repeated_from = min(
            (e.step for later in ledgers[index + 1 :] for e in later if e.step is not None), default=None
        )
        for entry in ledger:
            numbered = msgspec.structs.replace(entry, serial=entry.serial + offset)
            if index == len(ledgers) - 1:
                entries.append(numbered)
            elif entry.step is None:
                continue
            elif repeated_from is None:
                entries.append(numbered)  # no later broker took a step yet
            elif entry.step < repeated_from:
                entries.append(msgspec.structs.replace(numbered, state=COMMITTED))
        offset += max((entry.serial + 1 for entry in ledger), default=0)
    return entries
