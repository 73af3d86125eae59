"""Deadlines of the broker to the moment: leases, nodes, the learner, questions for a log; and what a node is told."""

from collections.abc import Callable

import msgspec
import pytest

from broker.contract import LEARNER_ENDED, LOST_AFTER_S, HeartbeatReply
from broker.delivery import logs as broker_logs
from broker.delivery.deadlines import HEAP_SLACK, Deadlines
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.logs import LogTails
from broker.delivery.node_rules import NodeRules
from broker.delivery.nodes import FORGET_AFTER_S, MOST_LEFT, Fleet
from broker.delivery.state import DeliveryState
from common.errors import BrokerError
from common.evaluation import EvaluationOrder
from common.waste import Waste, add_waste
from tests.rigs.brokers import META, learner_report, new_state, node_report, run_info, tasks
from tests.rigs.waiting import Clock

LATER = 1 / 1024  # exact in a float


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def state(clock: Clock) -> DeliveryState:
    """With one node, no learner and six tasks; leases take 30 s, and 50 s with heartbeats."""
    made = new_state(run_info(groups_per_step=3, lease_s=30.0, max_lease_s=50.0), clock)
    NodeRules(made).register(node_report())
    LearnerRules(made).offer(tasks(6))
    return made


# ---------------------------------------------------------------- leases


def test_a_lease_ends_at_its_deadline_and_heartbeats_move_it_no_further_than_the_longest_lease(
    state: DeliveryState, clock: Clock
) -> None:
    one, two = NodeRules(state).lease("n0", 0, 2)
    clock.now += 25
    assert NodeRules(state).heartbeat(node_report(), [one.token]) == HeartbeatReply()
    clock.now += 5 - LATER
    NodeRules(state).expire()
    assert set(state.tasks.leased) == {one.token, two.token}
    assert state.status().oldest_lease_s == 30 - LATER
    clock.now += LATER
    NodeRules(state).expire()
    assert set(state.tasks.leased) == {one.token}, "nothing renewed the other one"
    clock.now += 10
    assert NodeRules(state).heartbeat(node_report(), [one.token, two.token]).lost == [two.token]
    clock.now += 10 - LATER
    NodeRules(state).expire()
    assert set(state.tasks.leased) == {one.token}
    assert state.next_deadline() == 1050.0
    clock.now += LATER
    NodeRules(state).expire()
    assert not state.tasks.leased and state.lease_expiries == 2
    assert [e.kind for e in state.event_log.after(-1)] == ["join", "first_lease", "lease_expired", "lease_overdue"]
    assert state.status().waste == {"lost": Waste(0, 80.0)}
    assert {e.serial: (e.state, e.attempts) for e in state.ledger()[:2]} == {0: ("pending", 1), 1: ("pending", 1)}


def test_what_ends_a_lease_wakes_the_leases_that_wait(state: DeliveryState) -> None:
    for end in (
        lambda token: NodeRules(state).fail("n0", token, "because"),
        lambda token: NodeRules(state).release("n0", [token]),
        lambda token: NodeRules(state).leave("n0"),
    ):
        (lease,) = NodeRules(state).lease("n0", 0, 1)
        before = state.lease_revision
        end(lease.token)
        assert state.lease_revision > before and not state.tasks.leased
    before = state.lease_revision
    NodeRules(state).fail("n0", "unknown", "because")
    assert state.lease_revision == before and state.tasks.pending[0] == 0


def test_every_lease_of_a_task_has_the_number_of_its_attempt_and_one_that_went_back_counts_none(
    state: DeliveryState,
) -> None:
    attempts = []
    for end in ("release", "fail", "release", "fail", "release"):
        (lease,) = NodeRules(state).lease("n0", 0, 1)
        attempts.append((lease.task.serial, lease.attempt))
        NodeRules(state).release("n0", [lease.token]) if end == "release" else NodeRules(state).fail(
            "n0", lease.token, "because"
        )
    assert attempts == [(0, 1), (0, 1), (0, 2), (0, 2), (0, 3)]


def test_a_task_that_two_nodes_failed_is_not_spared_when_the_first_fails_it_once_more(state: DeliveryState) -> None:
    nodes = NodeRules(state)
    nodes.register(node_report("n1", pid=2))
    nodes.register(node_report("n2", pid=3))
    for node_id in ("n0", "n1", "n0"):
        (lease,) = nodes.lease(node_id, 0, 1)
        assert lease.task.serial == 0
        nodes.fail(node_id, lease.token, "because")
    assert state.run.max_attempts == 3
    assert [entry.state for entry in state.ledger()][:2] == ["dead", "pending"]


def test_a_node_that_is_not_known_leases_nothing_and_asks_for_no_more_than_it_wants(state: DeliveryState) -> None:
    with pytest.raises(BrokerError):
        NodeRules(state).lease("stranger", 0, 1)
    assert NodeRules(state).lease("n0", 0, 0) == []
    assert [lease.task.serial for lease in NodeRules(state).lease("n0", None, 2)] == [0, 1]
    assert [lease.task.serial for lease in NodeRules(state).lease("n0", 0, 1)] == [2]


