"""The delivery contract, the same over every store."""

import asyncio
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.contract import LearnerReport, NodeReport, RunInfo, Waste
from broker.delivery.leasing import ALONE
from broker.delivery.nodes import wasted_tokens
from broker.delivery.state import DeliveryState
from broker.journal.file_store.store import open_file_store
from broker.journal.journal import Journal
from broker.journal.recovery import recover
from broker.journal.redis_store.store import RedisStore
from broker.journal.store import Store
from broker.messaging.async_client import AsyncBrokerClient
from broker.messaging.client_methods import LearnerBroker, NodeBroker
from broker.messaging.sync_client import BrokerClient
from broker.server.in_process import MemoryBroker
from broker.server.server import BrokerServer
from common.errors import BrokerError
from common.rollouts import GroupMeta, Task
from tests.redis_server import leading, redis_server
from tests.waiting import until

META = GroupMeta(version_min=0, version_max=1, reward_mean=0.5, sampled_tokens=10, generation_s=2.5)
GROUPS_PER_STEP = 2


class Backend:
    """One broker under test, its clients, and an event loop for the nodes."""

    def __init__(self, runner: asyncio.Runner, learner: Callable[[], Any], node: Callable[[], Any]) -> None:
        self._runner, self._new_node = runner, node
        self.new_learner = learner
        self.learner = learner()
        self.node: NodeBroker = node()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, 120))

    def join(self, node_id: str = "n0", pid: int = 1, version: int = 0) -> None:
        self.run(self.node.register(node_report(node_id, pid, version)))

    def lease(self, count: int, node_id: str = "n0", version: int = 0, wait_s: float = 0.0) -> list[Any]:
        return self.run(self.node.lease(node_id, version, count, wait_s))

    def complete(self, lease: Any, node_id: str = "n0", payload: bytes | None = None) -> bool:
        data = payload if payload is not None else b"group %d" % lease.task.serial
        return self.run(self.node.complete(node_id, lease.token, META, data))

    def states(self) -> dict[int, str]:
        return {e.serial: e.state for e in self.learner.ledger()}


def node_report(node_id: str = "n0", pid: int = 1, version: int = 0, generated: int = 0, wasted: int = 0) -> NodeReport:
    return NodeReport(node_id, pid, "host", "generating", version, tokens_generated=generated, tokens_wasted=wasted)


def learner_report(
    state: str = "training", incarnation: int = 1, step: int = 0, instance: str = "", weights: str = ""
) -> LearnerReport:
    return LearnerReport(
        5, incarnation, state, policy_version=step, step=step, instance=instance, weights_address=weights
    )


def tasks(*serials: int) -> list[Task]:
    return [Task(serial=s, problem=b"{}", seed=s, group_size=4) for s in serials]


def run_info(lease_s: float, max_bytes: int, max_lease_s: float) -> RunInfo:
    return RunInfo("test", "/nowhere", GROUPS_PER_STEP, 1, 2, lease_s, max_bytes, b'{"a": 1}', max_lease_s)


