"""How long a broker takes to come back: from its store to the first answer it could give.

    python bench/broker_recovery.py [--groups 10000] [--payload 83000]

Two stores of that many groups, each of `--payload` bytes. One is of a usual run: steps of 16 groups are committed, and
16 steps are kept. The other one is the worst case: nothing was ever committed, and every group is still there.
"""

import os
import tempfile
from pathlib import Path

import harness
from broker_embedded import GROUPS_PER_STEP, META, PROBLEM

from broker.contract import LearnerReport, NodeReport, RunInfo
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.journal.file_store import FileStore, open_file_store
from broker.journal.journal import Journal
from broker.journal.recovery import recover
from common.rollouts import Task
from tests.rigs.waiting import until

RETAIN_STEPS = 16
RUN = RunInfo("bench", "", GROUPS_PER_STEP, 1 << 20, 3, 60.0, 1 << 40)


def opened(store: FileStore) -> tuple[DeliveryState, Journal]:
    journal = Journal(store, "everysec")
    state = DeliveryState(RUN, recorder=journal, retain_steps=RETAIN_STEPS)
    recover(journal, state)
    return state, journal


def fill(state: DeliveryState, journal: Journal, groups: int, payload_bytes: int, commit: bool) -> None:
    """`groups` groups through the state machine, all but the last steps committed where `commit` says so."""
    payload = os.urandom(payload_bytes)
    LearnerRules(state).attach(LearnerReport(1, 1, "training", 0))
    NodeRules(state).register(NodeReport("n0", 1, "h", "generating", 0))
    for step in range(groups // GROUPS_PER_STEP):
        first = step * GROUPS_PER_STEP
        LearnerRules(state).offer(
            [Task(serial, PROBLEM, serial, 8) for serial in range(first, first + GROUPS_PER_STEP)]
        )
        for lease in NodeRules(state).lease("n0", 1 << 20, GROUPS_PER_STEP):
            NodeRules(state).complete("n0", lease.token, META, payload, payload_bytes)
        if commit:
            LearnerRules(state).take(step, GROUPS_PER_STEP)
            LearnerRules(state).commit(step - 2)
        last = journal.end_turn()
        until(lambda: journal.acknowledged >= last, every_s=0.001)  # noqa: B023


def measure(groups: int, payload_bytes: int, commit: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as path:
        store = open_file_store(Path(path), "bench")
        state, journal = opened(store)
        fill(state, journal, groups, payload_bytes, commit)
        assert store.lock is not None
        store.lock.close()  # as when it was killed: no last record, nothing tidied up
        (again, second), seconds = harness.timed(lambda: opened(open_file_store(Path(path), "bench")))
        assert len(again.ledger()) == len(state.ledger())
        second.close()
        journal.close()
    return {"recovery_s": round(seconds, 3)}


@harness.script(groups=10_000, payload=83_000)
def main(options: harness.Options) -> harness.Figures:
    return {
        "rounds": 1,
        "groups": options.groups,
        "payload_bytes": options.payload,
        "a_run_as_usual": measure(options.groups, options.payload, commit=True),
        "nothing_committed": measure(options.groups, options.payload, commit=False),
    }