def test_a_late_result_is_counted_as_waste_once_and_a_repeated_one_is_not(state: DeliveryState, clock: Clock) -> None:
    one, two = NodeRules(state).lease("n0", 0, 2)
    assert NodeRules(state).complete("n0", one.token, META, b"g", 1) and NodeRules(state).complete(
        "n0", one.token, META, b"g", 1
    )
    assert (state.stale_results, state.tasks.bytes_held, state.tasks.accepted_groups) == (0, 1, 1)
    clock.now += 60
    NodeRules(state).expire()
    assert not NodeRules(state).complete("n0", two.token, META, b"g", 1)
    assert not NodeRules(state).complete("stranger", one.token, META, b"g", 1)
    assert (state.stale_results, state.status().waste["lost"]) == (2, Waste(20, 60.0))
    assert state.status().tokens_generated_total == 20, "of its one node"


# ---------------------------------------------------------------- nodes and the learner


@pytest.mark.parametrize("leased", [True, False])
def test_a_node_dies_after_the_time_of_a_lease_and_is_forgotten_long_after(
    state: DeliveryState, clock: Clock, leased: bool
) -> None:
    if leased:
        NodeRules(state).lease("n0", 0, 1)
    clock.now += 30 - LATER
    NodeRules(state).expire()
    assert state.fleet.alive("n0") and state.status().nodes[0].last_seen_s == 30 - LATER
    clock.now += LATER
    NodeRules(state).expire()
    assert not state.fleet.alive("n0") and "n0" in state.changed_nodes
    clock.now = 1000 + FORGET_AFTER_S - LATER
    NodeRules(state).expire()
    assert "n0" in state.fleet.nodes
    clock.now += LATER
    NodeRules(state).expire()
    assert "n0" not in state.fleet.nodes and state.status().left == []


SIGNS_OF_LIFE: list[Callable[[DeliveryState], object]] = [
    lambda state: NodeRules(state).release("n0", []),
    lambda state: NodeRules(state).complete("n0", "unknown", META, b"", 0),
    lambda state: NodeRules(state).fail("n0", "unknown", "because"),
    lambda state: NodeRules(state).heartbeat(node_report(), []),
    lambda state: NodeRules(state).lease("n0", 0, 0),
]


@pytest.mark.parametrize("sign", SIGNS_OF_LIFE)
def test_a_dead_node_lives_again_from_when_it_is_seen(
    state: DeliveryState, clock: Clock, sign: Callable[[DeliveryState], object]
) -> None:
    clock.now += 40
    NodeRules(state).expire()
    sign(state)
    assert state.fleet.alive("n0") and "node_back" in [event.kind for event in state.event_log.after(-1)]
    clock.now += 30 - LATER
    NodeRules(state).expire()
    assert state.fleet.alive("n0")
    clock.now += LATER
    NodeRules(state).expire()
    assert not state.fleet.alive("n0")


def test_a_slow_lease_keeps_a_dead_node_known_for_longer() -> None:
    fleet = Fleet(FORGET_AFTER_S)
    fleet.join(node_report("n"), 0.0)
    assert fleet.expire(FORGET_AFTER_S) == (["n"], [])
    assert fleet.expire(10 * FORGET_AFTER_S - LATER) == ([], [])
    assert fleet.expire(10 * FORGET_AFTER_S) == ([], ["n"])


def test_the_newest_nodes_that_left_are_shown(state: DeliveryState) -> None:
    for number in range(MOST_LEFT + 2):
        NodeRules(state).register(node_report(f"m{number}"))
        NodeRules(state).leave(f"m{number}")
    left = [status.report.node_id for status in state.status().left]
    assert left == [f"m{number}" for number in range(2, MOST_LEFT + 2)]
    NodeRules(state).register(node_report("m2"))
    assert "m2" not in [status.report.node_id for status in state.status().left]


@pytest.mark.parametrize("ended", ["training", *LEARNER_ENDED])
def test_a_silent_learner_is_lost_after_the_same_time_for_people_and_for_its_successor(
    state: DeliveryState, clock: Clock, ended: str
) -> None:
    LearnerRules(state).attach(told := learner_report(ended, instance="a"))
    clock.now += LOST_AFTER_S
    found = state.status()
    assert (found.learner, found.learner_last_seen_s) == (told, LOST_AFTER_S)
    other = learner_report(instance="b")
    if ended == "training":
        with pytest.raises(BrokerError):
            LearnerRules(state).report(other)
    clock.now += LATER
    found = state.status().learner
    assert found is not None
    assert (found.state, found.since_s) == (("lost", LOST_AFTER_S + LATER) if ended == "training" else (ended, 0.0))
    LearnerRules(state).report(other)
    assert state.status().learner == other
    for instance in ("b", ""):
        LearnerRules(state).check_learner(1, instance)
    for incarnation, instance in ((1, "a"), (0, "b")):
        with pytest.raises(BrokerError):
            LearnerRules(state).check_learner(incarnation, instance)
    LearnerRules(state).check_learner(2, "a")


