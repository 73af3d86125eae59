"""The admission rule, driven in virtual time by a fleet that is slow, straggles, freezes, dies and fails.

The claims are tested for every k and B. A group that no other overtook is trained with staleness <= k. At most
B(k+1) groups are outstanding, the job never stops, and k = 0 is synchronous. All claims are also tested with steps
that filter groups and take others in their place.
"""

import heapq
import itertools
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from broker.contract import LearnerReport, Lease, NodeReport, RunInfo
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.logs import EventLog
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import Entry
from common.rollouts import GroupMeta, Task

LEASE_S = 6.0
STEPS = 12
POLL_S = 0.5
GIVE_UP_S = 50_000.0  # virtual; far beyond what any schedule here needs
PAYLOAD_BYTES = 1000
MOST_TAKEN = 3  # times groups_per_step that one step takes when it filters
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # a seed does not shrink to anything simpler


@dataclass(frozen=True)
class Scenario:
    """One random world."""

    max_staleness: int
    groups_per_step: int
    nodes: int
    seed: int
    mode: str = "mask"  # mask | wait | regenerate
    deaths_per_s: float = 0.0
    freezes_per_s: float = 0.0
    straggler_share: float = 0.0
    failure_share: float = 0.0
    poison: frozenset[int] = frozenset()
    flat_share: float = 0.0  # groups that a step filters
    max_bytes: int = 1 << 30


@dataclass
class SimulatedNode:
    name: str
    slots: int
    pace_s: float
    pid: int = 0  # 0: dead
    frozen_until: float = 0.0
    version: int = -1
    held: dict[str, Lease] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    serial: int
    step: int
    version: int
    due: int
    filtered: bool


