"""Groups of the next step, made ready while the learner trains: what comes twice, what never does, and what ends it."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import wire
from broker.client.connect import Access, connect
from broker.client.look_ahead import LookAhead
from broker.contract import StoredGroup
from broker.delivery.learner_rules import LearnerRules
from broker.journal.records import PendingSnapshot
from broker.server.handlers import Handlers
from common.errors import BrokerUnreachable
from tests.rigs.brokers import META, DurableRig, MemoryBroker, node_report, run_info, serving, tasks
from tests.rigs.waiting import LIMIT_S, until

SIZE = 4  # groups of a step


class Site:
    """A broker in memory, a node, and a learner whose looks note what they made."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(run_info(groups_per_step=SIZE, max_staleness=8))
        self.learner = self.broker.learner()
        self.node = self.broker.node()
        self.made: list[tuple[int, bytes, int]] = []
        self.payload = "group"
        self.ahead = LookAhead(self.learner, self.make)
        self.learner.offer(tasks(40))
        asyncio.run(self.node.register(node_report()))

    def make(self, stored: StoredGroup, step: int) -> bytes:
        assert not stored.held
        self.made.append((stored.serial, stored.payload, step))
        return stored.payload

    def ready(self, count: int, payload: str = "") -> list[int]:
        leases = asyncio.run(self.node.lease("n0", 0, count, 0.0))
        for lease in leases:
            data = f"{payload or self.payload} {lease.task.serial}".encode()
            assert asyncio.run(self.node.complete("n0", lease.token, META, data))
        return [lease.task.serial for lease in leases]

    def take(self, step: int) -> list[StoredGroup]:
        taken = self.learner.take(step, SIZE, 0.0, held=self.ahead.end())
        assert taken is not None
        return taken

    def train(self, step: int, expected: list[bytes]) -> None:
        """Take a step, and look for the next one until as much is there."""
        taken = self.take(step)
        assert [self.ahead.get(stored, step) for stored in taken] == expected
        self.ahead.begin(step + 1, len(taken))

    def wait_for(self, *serials: int) -> None:
        until(
            lambda: list(self.ahead.made.values()) == group(*serials, payload=self.payload),
            "groups that are made ahead",
        )


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    yield found
    found.learner.close()


def group(*serials: int, payload: str = "group") -> list[bytes]:
    return [f"{payload} {serial}".encode() for serial in serials]


