"""The thread that writes to the store, with a store that a test controls."""

from typing import Any

from broker.journal.store import Record, StoreBehind
from broker.journal.writer import Writer
from tests.waiting import until


class Failover:
    """A store that lacks records at its first write; before the second one the server that has them is back."""

    idle_s = None

    def __init__(self) -> None:
        self.written: list[int] = []
        self._first = True

    def append(self, batch: list[Record], **_: Any) -> None:
        if self._first:
            self._first = False
            raise StoreBehind("the replica lacks records")
        self.written += [record.seq for record in batch]


def test_a_store_that_has_every_record_again_needs_no_rewrite() -> None:
    store = Failover()
    writer = Writer(store, "fsync", 0, 0, lambda: None)  # type: ignore[arg-type]
    writer.start()
    writer.put(Record(1, b"a move"))
    writer.kick()
    until(lambda: writer.acknowledged == 1, "the record to be acknowledged")
    assert store.written == [1]
    assert not writer.behind
    assert writer.close(60.0)
