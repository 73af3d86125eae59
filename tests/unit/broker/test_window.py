"""The window that `status` shows is the one that admission keeps, whatever passed its place on or began later."""

import re
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import LearnerReport, NodeReport
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.diagnosis.stalls import explain
from common.rollouts import GroupMeta
from common.staleness import Window
from common.waits import WaitFor, WaitKind
from tests.rigs.brokers import run_info, tasks

WINDOW = WaitFor(WaitKind.WINDOW)

B, K = 2, 1


@given(
    size=st.integers(1, 5),
    first_step=st.integers(0, 20),
    gone=st.integers(0, 5),
    passed=st.frozensets(st.integers(5, 60)).map(sorted),
    step=st.integers(0, 30),
)
def test_a_task_is_below_the_first_due_one_exactly_if_it_is_due_before(
    size: int, first_step: int, gone: int, passed: list[int], step: int
) -> None:
    first = Window(size, 0, first_step, gone, tuple(passed)).first_due(step)
    for serial in (n for n in range(5, 300) if n not in passed):
        due = first_step + (serial - gone - bisect_left(passed, serial)) // size
        assert (serial < first) == (due < step)


def state_at(step: int) -> DeliveryState:
    """A run whose learner began at `step`, with one node that waits for tasks, and more of them than it may lease."""
    state = DeliveryState(run_info(groups_per_step=B, max_staleness=K, max_attempts=1))
    LearnerRules(state).attach(LearnerReport(1, 1, "training", step, step=step, instance="me"))
    NodeRules(state).register(NodeReport("n", 1, "h", "waiting", step, WINDOW))
    LearnerRules(state).offer(tasks(60))
    return state


def lease_all(state: DeliveryState, version: int) -> list[str]:
    """Everything that a node at `version` may lease; the tokens."""
    NodeRules(state).heartbeat(NodeReport("n", 1, "h", "waiting", version, WINDOW), list(state.tasks.leased))
    return [lease.token for lease in NodeRules(state).lease("n", version, 60)]


def check(state: DeliveryState, version: int) -> None:
    """Compare the tasks that admission gave out with the status."""
    end = max(entry.serial for entry in state.tasks.leased.values()) + 1
    status = state.status()
    assert status.window is not None
    assert status.window.end(version) == end == state.tasks.pending[0]
    (stall,) = [stall for stall in explain(status) if stall.kind == "window"]
    assert re.findall(r"\d+", stall.waits_for) == [str(version), str(end)]


def train(state: DeliveryState, step: int, tokens: list[str], flat: int) -> None:
    """Finish these leases and let `step` take groups until B are left that it does not filter."""
    for token in tokens:
        assert NodeRules(state).complete("n", token, GroupMeta(0, 0, 0.0, 1), b"", 0)
    taken = LearnerRules(state).take(step, B)
    assert taken is not None
    LearnerRules(state).filter(step, [entry.serial for entry in taken[:flat]], 2 * B)
    assert LearnerRules(state).take(step, B) is not None
    LearnerRules(state).report(LearnerReport(1, 1, "training", step + 1, step=step + 1, instance="me"))


@pytest.mark.parametrize("first", [0, 5], ids=["from step 0", "resumed at step 5 beside an empty store"])
@pytest.mark.parametrize("flat", [0, 1, 2], ids="{} groups filtered".format)
@pytest.mark.parametrize("dead", [0, 1, 3], ids="{} tasks dead".format)
def test_the_window_in_the_status_is_what_may_be_leased(first: int, flat: int, dead: int) -> None:
    state = state_at(first)
    tokens = lease_all(state, first)
    check(state, first)
    for token in tokens[:dead]:
        NodeRules(state).fail("n", token, "bad luck")
    tokens = [*tokens[dead:], *lease_all(state, first)]
    check(state, first)
    train(state, first, tokens, flat)
    lease_all(state, first + 1)
    check(state, first + 1)
    LearnerRules(state).commit(first)
    check(state, first + 1)


def test_a_task_is_overtaken_from_the_step_on_after_the_one_it_is_due_at_also_in_a_run_that_resumed() -> None:
    state = state_at(5)
    *tokens, late = lease_all(state, 5)  # serial 3, due at step 6
    train(state, 5, tokens, 0)
    window = state.status().window
    assert window is not None
    assert state.tasks.leased[late].serial == 3
    assert [window.first_due(step) for step in (5, 6, 7)] == [0, 2, 4]
