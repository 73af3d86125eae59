"""Discrete-event simulation of a job: how fast could these lengths be generated and trained on, synchronously or not?

    python bench/simulate.py            writes bench/results/simulate.json: 1 to 1,000 nodes, sync and async

Nothing sleeps and nothing is random but the lengths. The rules are the product's: the window of common/staleness.py,
oldest task first. A step takes the oldest B ready groups. A node leases two groups ahead of `concurrency` episodes.

- An engine decodes one token for each running request in `step_s` seconds at so many requests. It takes `context_s`
  more for each sampled token behind any of them.
- A call takes `call_s` on top, for prefill and request handling. It also takes `prefill_s`, unless the engine has
  another call's prompt before it: these are computed together.
- A step of the learner takes `train_s + train_token_s * tokens + train_pair_s * pairs`. Pairs are the squares of its
  episodes' tokens.
- Every node has the new version `deliver_s` later; generation stood still for it for `flip_s`.
- Where learner and engines share a machine, either may be slower while the other works: `engine_shared`,
  `learner_shared`.

bench/async_tail.py calibrates these on real processes and compares.
"""

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import harness
from simulated_engine import Node, Speeds, seconds_at, straight

Episode = tuple[int, ...]  # sampled tokens of each turn
Lengths = Callable[[int], list[Episode]]  # the samples of a task, by serial
LOOKAHEAD_GROUPS = 2
LEASE_AT_ONCE = 4


@dataclass(frozen=True)
class Setup:
    """A job's shape."""

    nodes: int
    concurrency: int
    groups_per_step: int
    group_size: int
    staleness: int
    steps: int


@dataclass
class Outcome:
    """Result of a simulation."""

    wall_s: float = 0.0  # from the end of the first step to the end of the last one
    learner_idle: float = 0.0  # share of the wall-clock
    staleness_max: int = 0  # the largest of any group: step that trains on it minus the version at its lease
    tokens: int = 0
    step_ends: list[float] = field(default_factory=list)


@dataclass
class Group:
    """The episodes of a leased task."""

    episodes: list[Episode]
    version: int  # the node's, when it leased the task
    left: int  # episodes that have not ended