def test_the_next_steps_groups_come_once_and_only_as_many_as_the_step_before_took(site: Site) -> None:
    site.ready(3 * SIZE)
    site.train(0, group(0, 1, 2, 3))
    site.wait_for(4, 5, 6, 7)
    assert site.ahead._thread is not None
    site.ahead._thread.join(LIMIT_S)
    assert not site.ahead._thread.is_alive(), "nothing more is looked for"
    taken = site.take(1)
    assert [(stored.serial, stored.payload, stored.held) for stored in taken] == [(n, b"", True) for n in range(4, 8)]
    assert [site.ahead.get(stored, 1) for stored in taken] == group(4, 5, 6, 7)
    assert site.made == [(n, b"group %d" % n, n // 4) for n in range(8)]


def test_a_straggler_that_overtakes_is_taken_and_what_it_displaces_comes_again(site: Site) -> None:
    site.ready(SIZE)
    straggler = asyncio.run(site.node.lease("n0", 0, 1, 0.0))[0]
    site.ready(SIZE)
    site.train(0, group(0, 1, 2, 3))
    site.wait_for(5, 6, 7, 8)
    assert asyncio.run(site.node.complete("n0", straggler.token, META, b"group 4"))
    site.train(1, group(4, 5, 6, 7))
    site.ready(SIZE)
    site.wait_for(8, 9, 10, 11)
    site.train(2, group(8, 9, 10, 11))
    assert [made for made in site.made if made[0] in (4, 8)] == [
        (8, b"group 8", 1),
        (4, b"group 4", 1),
        (8, b"group 8", 2),
    ]


def test_groups_that_become_ready_later_are_looked_for_again(site: Site) -> None:
    site.ready(SIZE + 1)
    site.train(0, group(0, 1, 2, 3))
    site.wait_for(4)
    site.ready(2)
    site.wait_for(4, 5, 6)


def test_a_group_that_was_generated_again_is_made_again(site: Site) -> None:
    site.ready(2 * SIZE)
    site.train(0, group(0, 1, 2, 3))
    site.wait_for(4, 5, 6, 7)
    site.take(1)
    site.learner.regenerate(1, [5])
    assert site.ready(1, "fresh") == [5]
    site.train(1, [*group(4, 6, 7), b"fresh 5"])


def test_another_store_gives_all_of_its_groups(site: Site) -> None:
    site.ready(2 * SIZE)
    site.train(0, group(0, 1, 2, 3))
    site.wait_for(4, 5, 6, 7)
    other = Site()
    site.learner.use(other.broker.state)
    site.payload = other.payload = "other"
    other.ready(2 * SIZE)
    site.train(0, group(0, 1, 2, 3, payload="other"))
    site.wait_for(4, 5, 6, 7)
    site.train(1, group(4, 5, 6, 7, payload="other"))
    other.learner.close()


def test_groups_of_a_store_of_an_earlier_release_are_never_held(site: Site) -> None:
    site.ready(2 * SIZE)
    for entry in site.broker.state.tasks.living.values():
        entry.token = ""
    site.train(0, group(0, 1, 2, 3))
    until(lambda: site.ahead._thread is not None and site.ahead._thread.is_alive(), "the thread")
    site.train(1, group(4, 5, 6, 7))
    assert site.ahead.made == {}


def test_a_fault_of_the_program_is_raised_at_the_next_take(site: Site) -> None:
    fault = ZeroDivisionError("a fault of the program")

    def make(stored: StoredGroup, step: int) -> bytes:
        if step == 1:
            raise fault
        return stored.payload

    site.ahead = LookAhead(site.learner, make)
    site.ready(2 * SIZE)
    site.train(0, group(0, 1, 2, 3))
    assert site.ahead._thread is not None
    site.ahead._thread.join(LIMIT_S)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as error:
            site.take(1)
        assert error.value is fault


def test_a_broker_that_cannot_be_reached_is_left_to_the_take(site: Site) -> None:
    site.ready(SIZE)
    site.train(0, group(0, 1, 2, 3))
    site.learner.close()
    assert site.ahead._thread is not None
    site.ahead._thread.join(LIMIT_S)
    assert not site.ahead._thread.is_alive()
    with pytest.raises(BrokerUnreachable):
        site.take(1)


def test_closing_the_connection_ends_a_look_that_nobody_answers() -> None:
    with serving() as server:
        learner = connect(Access(address=server.address, role="learner"))
        asked = threading.Event()

        def never(client: bytes, request: wire.AnyRequest, payload: object) -> tuple[None, list[object]]:
            asked.set()
            return None, []

        server._handlers.handle = never  # type: ignore[method-assign]
        ahead = LookAhead(learner, lambda stored, step: stored)
        ahead.begin(1, SIZE)
        assert asked.wait(LIMIT_S)
        learner.close()
        assert ahead.end() == [], "it waits for nothing"


def test_a_look_leaves_state_and_journal_as_they_are(tmp_path: Path) -> None:
    with DurableRig(tmp_path / "store") as rig:
        rig.begin()
        rig.ready(3)
        rig.settle()

        def contents() -> tuple[object, ...]:
            files = {path.name: path.read_bytes() for path in sorted((tmp_path / "store").iterdir()) if path.is_file()}
            state = rig.state
            kept = (state.lease_revision, state.wanted, state.recorder.seq, rig.kinds(), state.status().groups_ready)
            return files, PendingSnapshot(state, 0).snapshot(0), kept

        before = contents()
        request = wire.Take(step=0, count=2, wait_s=0, look=True)
        reply, _ = Handlers(rig.state).handle(b"learner", request, None)
        assert [stored.serial for stored in wire.value_of(reply)] == [0, 1]  # type: ignore[arg-type]
        rig.settle()
        assert contents() == before


def test_a_group_keeps_its_token_over_a_restart_of_the_broker(tmp_path: Path) -> None:
    with DurableRig(tmp_path / "store") as rig:
        rig.begin()
        rig.ready(3)
        rig.settle()
        tokens = [entry.token for entry in LearnerRules(rig.state).look(3, ())]
    for _ in range(2):  # from its records, and from the snapshot that it then writes
        with DurableRig(tmp_path / "store") as rig:
            taken = LearnerRules(rig.state).take(0, 2)
            assert taken is not None
            assert [entry.token for entry in taken] == tokens[:2]
            assert [entry.token for entry in LearnerRules(rig.state).look(3, ())] == []  # in the store only
            assert rig.state.tasks.living[2].token == tokens[2]
            rig.settle()
    assert len(set(tokens)) == 3
