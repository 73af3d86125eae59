"""Groups: taken, filtered, generated again and committed; what they cost and what was wasted."""

import time
from collections.abc import Callable

from common.errors import BrokerError
from common.rollouts import GroupMeta
from common.waste import Waste
from tests.contract.backends import META, Backend
from tests.rigs.brokers import learner_report, node_report
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until


def test_a_straggler_does_not_delay_a_step_unless_it_takes_groups_in_order(backend: Backend) -> None:
    backend.begin(4)
    leases = backend.lease(4)
    for serial in (1, 2):
        backend.complete(leases[serial])
    started = time.monotonic()
    assert backend.learner.take(0, 2, 0.2, in_order=True) is None
    assert time.monotonic() - started > 0.15, "it waits"
    assert [g.serial for g in backend.learner.take(0, 2, 0.0)] == [1, 2]
    assert backend.states()[0] == "leased"
    for serial in (3, 0):
        assert backend.learner.take(1, 2, 0.0, in_order=True) is None
        backend.complete(leases[serial])
    assert [g.serial for g in backend.learner.take(1, 2, 0.0, in_order=True)] == [0, 3]


def test_take_gives_the_oldest_ready_groups_and_taking_a_step_again_the_same_ones(backend: Backend) -> None:
    backend.begin(4)
    leases = backend.lease(4)
    for serial in (3, 1):
        assert backend.complete(leases[serial])
    first = backend.learner.take(0, 2, 1.0)
    assert [(g.serial, g.node_id, g.meta, g.payload) for g in first] == [
        (1, "n0", META, b"group 1"),
        (3, "n0", META, b"group 3"),
    ]
    for serial in (0, 2):
        assert backend.complete(leases[serial])
    restarted = backend.new_learner()
    restarted.attach(learner_report(incarnation=2))
    assert restarted.take(0, 2, 0.0) == first
    assert [g.serial for g in restarted.take(1, 2, 0.0)] == [0, 2]


def test_a_look_gives_ready_groups_and_moves_none(backend: Backend) -> None:
    backend.begin(5)
    leases = backend.lease(4)
    assert backend.learner.look(0, 4, []) == []
    for serial in (3, 1):
        assert backend.complete(leases[serial])
    before, events = backend.states(), backend.learner.events(-1)
    seen = backend.learner.look(0, 4, [])
    assert [(g.serial, g.payload, g.meta) for g in seen] == [(1, b"group 1", META), (3, b"group 3", META)]
    assert [g.serial for g in backend.learner.look(0, 1, [])] == [1]
    assert [g.serial for g in backend.learner.look(0, 4, [seen[0].token])] == [3]
    assert backend.states() == before
    assert backend.learner.events(-1) == events
    assert backend.complete(leases[0])
    assert [g.serial for g in backend.learner.take(0, 2, 0.0)] == [0, 1], "as if nobody had looked"
    assert [g.serial for g in backend.learner.look(1, 4, [])] == [3], "what a step took is not ready"


def test_groups_that_the_learner_holds_come_without_payload(backend: Backend) -> None:
    backend.fill(4)
    held = [group.token for group in backend.learner.look(0, 2, [])][1:]
    first = backend.learner.take(0, 2, 0.0, held=held)
    assert [(g.serial, g.payload, g.held) for g in first] == [(0, b"group 0", False), (1, b"", True)]
    assert [(g.serial, g.payload) for g in backend.learner.take(0, 2, 0.0)] == [(0, b"group 0"), (1, b"group 1")]
    assert [g.payload for g in backend.learner.take(1, 2, 0.0, held=held)] == [b"group 2", b"group 3"]


def test_a_group_that_is_generated_again_is_another_one_for_a_learner_that_holds_it(backend: Backend) -> None:
    backend.fill(4)
    held = [group.token for group in backend.learner.look(0, 4, [])]
    backend.learner.take(0, 2, 0.0, held=held)
    backend.learner.regenerate(0, [0])
    assert backend.complete(backend.lease(1)[0], payload=b"fresh")
    assert [(g.serial, g.payload) for g in backend.learner.look(0, 4, held)] == [(0, b"fresh")]
    taken = backend.learner.take(0, 2, 0.0, held=held)
    assert [(g.serial, g.payload, g.held) for g in taken] == [(1, b"", True), (0, b"fresh", False)]


