"""The delivery state machine under arbitrary sequences of calls and time, against a simple model of the promise."""

import itertools
from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from broker.contract import LearnerReport, Lease, NodeReport, RunInfo
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.logs import EventLog
from broker.delivery.node_rules import ALONE, NodeRules
from broker.delivery.state import DeliveryState
from common.errors import BrokerError
from common.rollouts import GroupMeta, Task

NODES = ("a", "b", "c")
LEASE_S = 10.0
MAX_LEASE_S = 25.0
MAX_ATTEMPTS = 3
PAYLOAD_BYTES = 100
META = GroupMeta(version_min=0, version_max=0, reward_mean=0.0, sampled_tokens=1)


def payload(token: str) -> bytes:
    return token.encode().ljust(PAYLOAD_BYTES, b".")


class Delivery(RuleBasedStateMachine):
    """Calls the state machine as nodes, a learner and the clock would, in any order."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pids = itertools.count(1)
        self.learner_version = 0
        self.accepted: Counter[int] = Counter()  # accepted and not given up again
        self.taken: dict[int, list[int]] = {}
        self.committed: set[int] = set()
        self.tokens: set[str] = set()
        self.in_order = False
        self.filtered: dict[int, list[int]] = {}  # by step, in the order in which they were filtered

    @initialize(
        groups_per_step=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        max_bytes=st.sampled_from([0, 3 * PAYLOAD_BYTES, 1 << 30]),
    )
    def start(self, groups_per_step: int, max_staleness: int, max_bytes: int) -> None:
        numbers = itertools.count()
        run = RunInfo(
            "r", "", groups_per_step, max_staleness, MAX_ATTEMPTS, LEASE_S, max_bytes, max_lease_s=MAX_LEASE_S
        )
        self.b = groups_per_step
        self.state = self.new_state(run, lambda: f"t{next(numbers)}")
        LearnerRules(self.state).attach(LearnerReport(1, 1, "training", 0))
        for node in NODES:
            NodeRules(self.state).register(NodeReport(node, next(self.pids), "h", "generating", 0))

    def new_state(self, run: RunInfo, new_token: Callable[[], str]) -> DeliveryState:
        return DeliveryState(run, lambda: self.now, new_token, EventLog(wall_clock=lambda: 0))

    @rule(count=st.integers(1, 12), again=st.integers(0, 3))
    def offer(self, count: int, again: int) -> None:
        next_serial = self.state.tasks.next_serial
        first = max(0, next_serial - again)
        tasks = [Task(s, b"", s, 2) for s in range(first, next_serial + count)]
        assert LearnerRules(self.state).offer(tasks) == count

    @rule(target=leases, node=st.sampled_from(NODES), count=st.integers(1, 6), lag=st.integers(0, 2))
    def lease(self, node: str, count: int, lag: int) -> object:
        if node not in self.state.fleet.nodes:
            return multiple()
        older = [s for s, e in self.state.tasks.living.items() if e.state == "pending"]
        got = NodeRules(self.state).lease(node, max(0, self.learner_version - lag), count)
        assert [le.task.serial for le in got] == sorted(older)[: len(got)]
        for le in got:
            assert le.token not in self.tokens, "tokens never repeat"
            self.tokens.add(le.token)
        return multiple(*((node, le) for le in got))

    @rule(node=st.sampled_from(NODES), done=st.integers(0, 12), in_order=st.booleans())
    def work_goes_on(self, node: str, done: int, in_order: bool) -> None:
        """The usual course of a step, so that the rest finds something to do harm to."""
        self.offer(self.b, 0)
        if node not in self.state.fleet.nodes:
            self.go(node, True)
        leases = NodeRules(self.state).lease(node, self.learner_version, 2 * self.b)
        self.tokens |= {lease.token for lease in leases}
        for lease in leases[:done]:
            self.complete((node, lease), False)
        self.take(in_order)

    @rule(held=leases, again=st.booleans())
    def complete(self, held: tuple[str, Lease], again: bool) -> None:
        node, lease = held
        entry = self.state.tasks.leased.get(lease.token)
        accepted = NodeRules(self.state).complete(node, lease.token, META, payload(lease.token), PAYLOAD_BYTES)
        if entry is not None:
            assert accepted
            self.accepted[lease.task.serial] += 1
        if again:
            assert (
                NodeRules(self.state).complete(node, lease.token, META, payload(lease.token), PAYLOAD_BYTES) == accepted
            )

    @rule(held=leases)
    def complete_under_another_name(self, held: tuple[str, Lease]) -> None:
        assert not NodeRules(self.state).complete("stranger", held[1].token, META, b"", 0)

    @rule(held=consumes(leases))
    def fail(self, held: tuple[str, Lease]) -> None:
        NodeRules(self.state).fail(held[0], held[1].token, "because")

    @rule(held=consumes(leases))
    def release(self, held: tuple[str, Lease]) -> None:
        NodeRules(self.state).release(held[0], [held[1].token])

    @rule(node=st.sampled_from(NODES), keep=st.booleans())
    def heartbeat(self, node: str, keep: bool) -> None:
        known = self.state.fleet.nodes.get(node)
        pid = known.report.pid if known else next(self.pids)
        tokens = sorted(known.tokens) if known and keep else []
        reply = NodeRules(self.state).heartbeat(NodeReport(node, pid, "h", "generating", self.learner_version), tokens)
        assert reply.lost == []

    @rule(node=st.sampled_from(NODES), restart=st.booleans())
    def go(self, node: str, restart: bool) -> None:
        if restart:
            NodeRules(self.state).register(NodeReport(node, next(self.pids), "h", "generating", self.learner_version))
        else:
            NodeRules(self.state).leave(node)

    @rule(seconds=st.floats(0.1, 2 * LEASE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        NodeRules(self.state).expire()
        assert all(e.deadline > self.now for e in self.state.tasks.leased.values())
        assert all(e.leased_at > self.now - MAX_LEASE_S for e in self.state.tasks.leased.values())

    @rule(in_order=st.booleans())
    def take(self, in_order: bool) -> None:
        step = self.learner_version
        before = self.taken.get(step, [])
        unfinished = [s for s, e in self.state.tasks.living.items() if e.state in ("pending", "leased")]
        got = LearnerRules(self.state).take(step, self.b, in_order)
        if got is None:
            return
        serials = [e.serial for e in got]
        assert serials[: len(before)] == before, "what a step took it keeps, in order"
        new = serials[len(before) :]
        assert new == sorted(new)
        if in_order and new:
            assert all(s > max(new) for s in unfinished)
        self.taken[step] = serials
        self.learner_version += 1

    @rule(data=st.data())
    def learner_restarts_and_replays(self, data: st.DataObject) -> None:
        first = max([s for s, serials in self.taken.items() if set(serials) <= self.committed], default=-1) + 1
        LearnerRules(self.state).attach(LearnerReport(2, 1, "replaying", first))
        for step in range(first, self.learner_version):
            if len(self.taken[step]) == self.b + self.replaced(step):
                replayed = LearnerRules(self.state).take(step, self.b)
                assert replayed is not None
                assert [e.serial for e in replayed] == self.taken[step]
                assert all(e.payload is not None for e in replayed)

    @rule(data=st.data())
    def regenerate(self, data: st.DataObject) -> None:
        open_steps = [s for s in self.taken if not set(self.taken[s]) <= self.committed and self.taken[s]]
        if not open_steps:
            return
        step = max(open_steps)
        serial = data.draw(st.sampled_from(self.taken[step]))
        LearnerRules(self.state).regenerate(step, [serial])
        if serial in self.filtered.get(step, []):
            return  # a filtered group stays where it is
        self.taken[step].remove(serial)
        self.accepted[serial] -= 1
        self.learner_version = step

    def replaced(self, step: int) -> int:
        """Groups of `step` that freed their slot."""
        return min(len(self.filtered.get(step, [])), 2 * self.b)

    @rule(data=st.data(), again=st.booleans())
    def filter(self, data: st.DataObject, again: bool) -> None:
        open_steps = [s for s in self.taken if not set(self.taken[s]) <= self.committed and self.taken[s]]
        if not open_steps:
            return
        step = max(open_steps)
        chosen = data.draw(st.lists(st.sampled_from(self.taken[step]), unique=True, min_size=1))
        freed = self.state.tasks.freed_earlier + len(self.state.tasks.freed)
        before = self.replaced(step)
        known = self.filtered.setdefault(step, [])
        known += [serial for serial in chosen if serial not in known]
        for _ in range(1 + again):
            LearnerRules(self.state).filter(step, chosen, 2 * self.b)
        now = self.state.tasks.freed_earlier + len(self.state.tasks.freed)
        assert now - freed == self.replaced(step) - before, "a slot is freed once"
        if self.replaced(step) > before:
            self.learner_version = step  # the step is short of groups again

    @rule(back=st.integers(0, 3), repeat=st.booleans())
    def commit(self, back: int, repeat: bool) -> None:
        step = self.learner_version - 1 - back
        for _ in range(1 + repeat):
            LearnerRules(self.state).commit(step)
        for taken_step, serials in self.taken.items():
            if taken_step <= step:
                self.committed |= set(serials)
        if step in self.taken:
            try:
                LearnerRules(self.state).take(step, self.b)
            except BrokerError:
                pass
            else:
                raise AssertionError("a committed step must not be taken again")

    @invariant()
    def every_task_is_in_exactly_one_state(self) -> None:
        status, ledger, tasks = self.state.status(), self.state.ledger(), self.state.tasks
        assert [e.serial for e in ledger] == list(range(tasks.next_serial)), "nothing is lost, nothing appears twice"
        count = Counter(e.state for e in ledger)
        assert count == +Counter(
            pending=status.groups_pending,
            leased=status.groups_leased,
            ready=status.groups_ready,
            taken=status.groups_taken,
            committed=status.groups_committed,
            dead=status.groups_dead,
        )
        assert status.bytes_held == PAYLOAD_BYTES * (status.groups_ready + status.groups_taken)
        assert sum(n.leases for n in status.nodes) == status.groups_leased
        assert sorted(tasks.ready) == tasks.ready
        filtered = {s for serials in self.filtered.values() for s in serials}
        assert {e.serial for e in ledger if e.filtered} == filtered
        assert status.groups_filtered == len(filtered)

    @invariant()
    def each_task_is_accepted_once_and_taken_once(self) -> None:
        assert all(n in (0, 1) for n in self.accepted.values())
        for entry in self.state.ledger():
            assert (self.accepted[entry.serial] == 1) == (entry.state in ("ready", "taken", "committed"))
            assert (entry.state == "committed") == (entry.serial in self.committed)
        taken = [s for serials in self.taken.values() for s in serials]
        assert len(taken) == len(set(taken))
        recorded = {e.serial: e.step for e in self.state.ledger() if e.step is not None}
        assert recorded == {s: step for step, serials in self.taken.items() for s in serials}

    @invariant()
    def leases_are_unique_and_belong_to_known_nodes(self) -> None:
        leased = self.state.tasks.leased
        assert len({e.serial for e in leased.values()}) == len(leased)
        for token, entry in leased.items():
            assert (entry.token, entry.state) == (token, "leased")
            assert token in self.state.fleet.nodes[entry.node].tokens

    @invariant()
    def attempts_are_bounded(self) -> None:
        for entry in self.state.tasks.living.values():
            one_alone = len(entry.failed_by) == 1  # which does not kill a task so soon
            assert entry.failures < MAX_ATTEMPTS * (ALONE if one_alone else 1)
            assert len(entry.nodes) >= entry.attempts >= entry.failures


Delivery.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDelivery = Delivery.TestCase
