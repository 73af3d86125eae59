"""The cost of a thousand waiting nodes, counted in looks at requests instead of seconds."""

import random

import msgspec
import pytest

from broker import wire
from broker.contract import LearnerReport, Lease, NodeReport
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.delivery.task_table import Entry, LeasedTasks
from broker.server.handlers import Handlers
from common.rollouts import GroupMeta, Task
from tests.rigs.brokers import numbered_state, run_info

NODES, GROUPS_PER_STEP, STALENESS, LEASE_S = 1000, 4, 1, 30.0
RUN = run_info(groups_per_step=GROUPS_PER_STEP, max_staleness=STALENESS, lease_s=LEASE_S)
WINDOW = GROUPS_PER_STEP * (STALENESS + 1)  # groups that a node at version 0 may lease


class Crowd:
    """A broker without sockets, and nodes that all wait for a lease; `looks` counts attempts to lease for one."""

    def __init__(self, versions: list[int]) -> None:
        self.now = 0.0
        self.looks = 0
        self.state = numbered_state(RUN, lambda: self.now)
        self.handlers = Handlers(self.state)
        lease = self.handlers.answers.nodes.lease

        def counted(node_id: str, version: int | None, max_groups: int) -> list[Lease]:
            self.looks += 1
            return lease(node_id, version, max_groups)

        self.handlers.answers.nodes.lease = counted  # type: ignore[method-assign]
        self.ask(b"learner", wire.Attach(id=0, report=LearnerReport(1, 0, "training", 0)))
        for i, version in enumerate(versions):
            self.beat(i, version)
            request = wire.AskLease(id=i, node_id=f"n{i}", version=version, max_groups=1, wait_s=60)
            assert self.ask(f"c{i}".encode(), request) is None, "parked"
        self.served()
        self.looks = 0

    def ask(self, client: bytes, request: wire.AnyRequest) -> wire.Reply | None:
        return self.handlers.handle(client, request, b"group" if isinstance(request, wire.Complete) else None)[0]

    def beat(self, number: int, version: int) -> None:
        report = NodeReport(f"n{number}", number, "host", "generating", version)
        self.ask(f"c{number}".encode(), wire.Heartbeat(id=1 << 20, report=report, tokens=[]))

    def offer(self, first: int, count: int) -> None:
        LearnerRules(self.state).offer([Task(serial, b"{}", 0, 4) for serial in range(first, first + count)])

    def served(self) -> list[tuple[str, list[int]]]:
        """(client, serials) of every answer that can be given now."""
        found = self.handlers.serve_parked()
        return [(p.client.decode(), [le.task.serial for le in r.value]) for p, r in found if isinstance(r, wire.Answer)]


@pytest.fixture
def crowd() -> Crowd:
    return Crowd([0] * NODES)


def test_a_free_task_costs_few_looks_and_goes_to_the_first_and_a_change_that_gives_nobody_a_lease_costs_one(
    crowd: Crowd,
) -> None:
    for serial in range(WINDOW):
        crowd.offer(serial, 1)
        assert crowd.served() == [(f"c{serial}", [serial])]
    assert crowd.looks <= 2 * WINDOW
    crowd.looks = 0
    for serial in range(WINDOW, WINDOW + 100):
        crowd.offer(serial, 1)
        assert crowd.served() == []
    assert crowd.looks <= 100


def test_new_weights_of_every_node_cost_a_look_for_each_and_not_for_each_pair(crowd: Crowd) -> None:
    crowd.offer(0, 10 * WINDOW)
    crowd.served()
    crowd.looks, leased = 0, 0
    for number in range(NODES):
        crowd.beat(number, 1)
        leased += len(crowd.served())
    assert leased == GROUPS_PER_STEP, "one step more may be leased at version 1"
    assert crowd.looks <= NODES + GROUPS_PER_STEP


def test_nodes_with_old_weights_that_wait_do_not_stop_those_with_new_ones() -> None:
    versions = [1 if i % 2 else 0 for i in range(NODES)]
    crowd = Crowd(versions)
    crowd.offer(0, 10 * WINDOW)
    served = crowd.served()
    assert [serials for _, serials in served] == [[i] for i in range(WINDOW + GROUPS_PER_STEP)]
    assert [client for client, _ in served[:WINDOW]] == [f"c{i}" for i in range(WINDOW)]
    assert all(int(client[1:]) % 2 for client, _ in served[WINDOW:]), "only version 1 may take the last ones"
    assert crowd.looks <= WINDOW + GROUPS_PER_STEP + 2


def test_requests_of_nodes_that_died_are_answered_even_when_nothing_can_be_given(crowd: Crowd) -> None:
    crowd.offer(0, 10 * WINDOW)
    crowd.served()
    crowd.now += LEASE_S - 1
    for number in range(NODES - 1):
        crowd.beat(number, 0)
    crowd.served()
    crowd.now += 2
    NodeRules(crowd.state).expire()
    crowd.offer(10 * WINDOW, 1)
    assert (f"c{NODES - 1}", []) in crowd.served()


def test_older_leases_are_counted_as_by_looking_at_each() -> None:
    generator = random.Random(1)
    leased = LeasedTasks()
    for serial in generator.sample(range(1000), 300):
        leased[f"token {serial}"] = Entry(Task(serial, b"", 0, 1))
    for token in generator.sample(sorted(leased), 150):
        del leased[token]
    for serial in range(0, 1001, 7):
        assert leased.older_than(serial) == sum(entry.serial < serial for entry in leased.values())


def test_a_lease_under_the_bound_on_memory_does_not_look_at_every_leased_task(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd([0])
    crowd.offer(0, WINDOW)
    crowd.served()
    crowd.state.run = msgspec.structs.replace(RUN, max_bytes=1)
    token = next(iter(crowd.state.tasks.leased))
    assert NodeRules(crowd.state).complete("n0", token, GroupMeta(0, 0, 0.5, 4), b"group", 5)
    monkeypatch.setattr(LeasedTasks, "values", lambda self: pytest.fail("looked at every leased task"))
    assert len(NodeRules(crowd.state).lease("n0", 0, WINDOW)) == GROUPS_PER_STEP - 1
    LearnerRules(crowd.state).take(0, 1, in_order=True)