def test_commit_releases_the_groups_and_may_be_repeated(backend: Backend) -> None:
    backend.fill(4)
    backend.learner.take(0, 2, 0.0)
    backend.learner.take(1, 2, 0.0)
    held = backend.learner.status().bytes_held
    backend.learner.commit(0)
    backend.learner.commit(0)
    assert backend.states() == {0: "committed", 1: "committed", 2: "taken", 3: "taken"}
    assert backend.learner.status().bytes_held == held // 2
    with refused(BrokerError, "step 0", "up to 0"):
        backend.learner.take(0, 2, 0.0)
    assert [g.serial for g in backend.learner.take(1, 2, 0.0)] == [2, 3]


def test_places_that_were_passed_on_by_what_is_committed_count_for_ever(backend: Backend) -> None:
    backend.begin(30)
    for step in range(5):
        for lease in backend.lease(10, version=step):
            assert backend.complete(lease)
        [first, _] = backend.learner.take(step, 2, 1.0)
        backend.learner.filter(step, [first.serial], 1)
        assert len(backend.learner.take(step, 2, 1.0)) == 3
        backend.learner.commit(step)
    handed_out = sum(state != "pending" for state in backend.states().values())
    assert handed_out + len(backend.lease(30, version=5)) == 2 * (5 + 1 + 1) + 5, "five places were passed on"


def test_regenerated_groups_are_replaced_and_come_back_later(backend: Backend) -> None:
    backend.fill(4)
    backend.learner.take(0, 2, 0.0)
    backend.learner.regenerate(0, [0])
    backend.learner.regenerate(0, [0])
    assert [g.serial for g in backend.learner.take(0, 2, 0.0)] == [1, 2]
    again = backend.lease(1)[0]
    assert again.task.serial == 0
    assert backend.complete(again, payload=b"fresh")
    assert [(g.serial, g.payload) for g in backend.learner.take(1, 2, 0.0)] == [(0, b"fresh"), (3, b"group 3")]
    assert backend.learner.status().tokens_wasted_total == META.sampled_tokens


def test_a_filtered_group_stays_with_its_step_which_takes_another_one(backend: Backend) -> None:
    backend.fill(6)
    assert [g.serial for g in backend.learner.take(0, 2, 0.0)] == [0, 1]
    backend.learner.filter(0, [0], 4)
    backend.learner.filter(0, [0], 4)
    backend.learner.regenerate(0, [0])
    assert backend.states()[0] == "taken", "it is not generated again"
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
    backend.fill(8)
    assert backend.lease(8) == []
    backend.learner.take(0, 2, 0.0)
    backend.learner.filter(0, [0, 1], 1)  # only one of them passes its place on
    assert [le.task.serial for le in backend.lease(8)] == [4]
    backend.learner.filter(0, [0, 1], 1)
    assert backend.lease(8) == []
    backend.learner.take(0, 2, 0.0)
    assert backend.lease_when(lambda: backend.learner.filter(0, [2], 4)) == [5], "a lease that waits is served"


def test_what_a_step_does_not_hold_cannot_be_filtered(backend: Backend) -> None:
    backend.fill(6)
    backend.learner.take(0, 2, 0.0)
    backend.learner.filter(0, [2, 3], 4)  # ready, so not the step's: as a late repetition would find them
    assert backend.learner.status().groups_filtered == 0
    backend.learner.commit(0)
    for serial in (0, 99):
        with refused(BrokerError, f"task {serial} ", "step 0"):
            backend.learner.filter(0, [serial], 4)


def test_a_full_broker_leases_only_what_the_next_step_needs_and_drops_nothing(make: Callable[..., Backend]) -> None:
    backend = make(max_bytes=1000)
    backend.begin(40)
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