class World:
    """A fleet and a learner around the delivery state; time moves from event to event."""

    def __init__(self, scenario: Scenario) -> None:
        s = self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.now = 0.0
        self.order = itertools.count(1)
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        tokens = itertools.count()
        run = RunInfo("r", "/nowhere", s.groups_per_step, s.max_staleness, 3, LEASE_S, s.max_bytes)
        self.state = DeliveryState(run, lambda: self.now, lambda: f"t{next(tokens)}", EventLog(wall_clock=lambda: 0.0))
        self.version = self.step = 0
        self.training = False
        self.trained: list[Trained] = []  # filtered ones too
        self.most_outstanding = 0
        self.generating_while_training = 0
        self.nodes = [
            SimulatedNode(f"n{i}", self.random.randint(1, 8), self.random.lognormvariate(0, 0.8))
            for i in range(scenario.nodes)
        ]

    def run(self) -> None:
        LearnerRules(self.state).attach(LearnerReport(1, 1, "training", 0))
        for node in self.nodes:
            self.start(node)
            self.after(LEASE_S / 4, lambda n=node: self.heartbeat(n))
            self.after(POLL_S, lambda n=node: self.misfortune(n))
        self.after(0, self.learn)
        while self.step < STEPS:
            self.now, _, happen = heapq.heappop(self.queue)
            assert self.now < GIVE_UP_S, f"stuck at step {self.step}: {self.state.status()}"
            NodeRules(self.state).expire()
            happen()
            outstanding = len(self.state.tasks.leased) + len(self.state.tasks.ready)
            self.most_outstanding = max(self.most_outstanding, outstanding)
            if self.training:
                self.generating_while_training += len(self.state.tasks.leased)

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.order), happen))

    # ---------------------------------------------------------------- learner

    def learn(self) -> None:
        s = self.scenario
        tasks = self.state.tasks
        freed = tasks.freed_earlier + len(tasks.freed)
        end = s.groups_per_step * (self.version + s.max_staleness + 2) + freed
        LearnerRules(self.state).offer([Task(n, b"", n, 2) for n in range(self.state.tasks.next_serial, end)])
        taken = LearnerRules(self.state).take(self.step, s.groups_per_step, in_order=s.mode == "wait")
        if taken is None:
            self.after(POLL_S, self.learn)
            return
        flat = [e.serial for e in taken if self.is_flat(e.serial)]
        old = [e.serial for e in taken if self.step - self.version_of(e) > s.max_staleness]
        expired = sorted(set(old) - set(flat))
        if s.mode == "regenerate" and expired:
            LearnerRules(self.state).regenerate(self.step, expired)
            self.after(0.1, self.learn)
            return
        most = (MOST_TAKEN - 1) * s.groups_per_step
        LearnerRules(self.state).filter(self.step, flat, most)
        if len(taken) < s.groups_per_step + min(len(flat), most):
            self.after(0.1, self.learn)
            return
        for entry in taken:
            freed = tasks.freed_earlier + bisect_left(tasks.freed, entry.serial)
            due = (entry.serial - freed) // s.groups_per_step
            self.trained.append(Trained(entry.serial, self.step, self.version_of(entry), due, entry.filtered))
        self.training = True
        self.after(self.random.uniform(0.2, 2.0), self.publish)

    def publish(self) -> None:
        self.training = False
        if self.step % 3 == 2:
            LearnerRules(self.state).commit(self.step)
        self.step += 1
        self.version += 1
        for node in self.nodes:
            self.give_weights(node)
        self.after(0, self.learn)

    def is_flat(self, serial: int) -> bool:
        """Whether the group has no variance, whenever and by whomever it is generated."""
        return random.Random(f"{self.scenario.seed}/{serial}").random() < self.scenario.flat_share

    @staticmethod
    def version_of(entry: Entry) -> int:
        assert entry.meta is not None
        return entry.meta.version_min

    # ---------------------------------------------------------------- nodes

    def start(self, node: SimulatedNode) -> None:
        node.pid, node.version, node.held = next(self.order), -1, {}
        NodeRules(self.state).register(self.report(node))
        self.give_weights(node)
        self.after(0, lambda: self.lease(node, node.pid))

    def give_weights(self, node: SimulatedNode) -> None:
        pid, version = node.pid, self.version

        def flip() -> None:
            if node.pid == pid and pid:
                node.version = max(node.version, version)

        self.after(self.random.uniform(0.01, 1.5), flip)

    def lease(self, node: SimulatedNode, pid: int) -> None:
        if node.pid != pid:
            return
        if self.now >= node.frozen_until and len(node.held) < node.slots:
            for lease in NodeRules(self.state).lease(node.name, node.version, node.slots - len(node.held)):
                node.held[lease.token] = lease
                seconds = node.pace_s * self.random.uniform(0.5, 2.0)
                if self.random.random() < self.scenario.straggler_share:
                    seconds *= 20
                version = node.version
                self.after(seconds, lambda le=lease, v=version: self.finish(node, pid, le, v))
        self.after(POLL_S, lambda: self.lease(node, pid))

    def finish(self, node: SimulatedNode, pid: int, lease: Lease, version: int) -> None:
        if node.pid != pid:
            return
        if self.now < node.frozen_until:
            self.after(node.frozen_until - self.now, lambda: self.finish(node, pid, lease, version))
            return
        node.held.pop(lease.token, None)
        if lease.task.serial in self.scenario.poison or self.random.random() < self.scenario.failure_share:
            NodeRules(self.state).fail(node.name, lease.token, "bad luck")
        else:
            meta = GroupMeta(version_min=version, version_max=node.version, reward_mean=0.0, sampled_tokens=1)
            NodeRules(self.state).complete(node.name, lease.token, meta, b"", PAYLOAD_BYTES)

    def heartbeat(self, node: SimulatedNode) -> None:
        if node.pid and self.now >= node.frozen_until:
            reply = NodeRules(self.state).heartbeat(self.report(node), list(node.held))
            for token in reply.lost:
                node.held.pop(token, None)
        self.after(LEASE_S / 4, lambda: self.heartbeat(node))

    def misfortune(self, node: SimulatedNode) -> None:
        if node.pid and self.random.random() < self.scenario.deaths_per_s * POLL_S:
            node.pid = 0
            self.after(self.random.uniform(0.5, 3 * LEASE_S), lambda: self.start(node))
        elif node.pid and self.random.random() < self.scenario.freezes_per_s * POLL_S:
            node.frozen_until = self.now + self.random.uniform(0.5, 3 * LEASE_S)
        self.after(POLL_S, lambda: self.misfortune(node))

    def report(self, node: SimulatedNode) -> NodeReport:
        return NodeReport(node.name, node.pid, "h", "generating", node.version)