class Simulation:
    """One run; `run` may be called once."""

    def __init__(self, setup: Setup, speeds: Speeds, lengths: Lengths) -> None:
        self._setup, self._speeds, self._lengths = setup, speeds, lengths
        self._nodes = [Node(speeds) for _ in range(setup.nodes)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
        self._newest: dict[object, int] = {}  # number of the newest event of a kind; earlier ones are out of date
        self._numbers = itertools.count()
        self._now = 0.0
        self._next_serial = 0
        self._hungry = OrderedDict.fromkeys(range(setup.nodes))  # nodes that ask for tasks
        self._groups: dict[int, Group] = {}
        self._ready: list[int] = []
        self._training: list[int] = []  # serials of the step; empty while the learner waits
        self._version = 0
        self._idle_s = 0.0
        self._work_s = 0.0  # the work of the trained step, were the learner alone
        self._work_at = 0.0
        self._slower = 1.0  # the learner, times as long as alone
        self._engines_slower = 1.0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Until the last step is trained."""
        self._lease()
        while len(self.outcome.step_ends) < self._setup.steps:
            self._now, number, act, arguments = heapq.heappop(self._events)
            if number == self._newest[act, arguments]:
                act(*arguments)
            self._share()
        ends = self.outcome.step_ends
        self.outcome.wall_s = ends[-1] - ends[0]
        self.outcome.learner_idle = self._idle_s / max(self.outcome.wall_s, 1e-9)
        return self.outcome

    def _at(self, time_s: float, act: Callable[..., None], *arguments: int) -> None:
        """Call `act` then, in place of an earlier appointment with the same arguments."""
        self._newest[act, arguments] = number = next(self._numbers)
        heapq.heappush(self._events, (time_s, number, act, arguments))

    # ------------------------------------------------------------ nodes

    def _wanted(self, node: Node) -> int:
        size = self._setup.group_size
        return (self._setup.concurrency + LOOKAHEAD_GROUPS * size - node.unfinished) // size

    def _lease(self) -> None:
        """Give what the window admits to nodes that ask, a few tasks at a time, in turn."""
        setup, touched = self._setup, set[int]()
        last = setup.groups_per_step * setup.steps
        while self._hungry and self._next_serial < last:
            who = next(iter(self._hungry))
            node = self._nodes[who]
            room = setup.groups_per_step * (node.version + setup.staleness + 1) - self._next_serial
            if room <= 0:
                break
            touched.add(who)
            for _ in range(min(LEASE_AT_ONCE, self._wanted(node), room, last - self._next_serial)):
                self._begin_group(node)
            if self._wanted(node) > 0:
                self._hungry.move_to_end(who)
            else:
                del self._hungry[who]
        for who in touched:
            self._fill(who)

    def _begin_group(self, node: Node) -> None:
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        episodes = self._lengths(serial)
        self._groups[serial] = Group(episodes, node.version, len(episodes))
        node.unfinished += len(episodes)
        node.queue.extend((serial, sample) for sample in range(len(episodes)))

    def _fill(self, who: int) -> None:
        """Start what has a place, and say when the next call ends."""
        node = self._nodes[who]
        node.advance(self._now)
        while node.queue and node.taken < self._setup.concurrency:
            serial, sample = node.queue.popleft()
            node.taken += 1
            node.start(self._groups[serial].episodes[sample][0], [serial, 0, sample])
        self._schedule(who)

    def _schedule(self, who: int) -> None:
        if (end := self._nodes[who].next_end()) is not None:
            self._at(end, self._calls_end, who)

    def _calls_end(self, who: int) -> None:
        node = self._nodes[who]
        node.advance(self._now)
        for serial, turn, sample in node.ended():
            group = self._groups[serial]
            turns = group.episodes[sample]
            if turn + 1 < len(turns):
                node.start(turns[turn + 1], [serial, turn + 1, sample], sum(turns[: turn + 1]))
                continue
            node.taken -= 1
            node.unfinished -= 1
            group.left -= 1
            if not group.left:
                heapq.heappush(self._ready, serial)
        if self._wanted(node) > 0:
            self._hungry.setdefault(who)
        self._fill(who)
        self._lease()
        self._take()

    def _delivered(self, version: int) -> None:
        for who, node in enumerate(self._nodes):
            node.advance(self._now)
            node.version = version
            node.stand_still(self._speeds.flip_s)
            self._schedule(who)
        self._lease()

    # ------------------------------------------------------------ learner

    def _take(self) -> None:
        size = self._setup.groups_per_step
        if self._training or len(self._ready) < size:
            return
        if self.outcome.step_ends:
            self._idle_s += self._now - self.outcome.step_ends[-1]
        self._training = [heapq.heappop(self._ready) for _ in range(size)]
        lengths = [sum(episode) for serial in self._training for episode in self._groups[serial].episodes]
        self.outcome.tokens += sum(lengths)
        self._work_s, self._work_at = self._speeds.train_seconds(lengths), self._now
        self._schedule_training()

    def _schedule_training(self) -> None:
        self._at(self._now + self._slower * self._work_s, self._trained)

    def _share(self) -> None:
        """Learner and engines on one machine: each is slower while the other works."""
        shared = self._speeds.learner_shared
        slower = shared if shared != 1 and any(node.busy for node in self._nodes) else 1.0
        if slower != self._slower:
            self._work_s = max(0.0, self._work_s - (self._now - self._work_at) / self._slower)
            self._work_at, self._slower = self._now, slower
            if self._training:
                self._schedule_training()
        engines = self._speeds.engine_shared if self._training else 1.0
        if engines != self._engines_slower:
            self._engines_slower = engines
            for who, node in enumerate(self._nodes):
                node.advance(self._now)
                node.slower = engines
                self._schedule(who)

    def _trained(self) -> None:
        for serial in self._training:
            age = self._version - self._groups.pop(serial).version
            self.outcome.staleness_max = max(self.outcome.staleness_max, age)
        self._training = []
        self._version += 1
        self.outcome.step_ends.append(self._now)
        self._at(self._now + self._speeds.deliver_s, self._delivered, self._version)
        self._take()


def simulate(setup: Setup, speeds: Speeds, lengths: Lengths) -> Outcome:
    return Simulation(setup, speeds, lengths).run()


def pareto(group_size: int, shape: float, scale: float, longest: int) -> Lengths:
    """Single-turn lengths scale * u^(-1/shape), at most `longest`: the smaller `shape`, the heavier the tail."""

    def of(serial: int) -> list[Episode]:
        draw = random.Random(f"0 {serial}")
        return [(max(1, min(longest, int(scale * (1 - draw.random()) ** (-1 / shape)))),) for _ in range(group_size)]

    return of


# These are assumptions, not measured: about one large GPU's engine with a mid-sized model.
FLEET = Speeds(step_s=straight(0.020, 8e-5), call_s=0.002, train_s=2.0, train_token_s=0.0, deliver_s=3.0, flip_s=0.3)
LEARNER_SHARE = 0.9  # its step, of the time that full engines take for as many tokens: just ahead of the fleet
SCALE = (1, 8, 64, 1000)
LARGE = 500


def steady_s(outcome: Outcome) -> float:
    """Seconds from step to step in the middle third: neither the start nor the wait for the last stragglers."""
    ends = outcome.step_ends
    first, last = len(ends) // 3, 2 * len(ends) // 3
    return (ends[last] - ends[first]) / (last - first)


def predict(nodes: int, staleness: Sequence[int], steps: int, fleet: Speeds = FLEET) -> list[dict[str, object]]:
    """A fleet of `nodes` whose step takes as many groups as run at once; the learner grows with the fleet."""
    concurrency, size = 64, 8
    setup = Setup(nodes, concurrency, max(1, nodes * concurrency // size), size, 0, steps)
    lengths = pareto(size, 1.2, 300.0, 16384)
    mean = sum(sum(map(sum, lengths(s))) for s in range(2000)) / (2000 * size)
    tokens_per_s = concurrency / seconds_at(fleet.step_s, concurrency)
    full_s = concurrency * mean / tokens_per_s  # generation of one step on engines that are always full
    speeds = replace(fleet, train_s=LEARNER_SHARE * full_s)
    synchronous = steady_s(simulate(setup, speeds, lengths))
    found: list[dict[str, object]] = []
    for bound in staleness:
        asynchronous = simulate(replace(setup, staleness=bound), speeds, lengths)
        step_s = steady_s(asynchronous)
        found.append(
            {
                "setup": asdict(replace(setup, staleness=bound)),
                "speeds": asdict(speeds),
                "mean_tokens": round(mean, 1),
                "gain": round(synchronous / step_s, 3),
                "synchronous_step_s": round(synchronous, 2),
                "asynchronous_step_s": round(step_s, 2),
                "full_engines_s": round(full_s, 2),
                "asynchronous_learner_idle": round(1 - speeds.train_s / step_s, 4),
                "staleness_max": asynchronous.staleness_max,
            }
        )
    return found


@harness.script(nodes=list(SCALE), staleness=[1, 2, 4, 8], large_staleness=8, steps=30)
def main(args: harness.Options) -> harness.Figures:
    windows = {nodes: args.staleness if nodes < LARGE else [args.large_staleness] for nodes in args.nodes}
    found = [row for nodes, staleness in windows.items() for row in predict(nodes, staleness, args.steps)]
    return {"rounds": 1, "steps": args.steps, "predictions": found}
