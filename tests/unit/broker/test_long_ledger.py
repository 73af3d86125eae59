"""A ledger of a million tasks: it is told in pages, while others are answered, and a learner attaches without it."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.client.connection import BrokerClient
from broker.contract import LEDGER_LINES, LedgerEntry
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import History
from broker.journal.records import PendingSnapshot, decode_finished
from broker.server.flood_guard import own_memory
from tests.rigs.brokers import new_state, node_report, serving, tasks
from tests.rigs.waiting import LIMIT_S

TASKS = 1_000_000
MOST_BYTES = 128 << 20  # the whole ledger takes several times as much, in each of both processes


def long_state() -> DeliveryState:
    """A million committed tasks, and four pending ones."""
    state = new_state()
    history = state.tasks.history
    history.add(LedgerEntry(0, "committed", 1, ["n0"], 0, 0, 0, 0.5))
    history._rows *= TASKS
    state.tasks.next_serial = TASKS
    LearnerRules(state).offer(tasks(4, TASKS))
    return state


def test_a_million_tasks_are_told_in_bounded_memory_while_others_are_answered() -> None:
    with (
        serving(state=long_state()) as server,
        ThreadPoolExecutor(1) as pool,
        BrokerClient(server.address, deadline_s=LIMIT_S) as reader,
        BrokerClient(server.address, deadline_s=LIMIT_S) as other,
    ):
        other.status()
        before, highest, known = own_memory(), 0, 0

        def read() -> None:
            nonlocal highest, known
            for page in reader.ledger_pages():
                assert [page[0].serial, page[-1].serial] == [known, known + len(page) - 1]
                known += len(page)
                highest = max(highest, own_memory())

        reading, answers_s = pool.submit(read), list[float]()
        while not reading.done():
            began = time.monotonic()
            other.status()
            answers_s.append(time.monotonic() - began)
            time.sleep(0.02)
        reading.result()
        assert known == TASKS + 4
        assert highest - before < MOST_BYTES
        pages = TASKS / LEDGER_LINES
        assert len(answers_s) > pages / 50, "nobody waits until the whole ledger is told"


def test_the_brokers_loop_does_not_wait_until_all_finished_tasks_are_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis has failed over and lost records: the store's thread makes the entries, as of the moment of the copy."""
    state = long_state()
    history = state.tasks.history
    del history._rows[29 * 1000 :]
    history.add(LedgerEntry(1000, "dead", 2, ["n0", "n1"], None, None, None, None, reason="broken"))
    entries = state.ledger()[:1001]
    with monkeypatch.context() as patch:
        patch.setattr(History, "get", None)
        rewrite = PendingSnapshot(state, 1, rewritten=[])
    history.add(LedgerEntry(1001, "committed", 1, ["n2"], 0, 0, 0, 0.5))
    assert decode_finished(rewrite.finished() or b"") == entries
    assert PendingSnapshot(new_state(), 1, rewritten=[]).finished() is None


def test_the_unfinished_tasks_of_a_long_ledger_are_one_short_page() -> None:
    state = long_state()
    NodeRules(state).register(node_report(version=TASKS // 2))
    NodeRules(state).lease("n0", TASKS // 2, 1)
    told = [(entry.serial, entry.state) for entry in state.tasks.page(0, unfinished=True)]
    assert told == [(TASKS, "leased"), (TASKS + 1, "pending"), (TASKS + 2, "pending"), (TASKS + 3, "pending")]
    assert state.tasks.page(TASKS + 4, unfinished=True) == []