def test_requests_of_the_learner_are_signs_of_life_and_those_of_observers_are_none(
    state: DeliveryState, clock: Clock
) -> None:
    LearnerRules(state).attach(learner_report(instance="a"))
    clock.now += 4
    LearnerRules(state).check_learner(None)
    assert state.status().learner_last_seen_s == 4
    LearnerRules(state).check_learner(1, "a")
    assert state.status().learner_last_seen_s == 0


def test_a_node_hears_of_no_learner_of_a_living_one_and_of_one_that_ended(state: DeliveryState) -> None:
    assert NodeRules(state).heartbeat(node_report(), []) == HeartbeatReply()
    LearnerRules(state).attach(learner_report(weights="tcp://w"))
    assert NodeRules(state).heartbeat(node_report(), []) == HeartbeatReply(
        weights_address="tcp://w", learner_incarnation=1
    )
    for ended in LEARNER_ENDED:
        LearnerRules(state).report(learner_report(ended, weights="tcp://w"))
        told = NodeRules(state).heartbeat(node_report(), [])
        assert told == HeartbeatReply(learner_incarnation=1, drain=ended == "done")


def test_a_problem_that_every_attempt_lost_has_no_reward_and_no_length(state: DeliveryState) -> None:
    order = EvaluationOrder(version=0, incarnation=1, temperature=0.0)
    LearnerRules(state).evaluate(order, tasks(1), [], True)
    attempts = []
    for _ in range(3):
        (lease,) = NodeRules(state).lease("n0", 0, 1)
        attempts.append((lease.attempt, lease.evaluation == order))
        before = state.lease_revision
        NodeRules(state).fail("n0", lease.token, "because")
        assert state.lease_revision > before
    assert attempts == [(1, True), (2, True), (3, True)]
    (result,) = LearnerRules(state).evaluate(order, [], [], True).results
    assert (result.rewards, result.lengths, result.errors) == ([0.0] * 2, [0] * 2, ["because"] * 2)


# ---------------------------------------------------------------- questions for a log


def test_questions_and_answers_are_kept_for_a_while_and_the_newest_of_them(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_logs, "MOST_LOGS", 2)
    logs = LogTails(clock)
    for name in ("a", 3, "c"):
        assert logs.ask(name) is None
    assert list(logs.asked) == [3, "c"] and logs.next_rank(-1, None) == 3
    logs.answer("a", "not asked any more")
    logs.answer("c", None)
    assert list(logs.asked) == [3, "c"]
    clock.now += broker_logs.FRESH_S - LATER
    assert logs.next_rank(-1, None) == 3
    clock.now += LATER
    assert logs.next_rank(-1, None) == -1, "nobody asks any more"
    logs.answer("c", "text")
    clock.now += broker_logs.FRESH_S - LATER
    assert logs.ask("c") == "text"
    assert logs.ask("c") is None, "it was fetched"
    logs.answer("c", "text")
    clock.now += broker_logs.FRESH_S
    assert logs.ask("c") is None and "c" in logs.asked


def test_a_question_that_is_repeated_is_the_newest_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_logs, "MOST_LOGS", 2)
    logs = LogTails(clock)
    for name in (1, 2, 1, 4):
        logs.ask(name)
    assert list(logs.asked) == [1, 4]
    for name in (4, 1):
        logs.answer(name, f"of {name}")
    logs.ask(2)
    logs.answer(2, "of 2")
    assert [logs.ask(name) for name in (4, 1, 2)] == [None, "of 1", "of 2"]


# ---------------------------------------------------------------- deadlines and waste


def test_the_earliest_of_many_deadlines_comes_first_whatever_was_added_moved_or_ended() -> None:
    deadlines = Deadlines[int]()
    for key in range(3 * HEAP_SLACK):
        deadlines.add(key, float((key * 7919) % 4096))
    for key in range(3 * HEAP_SLACK - 5):
        deadlines.discard(key)
    left = sorted(((key * 7919) % 4096, key) for key in range(3 * HEAP_SLACK - 5, 3 * HEAP_SLACK))
    due = [key for _, key in left]
    assert list(deadlines.passed(left[0][0] - 1, lambda key: 0.0)) == []
    assert list(deadlines.passed(left[2][0], lambda key: 0.0)) == due[:3]
    assert left[2][0] < (deadlines.next() or 0) <= left[3][0]
    assert list(deadlines.passed(left[4][0], lambda key: None)) == [], "they no longer matter"


def test_waste_never_shrinks_and_is_clipped_to_what_a_status_may_have() -> None:
    counts = {"lost": Waste(5, 1.0)}
    add_waste(counts, "lost", -3, -1.0)
    add_waste(counts, "failed")
    assert counts == {"lost": Waste(5, 1.0), "failed": Waste(0, 0.0)}
    add_waste(counts, "lost", 1 << 80, 1e300)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(counts), type=dict[str, Waste]) == counts