def test_groups_beyond_the_memory_are_taken_as_they_were_handed_in_by_a_learner_that_resumes_too(
    make: Callable[..., Backend],
) -> None:
    backend = make(max_staleness=3)
    backend.begin(8)
    leases = backend.lease(8)
    payloads = {lease.task.serial: b"%d" % lease.task.serial * 600 for lease in leases}
    assert all(backend.complete(lease, payload=payloads[lease.task.serial]) for lease in leases)
    bound = backend.learner.status().run.memory_bytes
    if bound:
        until(lambda: backend.learner.status().bytes_in_memory <= bound, "groups that are in the store only")
    assert backend.learner.status().bytes_held == 8 * 600
    for incarnation in (1, 2):
        learner = backend.new_learner()
        learner.attach(learner_report(incarnation=incarnation))
        for step in range(4):
            taken = learner.take(step, 2, LIMIT_S)
            assert taken is not None
            assert [(g.serial, g.payload) for g in taken] == [(n, payloads[n]) for n in (2 * step, 2 * step + 1)]
    backend.learner = learner
    backend.learner.commit(3)
    assert backend.learner.status().bytes_in_memory == 0


def test_status_says_when_the_bound_on_memory_is_reached(make: Callable[..., Backend]) -> None:
    backend = make(max_bytes=1000)
    backend.begin(3)
    first, second = backend.lease(2)
    assert not backend.learner.status().full
    assert backend.complete(first, payload=bytes(600))
    assert backend.learner.status().full  # the other one, which is on its way, would bring as much
    assert backend.complete(second, payload=bytes(100))
    assert not backend.learner.status().full


def test_a_result_and_a_failure_count_once_before_a_heartbeat_reports_them(backend: Backend) -> None:
    backend.begin(2)
    result, failed = backend.lease(2)
    for _ in range(2):  # the second time neither has a lease any more
        assert backend.run(backend.node.complete("n0", result.token, GroupMeta(0, 0, 1.0, 321), b"x"))
        backend.run(backend.node.fail("n0", failed.token, "bad day", 120, 3.5))
    assert backend.learner.status().tokens_generated_total == 321
    assert backend.wasted("n0") == backend.wasted() == {"failed": Waste(120, 3.5)}


def test_filtered_and_regenerated_groups_count_once_under_the_node_that_made_them(backend: Backend) -> None:
    backend.fill(4)
    backend.join("other")
    backend.learner.take(0, 2, 0.0)
    for _ in range(2):
        backend.learner.filter(0, [0], 0)
        backend.learner.regenerate(0, [0, 1])
    assert backend.wasted("n0") == {"filtered": Waste(10, 2.5), "regenerated": Waste(10, 2.5)}
    assert backend.wasted("other") == {}
    backend.leave()
    assert backend.wasted() == {"filtered": Waste(10, 2.5), "regenerated": Waste(10, 2.5)}


def test_what_a_node_reports_adds_up_over_its_processes_and_survives_its_leaving(backend: Backend) -> None:
    def beat(pid: int, tokens: int, seconds: float) -> None:
        spent = {"cancelled": Waste(tokens, 0.0), "waiting": Waste(0, seconds)}
        backend.beat(node_report(pid=pid, tokens_generated=10 * tokens, tokens_wasted=tokens, waste=spent))

    backend.join(pid=1)
    beat(1, 5, 1.0)
    beat(1, 7, 2.0)
    backend.join(pid=2)
    beat(2, 1, 0.5)
    total = {"cancelled": Waste(8, 0.0), "waiting": Waste(0, 2.5)}
    assert backend.wasted("n0") == backend.wasted() == total
    backend.join("old")
    backend.beat(node_report("old", tokens_wasted=7))  # an earlier release reports one number only
    assert backend.wasted("old") == {"cancelled": Waste(7)}
    backend.leave()
    backend.leave("old")
    assert backend.wasted() == total | {"cancelled": Waste(15)}
    assert backend.learner.status().tokens_generated_total == 80
