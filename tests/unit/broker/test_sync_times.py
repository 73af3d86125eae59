"""How long the store takes to sync, as the writer measures it, for both kinds of durability."""

import time
from typing import Any, Literal

import pytest

from broker.journal.journal import Writer
from broker.journal.store import Record
from tests.rigs.waiting import LIMIT_S, until

SYNC_S = 0.05


class SlowDisk:
    """A store whose syncs take SYNC_S."""

    idle_s = None

    def __init__(self) -> None:
        self.appended, self.syncs = list[tuple[int, int, bool]](), 0

    def append(self, batch: list[Record], *, synced: int, sync: bool) -> None:
        self.appended += [(record.seq, synced, sync) for record in batch]
        if sync:
            self.sync()

    def sync(self) -> None:
        self.syncs += 1
        time.sleep(SYNC_S)


@pytest.mark.parametrize("sync", ["fsync", "everysec"])
def test_syncs_are_measured_and_everything_is_synced_before_the_end(
    sync: Literal["fsync", "everysec"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.journal.journal.SYNC_EVERY_S", 0.0)
    disk: Any = SlowDisk()
    notes = list[int]()
    writer = Writer(disk, sync, lambda: notes.append(writer.acknowledged))
    writer.start(4, 0)
    assert (writer.acknowledged, writer.synced, writer.behind) == (4, 4, False)
    for seq in (5, 6):
        writer.put(Record(seq, b"move"))
        writer.kick()
        until(lambda seq=seq: writer.acknowledged == seq, "the acknowledgement")
    until(lambda: writer.synced == 6, "the sync")
    assert writer.close(LIMIT_S)
    assert disk.appended == [(5, 4, sync == "fsync"), (6, 5, sync == "fsync")]
    assert disk.syncs == 2 and notes[:1] == [5]
    assert 2 * 0.09 * SYNC_S < writer.sync_s < LIMIT_S
