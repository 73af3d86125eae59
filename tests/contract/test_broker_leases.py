"""Leases: who gets which task, for how long, and how often."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from broker.delivery.node_rules import ALONE
from broker.delivery.nodes import FORGET_AFTER_S, MOST_LEFT
from common.errors import BrokerError
from common.waste import Waste
from tests.contract.backends import GROUPS_PER_STEP, LEASE_S, META, Backend, tasks
from tests.rigs.brokers import node_report
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until


def test_a_node_hears_about_the_run_and_leases_nothing_before_it_has_weights(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    with refused(BrokerError, "node n0 "):
        backend.lease(1)
    run = backend.run(backend.node.register(node_report(version=-1)))
    assert run.name.startswith("test")
    assert (run.groups_per_step, run.config) == (GROUPS_PER_STEP, b'{"a": 1}')
    assert backend.lease(1, version=-1) == []


def test_leases_are_the_oldest_tasks_inside_the_staleness_window(backend: Backend) -> None:
    backend.begin(10)
    assert [le.task.serial for le in backend.lease(3)] == [0, 1, 2]
    assert [le.task.serial for le in backend.lease(10)] == [3]  # 2 groups a step, one step ahead: serials 0 to 3
    assert backend.lease(10) == []
    assert [le.task.serial for le in backend.lease(10, version=2)] == [4, 5, 6, 7]


def test_a_waiting_lease_is_served_by_an_offer_and_by_a_heartbeat_with_a_newer_version(backend: Backend) -> None:
    backend.join()
    assert backend.lease_when(lambda: backend.learner.offer(tasks(0))) == [0]
    backend.learner.offer(tasks(1, 2, 3, 4, 5))
    assert len(backend.lease(10)) == 3
    assert backend.lease_when(lambda: backend.node.heartbeat(node_report(version=1), [])) == [4, 5]


def test_a_heartbeat_that_a_newer_request_overtook_takes_nothing_back_until_the_next_one_agrees(
    backend: Backend,
) -> None:
    backend.begin(6)
    assert len(backend.lease(10)) == 4
    assert len(backend.lease(10, version=1)) == 2

    async def beaten_and_offered(version: int, beats: int, *serials: int) -> None:
        for _ in range(beats):
            await backend.node.heartbeat(node_report(version=version), [])
        await asyncio.to_thread(backend.learner.offer, tasks(*serials))

    # from before the new weights
    assert backend.lease_when(lambda: beaten_and_offered(1, 1, 6, 7), version=2) == [6, 7]
    served: list[int] = []

    async def from_an_older_checkpoint() -> None:
        await beaten_and_offered(2, 2, 8, 9)  # a learner that was started again
        await asyncio.sleep(0.3)
        served.extend(e.serial for e in await asyncio.to_thread(backend.learner.ledger) if e.state == "leased")
        await backend.node.heartbeat(node_report(version=3), [])

    assert backend.lease_when(from_an_older_checkpoint, version=3) == [8, 9]
    assert not {8, 9} & set(served)


def test_heartbeats_keep_a_lease_and_its_node_alive(backend: Backend) -> None:
    backend.begin(1)
    lease = backend.lease(1)[0]
    for _ in range(4):
        backend.pass_time(0.8 * LEASE_S)
        assert backend.beat(node_report(), lease.token).lost == []
    assert backend.complete(lease)


def test_heartbeats_renew_a_lease_no_longer_than_max_lease_s(make: Callable[..., Backend]) -> None:
    backend = make(max_lease_s=2 * LEASE_S)
    backend.learner.offer(tasks(0))
    backend.join("stuck")
    backend.join("works")
    lease = backend.lease(1, "stuck")[0]
    for lost in ([], [], [lease.token]):
        assert backend.beat(node_report("stuck"), lease.token).lost == lost
        if not lost:
            backend.pass_time(0.8 * LEASE_S)
            backend.beat(node_report("stuck"), lease.token)
            backend.beat(node_report("works"))
            backend.pass_time(0.4 * LEASE_S)
    assert [(le.task.serial, le.attempt) for le in backend.lease(1, "works", wait_s=LIMIT_S)] == [(0, 2)]
    reason = backend.learner.ledger()[0].reason
    assert "60 s" in reason and "broker.max_lease_s" in reason
    assert [e.detail["node"] for e in backend.learner.events(-1) if e.kind == "lease_overdue"] == ["stuck"]
    assert {n.report.node_id: n.alive for n in backend.learner.status().nodes} == {"stuck": True, "works": True}
    assert not backend.complete(lease, "stuck")


def test_a_lost_lease_goes_to_another_node_oldest_first_and_late_results_are_refused_and_counted(
    backend: Backend,
) -> None:
    backend.learner.offer(tasks(0, 1))
    backend.join("slow")
    [old] = backend.lease(1, "slow")
    backend.pass_time(LEASE_S + 1)
    # a server that reads two requests in one turn has answered both before it looks for lost leases
    lost = until(lambda: backend.wasted("slow").get("lost"), "the lease to be lost")
    assert lost.tokens == 0 and LEASE_S + 1 <= lost.seconds < LEASE_S + LIMIT_S
    backend.join("fast")
    new, _ = leases = backend.lease(2, "fast", wait_s=LIMIT_S)
    assert [(le.task.serial, le.attempt) for le in leases] == [(0, 2), (1, 1)]
    status = backend.learner.status()
    assert status.lease_expiries == 1
    assert {n.report.node_id: n.alive for n in status.nodes} == {"slow": False, "fast": True}
    assert backend.learner.ledger()[0].nodes == ["slow", "fast"]
    assert not backend.complete(old, "slow")
    assert backend.complete(new, "fast", b"the one")
    assert not backend.complete(old, "slow")
    assert backend.beat(node_report("slow"), old.token).lost == [old.token]
    status = backend.learner.status()
    assert (status.stale_results, status.tokens_wasted_total) == (2, 2 * META.sampled_tokens)
    assert backend.wasted("slow") == {"lost": Waste(2 * META.sampled_tokens, lost.seconds)}
    assert [g.payload for g in backend.learner.take(0, 1, 0.0)] == [b"the one"]


def test_a_repeated_result_is_accepted_once_and_another_nodes_token_is_refused(backend: Backend) -> None:
    backend.begin(1)
    backend.join("thief")
    lease = backend.lease(1)[0]
    assert not backend.complete(lease, "thief")
    for _ in range(2):
        assert backend.complete(lease)
        assert backend.beat(node_report(), lease.token).lost == []
    status = backend.learner.status()
    assert (status.groups_ready, status.stale_results) == (1, 1)
    assert not backend.complete(lease, "thief")


@pytest.mark.parametrize("bad", ["fails", "is restarted"])
def test_one_bad_node_kills_no_task_while_another_one_works(backend: Backend, bad: str) -> None:
    backend.learner.offer(tasks(0))
    backend.join("bad")
    backend.join("good")
    for pid in range(2, 7):
        [lease] = backend.lease(1, "bad")
        if bad == "fails":
            backend.fail("bad", lease=lease)
        else:
            backend.join("bad", pid=pid)
    assert backend.states() == {0: "pending"}
    assert backend.complete(backend.lease(1, "good")[0], "good")
    assert backend.states() == {0: "ready"}


def test_a_container_that_starts_again_with_the_host_and_the_pid_of_its_predecessor_has_not_its_leases(
    backend: Backend,
) -> None:
    backend.learner.offer(tasks(0))
    backend.join("pod", instance="first")
    [lease] = backend.lease(1, "pod")
    backend.join("pod", instance="first")
    assert backend.states() == {0: "leased"}, "the same process registers with a new broker"
    backend.join("pod", instance="second")
    assert backend.states() == {0: "pending"}
    assert not backend.complete(lease, "pod")


def test_nodes_that_left_are_still_shown_and_told_from_those_that_are_there(backend: Backend) -> None:
    def shown() -> tuple[list[str], list[str]]:
        status = backend.learner.status()
        return [n.report.node_id for n in status.nodes], [n.report.node_id for n in status.left]

    for node in ("n0", "n1"):
        backend.join(node)
    backend.leave("n1")
    assert shown() == (["n0"], ["n1"])
    backend.join("n1")
    assert shown() == (["n0", "n1"], [])
    for number in range(2 * MOST_LEFT):
        backend.join(f"x{number}")
        backend.leave(f"x{number}")
    assert shown()[1] == [f"x{number}" for number in range(MOST_LEFT, 2 * MOST_LEFT)], "the newest ones"


def test_a_node_that_died_is_not_shown_as_one_that_left_when_it_is_forgotten(backend: Backend) -> None:
    backend.join("n0")
    for _ in range(2):  # it is dead, then forgotten
        backend.pass_time(2 * FORGET_AFTER_S)
        status = backend.learner.status()
    assert status.nodes == status.left == []


def test_a_task_that_no_other_node_takes_up_dies_of_one_in_the_end(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join("bad")
    backend.join("hangs")
    for _ in range(2 * ALONE):
        assert backend.states() == {0: "pending"}
        backend.fail("bad")
    assert backend.states() == {0: "dead"}


@pytest.mark.parametrize("second", ["is none", "fails it too", "leaves", "has no weights", "is excluded"])
def test_a_task_that_one_node_failed_often_dies_when_no_other_may_succeed(backend: Backend, second: str) -> None:
    backend.begin(2)
    if second != "is none":
        backend.join("n1", version=-1 if second == "has no weights" else 0)
    assert backend.fail(reason="first") == 0
    if second == "leaves":
        backend.leave("n1")
    if second == "is excluded":
        backend.beat(msgspec.structs.replace(node_report("n1"), state="excluded"))
    assert backend.fail("n1" if second == "fails it too" else "n0") == 0
    entry = backend.learner.ledger()[0]
    assert (entry.state, entry.attempts, entry.reason) == ("dead", 2, "bad machine")
    assert backend.lease(1)[0].task.serial == 1


def test_a_dead_task_gives_its_place_in_the_window_to_the_next(backend: Backend) -> None:
    backend.begin(6)
    leases = backend.lease(4)
    assert backend.lease(4) == []
    backend.fail(lease=leases[1])
    backend.fail()
    assert [le.task.serial for le in backend.lease(4)] == [4]


def test_leases_that_are_released_or_left_behind_do_not_count_as_attempts(backend: Backend) -> None:
    backend.begin(2)
    for _ in range(4):
        lease, _ = leases = backend.lease(2)
        assert [le.attempt for le in leases] == [1, 1]
        backend.run(backend.node.release("n0", [le.token for le in leases]))
    backend.lease(1)
    backend.leave()
    assert [(e.state, e.attempts) for e in backend.learner.ledger()] == [("pending", 0), ("pending", 0)]
    assert backend.learner.status().nodes == []
    assert not backend.complete(lease)


def test_a_new_process_takes_a_nodes_leases_at_once_and_the_former_one_takes_nothing_back(backend: Backend) -> None:
    backend.learner.offer(tasks(0))
    backend.join(pid=1)
    [old] = backend.lease(1)
    backend.join(pid=2)
    [lease] = backend.lease(1)
    assert (lease.task.serial, lease.attempt) == (0, 2)
    assert not backend.complete(old)
    with refused(BrokerError, "'n0'", "process 2 on host"):
        backend.beat(node_report(pid=1))
    assert backend.beat(node_report(pid=2), lease.token).lost == []