def scenarios(**fixed: object) -> st.SearchStrategy[Scenario]:
    parts: dict[str, object] = {
        "max_staleness": st.integers(0, 4),
        "groups_per_step": st.integers(1, 5),
        "nodes": st.integers(1, 5),
        "seed": st.integers(0, 1 << 30),
        "mode": st.sampled_from(["mask", "wait", "regenerate"]),
        "deaths_per_s": st.sampled_from([0.0, 0.02, 0.1]),
        "freezes_per_s": st.sampled_from([0.0, 0.02, 0.1]),
        "straggler_share": st.sampled_from([0.0, 0.1, 0.3]),
        "failure_share": st.sampled_from([0.0, 0.05, 0.3]),
        "flat_share": st.sampled_from([0.0, 0.2, 0.6, 1.0]),
        "poison": st.frozensets(st.integers(0, 40), max_size=12),
        "max_bytes": st.sampled_from([0, 5 * PAYLOAD_BYTES, 1 << 30]),
    }
    parts.update({k: st.just(v) for k, v in fixed.items()})
    return st.builds(Scenario, **parts)  # type: ignore[arg-type]


def lived(scenario: Scenario) -> World:
    world = World(scenario)
    world.run()
    serials = [t.serial for t in world.trained]
    assert len(set(serials)) == len(serials), "no group is trained twice"
    size = scenario.groups_per_step
    for step in range(STEPS):
        filtered = [t.filtered for t in world.trained if t.step == step]
        full = filtered.count(False) == size
        assert full or len(filtered) == MOST_TAKEN * size, "a step is full, or has looked at as many as it may"
    window = scenario.groups_per_step * (scenario.max_staleness + 1)
    assert world.most_outstanding <= window
    return world


@settings(max_examples=60, deadline=None, phases=PHASES)
@given(scenarios())
def test_a_group_that_was_not_overtaken_is_never_too_old(scenario: Scenario) -> None:
    for t in lived(scenario).trained:
        if t.step <= t.due:
            assert t.step - t.version <= scenario.max_staleness


@settings(max_examples=80, deadline=None, phases=PHASES)
@given(scenarios(mode="wait") | scenarios(mode="regenerate"))
def test_waiting_for_stragglers_and_regenerating_make_the_bound_hold_for_every_group(scenario: Scenario) -> None:
    trained, waits = lived(scenario).trained, scenario.mode == "wait"
    # A filtered group is not generated again.
    assert all(t.step - t.version <= scenario.max_staleness for t in trained if waits or not t.filtered)
    assert not waits or [t.serial for t in trained] == sorted(t.serial for t in trained)


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(scenarios(max_staleness=0))
def test_without_staleness_the_loop_is_synchronous(scenario: Scenario) -> None:
    world = lived(scenario)
    assert all(t.version == t.step for t in world.trained)
    assert world.generating_while_training == 0, "nodes and learner take turns"


def test_with_staleness_nodes_generate_while_the_learner_trains() -> None:
    world = lived(Scenario(max_staleness=2, groups_per_step=4, nodes=3, seed=1))
    assert world.generating_while_training > 0
    assert world.most_outstanding > 4


@pytest.mark.parametrize("max_staleness", range(5))
def test_dead_tasks_never_stop_the_job(max_staleness: int) -> None:
    poison = frozenset(range(0, 30, 2))
    world = lived(Scenario(max_staleness, groups_per_step=3, nodes=2, seed=3, poison=poison))
    assert not poison & {t.serial for t in world.trained}
    assert world.state.tasks.history.dead > 0


def test_stragglers_are_overtaken_and_still_trained() -> None:
    scenario = Scenario(max_staleness=2, groups_per_step=4, nodes=4, seed=5, straggler_share=0.15)
    trained = lived(scenario).trained
    overtaken = [t for t in trained if t.step > t.due]
    assert overtaken
    assert any(t.step - t.version > scenario.max_staleness for t in overtaken), "this is what masking is for"


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_step_without_any_signal_ends_at_its_bound_and_the_next_one_is_not_starved(max_staleness: int) -> None:
    world = lived(Scenario(max_staleness, groups_per_step=3, nodes=2, seed=2, mode="wait", flat_share=1.0))
    assert all(t.filtered and t.step - t.version <= max_staleness for t in world.trained)
    assert [t.serial for t in world.trained] == list(range(STEPS * MOST_TAKEN * 3))


def test_filtered_groups_are_replaced_by_ones_within_the_bound() -> None:
    world = lived(Scenario(max_staleness=1, groups_per_step=4, nodes=3, seed=11, mode="wait", flat_share=0.5))
    late = [t for t in world.trained if t.serial // 4 > t.step + 2]
    assert late, "steps run ahead of the window that serials alone would allow"
    assert all(t.step - t.version <= 1 for t in world.trained)
