"""How many groups a commit releases, what it says about it, and when it wakes the leases that wait."""

from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from common.waste import Waste
from tests.rigs.brokers import META, learner_report, new_state, node_report, run_info, tasks


def filled(groups: int, per_step: int = 2) -> DeliveryState:
    """A state with this many ready groups."""
    state = new_state(run_info(groups_per_step=per_step, max_staleness=5), lambda: 0.0)
    LearnerRules(state).attach(learner_report())
    NodeRules(state).register(node_report())
    LearnerRules(state).offer(tasks(groups))
    for lease in NodeRules(state).lease("n0", 0, groups):
        assert NodeRules(state).complete("n0", lease.token, META, b"payload", 7)
    return state


def test_a_group_that_failed_before_its_first_token_wastes_none() -> None:
    state = filled(0)
    LearnerRules(state).offer(tasks(1))
    (lease,) = NodeRules(state).lease("n0", 0, 1)
    NodeRules(state).fail("n0", lease.token, "broken", seconds=2.0)
    assert state.status().waste == {"failed": Waste(0, 2.0)}


def test_leased_groups_are_expected_to_be_as_large_as_those_that_came() -> None:
    state = filled(0)
    LearnerRules(state).offer(tasks(5))
    leases = NodeRules(state).lease("n0", 0, 5)
    assert state.tasks.bytes_expected() == 0, "nothing has come yet"
    for lease, size in zip(leases, (10, 20), strict=False):
        assert NodeRules(state).complete("n0", lease.token, META, b"payload", size)
    assert state.tasks.bytes_expected() == 10 + 20 + 3 * 15


def commits(state: DeliveryState) -> list[tuple[object, object]]:
    return [(e.detail["step"], e.detail["groups"]) for e in state.event_log.after(-1) if e.kind == "commit"]


def test_every_commit_counts_its_own_groups_and_the_groups_of_steps_that_were_skipped() -> None:
    state = filled(8)
    for step in range(4):
        assert LearnerRules(state).take(step, 2) is not None
    assert [LearnerRules(state).commit(step) for step in (0, 2, 2, 1, 3)] == [2, 4, 0, 0, 2]
    assert commits(state) == [(0, 2), (2, 4), (3, 2)]
    assert state.committed_step == 3 and state.status().groups_committed == 8


def test_an_earlier_step_that_is_committed_again_takes_nothing_back() -> None:
    state = filled(8)
    for step in range(4):
        assert LearnerRules(state).take(step, 2) is not None
    assert [LearnerRules(state).commit(step) for step in (2, 1)] == [6, 0]
    assert state.committed_step == 2


def test_a_commit_without_groups_says_nothing_and_wakes_no_lease() -> None:
    state = filled(2)
    revision = state.lease_revision
    assert LearnerRules(state).commit(0) == 0 and state.committed_step == -1, "no step has taken anything"
    assert LearnerRules(state).take(1, 2) is not None
    assert state.lease_revision > revision
    revision = state.lease_revision
    assert LearnerRules(state).commit(0) == 0 and state.committed_step == 0
    assert (commits(state), state.lease_revision) == ([], revision)
    assert LearnerRules(state).commit(1) == 2
    assert commits(state) == [(1, 2)] and state.lease_revision > revision


def test_tasks_wake_leases_when_they_are_new_and_groups_when_their_place_is_free() -> None:
    state = filled(6)
    revisions = [state.lease_revision]

    def grew() -> bool:
        revisions.append(state.lease_revision)
        return revisions[-1] > revisions[-2]

    assert LearnerRules(state).offer(tasks(6)) == 0 and not grew()
    assert LearnerRules(state).offer(tasks(3, 5)) == 2 and grew()
    assert LearnerRules(state).take(0, 2) is not None and grew()
    assert LearnerRules(state).take(0, 2) is not None and not grew(), "it has its groups"
    LearnerRules(state).filter(0, [0], 0)
    assert not grew(), "no place is free"
    LearnerRules(state).filter(0, [1], 1)
    assert grew()
    LearnerRules(state).filter(0, [1], 1)
    assert not grew(), "it is filtered already"
    assert LearnerRules(state).take(0, 9) is None and grew(), "the learner wants more than before"
    assert LearnerRules(state).take(0, 9) is None and not grew()
    assert LearnerRules(state).take(0, 8) is None and not grew()