def memory(run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    broker = MemoryBroker(run)
    yield Backend(runner, broker.learner, broker.node)


def zeromq(run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    yield from served(BrokerServer(DeliveryState(run), ["tcp://127.0.0.1:0"], 1 << 20), runner)


def zeromq_files(run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    with tempfile.TemporaryDirectory() as folder:
        yield from durable(open_file_store(Path(folder, "store"), run.name), run, runner)


def zeromq_redis(run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    term = leading(redis_server(), f"test {secrets.token_hex(4)}")
    yield from durable(RedisStore(term), run, runner)


def durable(store: Store, run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    """Acknowledged only after a sync; the segments are so small that snapshots are taken all the time."""
    journal = Journal(store, "fsync", segment_bytes=1 << 12)
    state = DeliveryState(run, recorder=journal, retain_steps=2)
    recover(journal, state)
    yield from served(BrokerServer(state, ["tcp://127.0.0.1:0"], 1 << 20, journal=journal), runner)


def served(server: BrokerServer, runner: asyncio.Runner) -> Iterator[Backend]:
    thread = threading.Thread(target=server.run)
    thread.start()
    opened: list[Any] = []

    def learner() -> LearnerBroker:
        opened.append(BrokerClient(server.address, deadline_s=60))
        return opened[-1]

    def node() -> NodeBroker:
        opened.append(AsyncBrokerClient(server.address, deadline_s=60))
        return opened[-1]

    try:
        yield Backend(runner, learner, node)
    finally:
        for client in opened:
            closing = client.close()
            if closing is not None:
                runner.run(closing)
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


BACKENDS = {"memory": memory, "zeromq": zeromq, "zeromq_files": zeromq_files, "zeromq_redis": zeromq_redis}


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Backend]]:
    with asyncio.Runner() as runner:
        started: list[Iterator[Backend]] = []

        def factory(lease_s: float = 30.0, max_bytes: int = 1 << 30, max_lease_s: float = 3600.0) -> Backend:
            started.append(BACKENDS[request.param](run_info(lease_s, max_bytes, max_lease_s), runner))
            return next(started[-1])

        yield factory
        for generator in started:
            assert next(generator, None) is None


@pytest.fixture
def backend(make: Callable[..., Backend]) -> Backend:
    return make()


def test_register_tells_a_node_about_the_run(backend: Backend) -> None:
    run = backend.run(backend.node.register(node_report()))
    assert run.name.startswith("test")
    assert (run.groups_per_step, run.config) == (GROUPS_PER_STEP, b'{"a": 1}')


def test_offering_known_serials_again_adds_nothing(backend: Backend) -> None:
    assert backend.learner.attach(learner_report()).next_serial == 0
    assert backend.learner.offer(tasks(0, 1, 2)) == 3
    assert backend.learner.offer(tasks(1, 2, 3)) == 1
    assert backend.learner.attach(learner_report()).next_serial == 4


def test_offering_with_a_gap_is_refused_and_adds_nothing(backend: Backend) -> None:
    with pytest.raises(BrokerError, match="task 2 was offered, the next serial is 1"):
        backend.learner.offer(tasks(0, 2))
    assert backend.learner.ledger() == []


def test_leases_are_the_oldest_tasks_inside_the_staleness_window(backend: Backend) -> None:
    backend.learner.offer(tasks(*range(10)))
    backend.join()
    assert [le.task.serial for le in backend.lease(3)] == [0, 1, 2]
    assert [le.task.serial for le in backend.lease(10)] == [3]  # 2 groups a step, one step ahead: serials 0 to 3
    assert backend.lease(10) == []
    assert [le.task.serial for le in backend.lease(10, version=2)] == [4, 5, 6, 7]


def test_a_node_without_weights_gets_no_lease(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join(version=-1)
    assert backend.lease(1, version=-1) == []


def test_a_node_that_never_registered_gets_an_error(backend: Backend) -> None:
    with pytest.raises(BrokerError, match="node n0 is not registered"):
        backend.lease(1)


def test_a_waiting_lease_is_served_when_a_task_is_offered(backend: Backend) -> None:
    backend.join()

    async def scenario() -> list[Any]:
        waiting = asyncio.create_task(backend.node.lease("n0", 0, 4, 10))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(backend.learner.offer, tasks(0))
        return await waiting

    started = time.monotonic()
    assert [le.task.serial for le in backend.run(scenario())] == [0]
    assert time.monotonic() - started < 5


def test_a_heartbeat_with_a_newer_version_serves_a_waiting_lease(backend: Backend) -> None:
    backend.learner.offer(tasks(*range(6)))
    backend.join()
    assert len(backend.lease(10)) == 4

    async def scenario() -> list[Any]:
        waiting = asyncio.create_task(backend.node.lease("n0", 0, 4, 10))
        await asyncio.sleep(0.1)
        await backend.node.heartbeat(node_report(version=1), [])
        return await waiting

    assert [le.task.serial for le in backend.run(scenario())] == [4, 5]


def test_a_heartbeat_that_a_newer_request_overtook_takes_nothing_back_until_the_next_one_agrees(
    backend: Backend,
) -> None:
    backend.learner.offer(tasks(*range(6)))
    backend.join()
    assert len(backend.lease(10)) == 4
    assert len(backend.lease(10, version=1)) == 2

    async def scenario() -> tuple[list[Any], list[Any]]:
        waiting = asyncio.create_task(backend.node.lease("n0", 2, 4, 10))
        await asyncio.sleep(0.1)
        await backend.node.heartbeat(node_report(version=1), [])  # from before the new weights
        await asyncio.to_thread(backend.learner.offer, tasks(6, 7))
        served = await asyncio.wait_for(waiting, 60)
        waiting = asyncio.create_task(backend.node.lease("n0", 3, 4, 10))
        await asyncio.sleep(0.1)
        for _ in range(2):  # a learner that was started again from an older checkpoint
            await backend.node.heartbeat(node_report(version=2), [])
        await asyncio.to_thread(backend.learner.offer, tasks(8, 9))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await backend.node.heartbeat(node_report(version=3), [])
        return served, await waiting

    served, later = backend.run(scenario())
    assert ([le.task.serial for le in served], [le.task.serial for le in later]) == ([6, 7], [8, 9])


def test_take_gives_the_oldest_ready_groups_with_their_payloads(backend: Backend) -> None:
    backend.learner.offer(tasks(0, 1, 2))
    backend.join()
    leases = backend.lease(3)
    for lease in reversed(leases):
        assert backend.complete(lease)
    taken = backend.learner.take(0, 2, 1.0)
    assert [(g.serial, g.node_id, g.meta, g.payload) for g in taken] == [
        (0, "n0", META, b"group 0"),
        (1, "n0", META, b"group 1"),
    ]


def test_a_straggler_does_not_hold_up_a_step_unless_in_order(backend: Backend) -> None:
    backend.learner.offer(tasks(0, 1, 2))
    backend.join()
    leases = backend.lease(3)
    backend.complete(leases[1])
    backend.complete(leases[2])
    assert backend.learner.take(0, 2, 0.05, in_order=True) is None
    assert [g.serial for g in backend.learner.take(0, 2, 0.0)] == [1, 2]
    assert backend.states()[0] == "leased"


def test_in_order_waits_until_nothing_older_is_missing(backend: Backend) -> None:
    backend.learner.offer(tasks(0, 1, 2))
    backend.join()
    leases = backend.lease(3)
    for lease in (leases[1], leases[2], leases[0]):
        backend.complete(lease)
    assert [g.serial for g in backend.learner.take(0, 2, 0.0, in_order=True)] == [0, 1]


def test_taking_a_step_again_gives_the_same_groups_in_the_same_order(backend: Backend) -> None:
    backend.learner.offer(tasks(*range(4)))
    backend.join()
    leases = backend.lease(4)
    for lease in (leases[1], leases[3]):
        backend.complete(lease)
    first = backend.learner.take(0, 2, 0.0)
    for lease in (leases[0], leases[2]):
        backend.complete(lease)
    restarted = backend.new_learner()
    restarted.attach(learner_report(incarnation=2))
    assert restarted.take(0, 2, 0.0) == first
    assert [g.serial for g in restarted.take(1, 2, 0.0)] == [0, 2]


def test_take_returns_none_when_its_wait_is_over(backend: Backend) -> None:
    started = time.monotonic()
    assert backend.learner.take(0, 1, 0.2) is None
    assert 0.15 < time.monotonic() - started < 3


def test_commit_releases_the_groups_and_may_be_repeated(backend: Backend) -> None:
    backend.learner.offer(tasks(*range(4)))
    backend.join()
    for lease in backend.lease(4):
        backend.complete(lease)
    backend.learner.take(0, 2, 0.0)
    backend.learner.take(1, 2, 0.0)
    held = backend.learner.status().bytes_held
    backend.learner.commit(0)
    backend.learner.commit(0)
    assert backend.states() == {0: "committed", 1: "committed", 2: "taken", 3: "taken"}
    assert backend.learner.status().bytes_held == held // 2
    with pytest.raises(BrokerError, match="step 0 is committed"):
        backend.learner.take(0, 2, 0.0)
    assert [g.serial for g in backend.learner.take(1, 2, 0.0)] == [2, 3]


def test_a_lost_lease_goes_to_another_node_oldest_first(make: Callable[..., Backend]) -> None:
    backend = make(lease_s=1.0)
    backend.learner.offer(tasks(0, 1))
    backend.join("dies")
    assert [le.task.serial for le in backend.lease(1, "dies")] == [0]
    time.sleep(1.1)
    backend.join("lives")
    leases = backend.lease(2, "lives", wait_s=5)
    assert [(le.task.serial, le.attempt) for le in leases] == [(0, 2), (1, 1)]
    status = backend.learner.status()
    assert status.lease_expiries == 1
    assert {n.report.node_id: n.alive for n in status.nodes} == {"dies": False, "lives": True}
    assert backend.learner.ledger()[0].nodes == ["dies", "lives"]


def test_heartbeats_keep_a_lease_and_its_node_alive(make: Callable[..., Backend]) -> None:
    backend = make(lease_s=3.0)
    backend.learner.offer(tasks(0))
    backend.join()
    lease = backend.lease(1)[0]
    for _ in range(11):
        time.sleep(0.3)
        reply = backend.run(backend.node.heartbeat(node_report(), [lease.token]))
        assert reply.lost == []
    assert backend.complete(lease)


def test_heartbeats_renew_a_lease_no_longer_than_max_lease_s(make: Callable[..., Backend]) -> None:
    backend = make(lease_s=5.0, max_lease_s=1.0)
    backend.learner.offer(tasks(0))
    backend.join("stuck")
    backend.join("works")
    lease = backend.lease(1, "stuck")[0]
    assert backend.run(backend.node.heartbeat(node_report("stuck"), [lease.token])).lost == []
    until(lambda: backend.run(backend.node.heartbeat(node_report("stuck"), [lease.token])).lost == [lease.token])
    assert [(le.task.serial, le.attempt) for le in backend.lease(1, "works", wait_s=60)] == [(0, 2)]
    assert "held the lease for 1 s (broker.max_lease_s)" in backend.learner.ledger()[0].reason
    assert [e.detail["node"] for e in backend.learner.events(-1) if e.kind == "lease_overdue"] == ["stuck"]
    assert {n.report.node_id: n.alive for n in backend.learner.status().nodes} == {"stuck": True, "works": True}
    assert not backend.complete(lease, "stuck")


def test_a_result_with_an_old_token_is_refused_and_counted(make: Callable[..., Backend]) -> None:
    backend = make(lease_s=0.2)
    backend.learner.offer(tasks(0))
    backend.join("slow")
    old = backend.lease(1, "slow")[0]
    time.sleep(0.3)
    backend.join("fast")
    new = backend.lease(1, "fast", wait_s=5)[0]
    assert not backend.complete(old, "slow")
    assert backend.complete(new, "fast", b"the one")
    assert not backend.complete(old, "slow")
    assert backend.run(backend.node.heartbeat(node_report("slow"), [old.token])).lost == [old.token]
    status = backend.learner.status()
    assert (status.stale_results, status.tokens_wasted_total) == (2, 2 * META.sampled_tokens)
    assert [g.payload for g in backend.learner.take(0, 1, 0.0)] == [b"the one"]


def test_a_repeated_result_is_accepted_once_and_answered_with_true(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join()
    lease = backend.lease(1)[0]
    assert backend.complete(lease)
    assert backend.complete(lease)
    assert backend.run(backend.node.heartbeat(node_report(), [lease.token])).lost == []
    status = backend.learner.status()
    assert (status.groups_ready, status.stale_results) == (1, 0)


def test_another_nodes_token_is_refused(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join("owner")
    backend.join("thief")
    lease = backend.lease(1, "owner")[0]
    assert not backend.complete(lease, "thief")
    assert backend.complete(lease, "owner")
    assert not backend.complete(lease, "thief")


def test_a_failed_group_is_tried_again_and_dead_after_max_attempts(backend: Backend) -> None:
    backend.learner.offer(tasks(0, 1))
    backend.join()
    for reason in ("first", "second"):
        lease = backend.lease(1)[0]
        assert lease.task.serial == 0
        backend.run(backend.node.fail("n0", lease.token, reason))
    entry = backend.learner.ledger()[0]
    assert (entry.state, entry.attempts, entry.reason) == ("dead", 2, "second")
    assert backend.lease(1)[0].task.serial == 1


def test_places_that_were_passed_on_by_what_is_committed_count_for_ever(backend: Backend) -> None:
    backend.learner.offer(tasks(*range(30)))
    backend.join()
    for step in range(5):
        for lease in backend.lease(10, version=step):
            assert backend.complete(lease)
        [first, _] = backend.learner.take(step, 2, 1.0)
        backend.learner.filter(step, [first.serial], 1)
        assert len(backend.learner.take(step, 2, 1.0)) == 3
        backend.learner.commit(step)
    handed_out = sum(state != "pending" for state in backend.states().values())
    assert handed_out + len(backend.lease(30, version=5)) == 2 * (5 + 1 + 1) + 5, "five places were passed on"


def fail_oldest(backend: Backend, node_id: str) -> int:
    lease = backend.lease(1, node_id)[0]
    backend.run(backend.node.fail(node_id, lease.token, "bad machine"))
    return lease.task.serial


def test_one_bad_node_kills_no_task_while_another_one_works(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join("bad")
    backend.join("good")
    for _ in range(5):
        assert fail_oldest(backend, "bad") == 0
    assert backend.states() == {0: "pending"}
    assert backend.complete(backend.lease(1, "good")[0], "good")
    assert backend.states() == {0: "ready"}


def test_a_task_that_no_other_node_takes_up_dies_of_one_in_the_end(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join("bad")
    backend.join("hangs")
    for _ in range(2 * ALONE):
        assert backend.states() == {0: "pending"}
        fail_oldest(backend, "bad")
    assert backend.states() == {0: "dead"}


def test_a_node_that_is_restarted_again_and_again_kills_no_task_while_another_one_works(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join("good")
    for pid in range(1, 6):
        backend.join("bad", pid=pid)
        assert [le.task.serial for le in backend.lease(1, "bad")] == [0]
    backend.join("bad", pid=6)
    assert backend.states() == {0: "pending"}
    assert backend.complete(backend.lease(1, "good")[0], "good")


@pytest.mark.parametrize("second", ["fails it too", "leaves", "has no weights", "is excluded"])
def test_a_task_that_one_node_failed_often_dies_when_no_other_may_succeed(backend: Backend, second: str) -> None:
    backend.learner.offer(tasks(0))
    backend.join("n0")
    backend.join("n1", version=-1 if second == "has no weights" else 0)
    fail_oldest(backend, "n0")
    if second == "fails it too":
        fail_oldest(backend, "n1")
    else:
        if second == "leaves":
            backend.run(backend.node.leave("n1"))
        if second == "is excluded":
            told = msgspec.structs.replace(node_report("n1"), state="excluded")
            backend.run(backend.node.heartbeat(told, []))
        fail_oldest(backend, "n0")
    entry = backend.learner.ledger()[0]
    assert (entry.state, entry.attempts, entry.reason) == ("dead", 2, "bad machine")


def test_a_dead_task_gives_its_place_in_the_window_to_the_next(backend: Backend) -> None:
    backend.learner.offer(tasks(*range(6)))
    backend.join()
    leases = backend.lease(4)
    assert backend.lease(4) == []
    backend.run(backend.node.fail("n0", leases[1].token, "bad"))
    backend.run(backend.node.fail("n0", backend.lease(4)[0].token, "bad"))
    assert [le.task.serial for le in backend.lease(4)] == [4]


def test_released_leases_do_not_count_as_attempts(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join()
    for _ in range(4):
        lease = backend.lease(1)[0]
        assert lease.attempt == 1
        backend.run(backend.node.release("n0", [lease.token]))
    assert backend.states() == {0: "pending"}


def test_a_node_that_leaves_hands_back_its_leases(backend: Backend) -> None:
    backend.learner.offer(tasks(0, 1))
    backend.join()
    lease = backend.lease(2)[0]
    backend.run(backend.node.leave("n0"))
    assert backend.states() == {0: "pending", 1: "pending"}
    assert backend.learner.status().nodes == []
    assert not backend.complete(lease)


def test_a_restarted_node_loses_the_leases_of_its_former_process_at_once(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join(pid=1)
    old = backend.lease(1)[0]
    backend.join(pid=2)
    assert [(le.task.serial, le.attempt) for le in backend.lease(1)] == [(0, 2)]
    assert not backend.complete(old)


def test_a_process_whose_node_id_was_taken_hears_it_and_takes_nothing_back(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join(pid=1)
    backend.join(pid=2)
    lease = backend.lease(1)[0]
    with pytest.raises(BrokerError, match="'n0' belongs to process 2 on host now; every node needs an id of its own"):
        backend.run(backend.node.heartbeat(node_report(pid=1), []))
    assert backend.run(backend.node.heartbeat(node_report(pid=2), [lease.token])).lost == []


def test_regenerated_groups_are_replaced_and_come_back_later(backend: Backend) -> None:
    backend.learner.offer(tasks(*range(4)))
    backend.join()
    for lease in backend.lease(4):
        backend.complete(lease)
    backend.learner.take(0, 2, 0.0)
    backend.learner.regenerate(0, [0])
    backend.learner.regenerate(0, [0])
    assert [g.serial for g in backend.learner.take(0, 2, 0.0)] == [1, 2]
    again = backend.lease(1)[0]
    assert again.task.serial == 0
    assert backend.complete(again, payload=b"fresh")
    assert [(g.serial, g.payload) for g in backend.learner.take(1, 2, 0.0)] == [(0, b"fresh"), (3, b"group 3")]
    assert backend.learner.status().tokens_wasted_total == META.sampled_tokens


def filled(backend: Backend, count: int) -> None:
    """`count` tasks offered; those in the window of version 0 ready."""
    backend.learner.offer(tasks(*range(count)))
    backend.join()
    for lease in backend.lease(count):
        backend.complete(lease)


def test_a_filtered_group_stays_with_its_step_which_takes_another_one(backend: Backend) -> None:
    filled(backend, 6)
    assert [g.serial for g in backend.learner.take(0, 2, 0.0)] == [0, 1]
    backend.learner.filter(0, [0], 4)
    backend.learner.filter(0, [0], 4)
    assert [(g.serial, g.payload) for g in backend.learner.take(0, 2, 0.0)] == [
        (0, b"group 0"),
        (1, b"group 1"),
        (2, b"group 2"),
    ]
    backend.learner.commit(0)
    ledger = {e.serial: (e.state, e.step, e.filtered) for e in backend.learner.ledger()}
    assert ledger[0] == ("committed", 0, True)
    assert ledger[1] == ledger[2] == ("committed", 0, False)
    status = backend.learner.status()
    assert (status.groups_filtered, status.groups_committed) == (1, 3)


def test_a_filtered_group_gives_its_place_in_the_window_to_the_next_task(backend: Backend) -> None:
    filled(backend, 8)
    assert backend.lease(8) == []
    backend.learner.take(0, 2, 0.0)
    backend.learner.filter(0, [0, 1], 1)  # only one of them passes its place on
    assert [le.task.serial for le in backend.lease(8)] == [4]
    backend.learner.filter(0, [0, 1], 1)
    assert backend.lease(8) == []


def test_a_lease_that_waits_is_served_when_a_group_is_filtered(backend: Backend) -> None:
    filled(backend, 8)
    backend.learner.take(0, 2, 0.0)

    async def scenario() -> list[Any]:
        waiting = asyncio.create_task(backend.node.lease("n0", 0, 4, 10))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(backend.learner.filter, 0, [1], 4)
        return await waiting

    assert [le.task.serial for le in backend.run(scenario())] == [4]


def test_a_restarted_learner_gets_a_steps_filtered_groups_too_in_the_same_order(backend: Backend) -> None:
    filled(backend, 8)
    backend.learner.take(0, 2, 0.0)
    backend.learner.filter(0, [0, 1], 4)
    backend.learner.take(0, 2, 0.0)
    backend.learner.filter(0, [3], 4)
    for lease in backend.lease(8):
        backend.complete(lease)
    first = backend.learner.take(0, 2, 0.0)
    assert [g.serial for g in first] == [0, 1, 2, 3, 4]
    restarted = backend.new_learner()
    restarted.attach(learner_report(incarnation=2))
    assert restarted.take(0, 2, 0.0) == first
    restarted.filter(0, [0, 1, 3], 4)
    assert restarted.take(0, 2, 0.0) == first
    assert restarted.status().steps_taken == 1
    assert [g.serial for g in restarted.take(1, 2, 0.0)] == [5, 6]


def test_what_a_step_does_not_hold_cannot_be_filtered(backend: Backend) -> None:
    filled(backend, 6)
    backend.learner.take(0, 2, 0.0)
    backend.learner.filter(0, [2, 3], 4)  # ready, so not the step's: as a late repetition would find them
    assert backend.learner.status().groups_filtered == 0
    backend.learner.commit(0)
    for serial in (0, 99):
        with pytest.raises(BrokerError, match=f"task {serial} cannot be filtered: it is not taken by step 0"):
            backend.learner.filter(0, [serial], 4)


def test_a_filtered_group_is_not_generated_again(backend: Backend) -> None:
    filled(backend, 6)
    backend.learner.take(0, 2, 0.0)
    backend.learner.filter(0, [0], 4)
    backend.learner.regenerate(0, [0, 1])
    assert backend.states() == {0: "taken", 1: "pending", 2: "ready", 3: "ready", 4: "pending", 5: "pending"}
    assert [g.serial for g in backend.learner.take(0, 2, 0.0)] == [0, 2, 3]


def test_a_full_broker_leases_only_what_the_next_step_needs_and_drops_nothing(make: Callable[..., Backend]) -> None:
    backend = make(max_bytes=1000)
    backend.learner.offer(tasks(*range(40)))
    backend.join()
    committed = 0
    most_bytes = 0
    for step in range(20):
        while leases := backend.lease(10, version=step):
            assert all(backend.complete(le, payload=bytes(600)) for le in leases)
            most_bytes = max(most_bytes, backend.learner.status().bytes_held)
        taken = backend.learner.take(step, 2, 0.0)
        assert taken is not None, "the learner must always get its next step"
        if step % 4 == 3:
            backend.learner.commit(step)
            committed += 8
    assert backend.learner.status().groups_committed == committed
    # 4 uncommitted steps of 2 groups, and one step more: less than the window of groups would allow without a bound
    assert most_bytes <= 10 * 600


def test_status_says_when_the_bound_on_memory_is_reached(make: Callable[..., Backend]) -> None:
    backend = make(max_bytes=1000)
    backend.learner.offer(tasks(0, 1, 2))
    backend.join()
    first, second = backend.lease(2)
    assert not backend.learner.status().full
    assert backend.complete(first, payload=bytes(600))
    assert backend.learner.status().full  # the other one, which is on its way, would bring as much
    assert backend.complete(second, payload=bytes(100))
    assert not backend.learner.status().full


def test_drain_is_told_once_the_learner_is_done(backend: Backend) -> None:
    backend.join()
    backend.learner.attach(learner_report("starting"))
    for state, drain in (("training", False), ("failed", False), ("done", True)):
        backend.learner.report(learner_report(state))
        assert backend.run(backend.node.heartbeat(node_report(), [])).drain is drain


def test_a_replaced_learner_is_fenced(backend: Backend) -> None:
    backend.learner.attach(learner_report(incarnation=1))
    successor = backend.new_learner()
    successor.attach(learner_report(incarnation=2))
    for action in (
        lambda: backend.learner.take(0, 1, 0.0),
        lambda: backend.learner.commit(0),
        lambda: backend.learner.offer(tasks(0)),
        lambda: backend.learner.report(learner_report(incarnation=1)),
    ):
        with pytest.raises(BrokerError, match="incarnation 1 was replaced by incarnation 2"):
            action()
    assert successor.offer(tasks(0)) == 1


def test_of_two_learners_with_one_incarnation_the_second_is_refused_while_the_first_is_alive(backend: Backend) -> None:
    backend.learner.attach(learner_report(instance="a"))
    second = backend.new_learner()
    for action in (second.attach, second.report):
        with pytest.raises(BrokerError, match="learner incarnation 1 is alive already: process 5, training, seen"):
            action(learner_report(instance="b"))
    assert backend.learner.offer(tasks(0)) == 1
    assert backend.learner.status().learner.instance == "a"


def test_a_learner_of_the_same_incarnation_replaces_one_that_ended_and_fences_it(backend: Backend) -> None:
    backend.learner.attach(learner_report(instance="a"))
    backend.learner.report(learner_report("failed", instance="a"))
    second = backend.new_learner()
    second.attach(learner_report(instance="b"))
    for action in (
        lambda: backend.learner.take(0, 1, 0.0),
        lambda: backend.learner.commit(0),
        lambda: backend.learner.offer(tasks(0)),
        lambda: backend.learner.report(learner_report(instance="a")),
        lambda: backend.learner.attach(learner_report(instance="a")),
    ):
        with pytest.raises(BrokerError, match="incarnation 1 was replaced by another process of the same incarnation"):
            action()
    assert second.offer(tasks(0)) == 1


def test_attach_tells_the_store_and_what_is_committed(make: Callable[..., Backend]) -> None:
    backend = make()
    first = backend.learner.attach(learner_report())
    assert (first.next_serial, first.committed_step) == (0, -1)
    filled(backend, 4)
    backend.learner.take(0, 2, 0.0)
    backend.learner.take(1, 2, 0.0)
    backend.learner.commit(0)
    again = backend.new_learner().attach(learner_report(incarnation=2))
    assert (again.next_serial, again.committed_step) == (4, 0)
    assert again.store_id == first.store_id
    assert make().learner.attach(learner_report()).store_id not in ("", first.store_id)


def test_a_drained_learner_is_shown_as_drained_and_its_weights_are_no_longer_offered(backend: Backend) -> None:
    backend.join()
    for state, address in (
        ("training", "tcp://weights"),
        ("drained", ""),
        ("failed", ""),
        ("training", "tcp://weights"),
    ):
        backend.learner.report(learner_report(state, weights="tcp://weights"))
        reply = backend.run(backend.node.heartbeat(node_report(), []))
        assert (reply.weights_address, reply.drain) == (address, False)
        assert backend.learner.status().learner.state == state
    assert [e.kind for e in backend.learner.events(-1)] == ["join", "learner_drained", "learner_failed"]


def test_the_window_starts_at_the_step_of_a_learner_that_resumes_with_a_new_broker(backend: Backend) -> None:
    assert backend.learner.attach(learner_report(step=40)).next_serial == 0
    backend.learner.offer(tasks(*range(10)))
    backend.learner.commit(39)
    backend.join()
    assert backend.lease(10, version=38) == []
    assert [le.task.serial for le in backend.lease(10, version=40)] == [0, 1, 2, 3]
    backend.learner.attach(learner_report(incarnation=2, step=41))
    assert [le.task.serial for le in backend.lease(10, version=41)] == [4, 5]


def test_token_totals_survive_a_nodes_restart_and_leave(backend: Backend) -> None:
    backend.join(pid=1)
    backend.run(backend.node.heartbeat(node_report(pid=1, generated=100, wasted=7), []))
    backend.join(pid=2)
    backend.run(backend.node.heartbeat(node_report(pid=2, generated=50), []))
    backend.run(backend.node.leave("n0"))
    status = backend.learner.status()
    assert (status.tokens_generated_total, status.tokens_wasted_total) == (150, 7)


def test_events_tell_what_happened_in_order(backend: Backend) -> None:
    backend.learner.attach(learner_report())
    backend.learner.offer(tasks(0))
    backend.join()
    lease = backend.lease(1)[0]
    backend.run(backend.node.fail("n0", lease.token, "why"))
    backend.run(backend.node.leave("n0"))
    events = backend.learner.events(-1)
    assert [e.kind for e in events] == ["learner_attached", "join", "first_lease", "group_failed", "leave"]
    assert events[3].detail == {"serial": 0, "node": "n0", "reason": "why"}
    assert [e.kind for e in backend.learner.events(events[2].index)] == ["group_failed", "leave"]


def test_generated_tokens_count_groups_that_no_heartbeat_has_reported_yet(backend: Backend) -> None:
    backend.learner.attach(learner_report())
    backend.learner.offer(tasks(0))
    backend.join()
    lease = backend.lease(1)[0]
    for _ in range(2):  # the second is a repetition, and counts once
        assert backend.run(backend.node.complete("n0", lease.token, GroupMeta(0, 0, 1.0, 321), b"x"))
    assert backend.learner.status().tokens_generated_total == 321


# ---------------------------------------------------------------- waste


def wasted(backend: Backend, node_id: str | None = None) -> dict[str, Waste]:
    """By reason, of the run or of a node; without reasons under which nothing was lost."""
    status = backend.learner.status()
    found = status.waste if node_id is None else {n.report.node_id: n.waste for n in status.nodes}[node_id]
    assert status.tokens_wasted_total == wasted_tokens(status.waste)
    return {reason: spent for reason, spent in found.items() if spent != Waste()}


def test_a_failed_group_counts_what_it_took_once_under_its_node(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join()
    lease = backend.lease(1)[0]
    for _ in range(2):  # the second has no lease any more
        backend.run(backend.node.fail("n0", lease.token, "bad day", 120, 3.5))
    assert wasted(backend, "n0") == wasted(backend) == {"failed": Waste(120, 3.5)}


def test_filtered_and_regenerated_groups_count_once_under_the_node_that_made_them(backend: Backend) -> None:
    filled(backend, 4)
    backend.join("other")
    backend.learner.take(0, 2, 0.0)
    for _ in range(2):
        backend.learner.filter(0, [0], 0)
        backend.learner.regenerate(0, [0, 1])
    assert wasted(backend, "n0") == {"filtered": Waste(10, 2.5), "regenerated": Waste(10, 2.5)}
    assert wasted(backend, "other") == {}
    backend.run(backend.node.leave("n0"))
    assert wasted(backend) == {"filtered": Waste(10, 2.5), "regenerated": Waste(10, 2.5)}


def test_a_lost_lease_counts_its_seconds_and_a_late_result_its_tokens(make: Callable[..., Backend]) -> None:
    backend = make(lease_s=0.3)
    backend.learner.offer(tasks(0))
    backend.join()
    lease = backend.lease(1)[0]
    time.sleep(0.5)
    lost = wasted(backend, "n0")
    assert list(lost) == ["lost"]
    assert lost["lost"].tokens == 0
    assert 0.3 <= lost["lost"].seconds < 30
    assert not backend.complete(lease)
    assert wasted(backend, "n0") == {"lost": Waste(10, lost["lost"].seconds)}


def test_what_a_node_reports_adds_up_over_its_processes_and_survives_its_leaving(backend: Backend) -> None:
    def beat(pid: int, tokens: int, seconds: float) -> None:
        spent = {"cancelled": Waste(tokens, 0.0), "waiting": Waste(0, seconds)}
        report = msgspec.structs.replace(node_report(pid=pid, wasted=tokens), waste=spent)
        backend.run(backend.node.heartbeat(report, []))

    backend.join(pid=1)
    beat(1, 5, 1.0)
    beat(1, 7, 2.0)
    backend.join(pid=2)
    beat(2, 1, 0.5)
    assert wasted(backend, "n0") == wasted(backend) == {"cancelled": Waste(8, 0.0), "waiting": Waste(0, 2.5)}
    backend.run(backend.node.leave("n0"))
    assert wasted(backend) == {"cancelled": Waste(8, 0.0), "waiting": Waste(0, 2.5)}


def test_the_learners_own_waste_is_shown_with_its_report(backend: Backend) -> None:
    backend.learner.report(msgspec.structs.replace(learner_report(), waste={"masked": Waste(9)}))
    assert backend.learner.status().learner.waste == {"masked": Waste(9)}
    assert wasted(backend) == {}
