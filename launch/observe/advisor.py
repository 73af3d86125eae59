"""Would more nodes, fewer nodes or a larger window help? From the rates of the newest steps, with what it would gain.

A step costs the learner `busy_s` and the fleet `work_s` node-seconds of generation. With n nodes that never wait, a
step takes max(busy_s, work_s / n) seconds. Learner and fleet lose the rest of the measured time by waiting for each
other. A larger window (staleness.max) removes that loss. A node counts as waiting only when nothing at all runs on it.
So `work_s` is an upper bound, and so is the predicted gain of more nodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.metrics import StepMetrics

STEPS = 20  # the newest ones, of one fleet
FEWEST = 5
IDLE = 0.15  # share of the step that the learner may wait before advice is given
WAITING = 0.20  # share of the fleet's time without work
LOST = 0.15  # share of the step in which both waited, before the window is blamed
SPARE = 0.9  # of the learner's time: a smaller fleet may use as much
HALF_FULL = 0.5  # share of the slots taken, below which nodes have too little to do rather than too much
LEAST_BUSY = 1e-3  # share of the step that a learner works at least, which clocks may not show
MOST_FACTOR = 4  # never advise more than this many times the nodes that were measured


@dataclass(frozen=True)
class Rates:
    """Means over the newest steps."""

    nodes: int  # that were alive
    step_s: float  # seconds from step to step
    idle_s: float  # the part in which the learner waits for groups; `idle` is its share
    waiting: float  # share of the nodes' time in which nothing ran on them
    taken: float = 1.0  # used share of the concurrency at the ends of the steps; 1 when nodes do not report it

    @property
    def idle(self) -> float:
        return self.idle_s / self.step_s

    @property
    def busy_s(self) -> float:
        return max(self.step_s - self.idle_s, LEAST_BUSY * self.step_s)

    @property
    def work_s(self) -> float:
        """Node-seconds of generation for one step."""
        return self.nodes * self.step_s * (1 - self.waiting)

    def predicted_s(self, nodes: int) -> float:
        """Seconds from step to step with that many nodes that never wait."""
        return max(self.busy_s, self.work_s / nodes)


@dataclass(frozen=True)
class Advice:
    change: str  # more_nodes, fewer_nodes, larger_window or none
    text: str  # the change and its gain
    nodes: int  # that would be right; 0 where it is not about them
    idle: float  # the learner's idle share
    idle_then: float  # the predicted one
    speedup: float = 1.0  # predicted factor by which steps become faster


def rates_of(lines: Sequence[StepMetrics]) -> Rates | None:
    """From metrics lines; None when there are too few of one learner and one size of the fleet."""
    newest: list[StepMetrics] = []
    for line in reversed(lines[-STEPS - 1 :]):
        if newest and (line.nodes_live, line.incarnation) != (newest[0].nodes_live, newest[0].incarnation):
            break
        newest.append(line)
    newest.reverse()
    if len(newest) <= FEWEST or newest[0].nodes_live < 1:
        return None
    nodes = newest[0].nodes_live
    steps = newest[1:]  # the first line is where the running totals start
    total_s = sum(line.step_s for line in steps)
    idle_s = sum(line.learner_idle_s for line in steps) / len(steps)
    if not total_s > 0 or math.isnan(idle_s):  # lines of another release
        return None
    waited_s = (newest[-1].seconds_wasted_waiting or 0.0) - (newest[0].seconds_wasted_waiting or 0.0)
    slots = sum(line.concurrency or 0 for line in steps)
    taken = sum(line.episodes_running or 0 for line in steps) / slots if slots else 1.0
    return Rates(
        nodes=nodes,
        step_s=total_s / len(steps),
        idle_s=idle_s,
        waiting=min(0.99, max(0.0, waited_s / (nodes * total_s))),
        taken=min(1.0, taken),
    )


def advise(rates: Rates, max_staleness: int) -> Advice:
    """The change that would help most; `max_staleness` is staleness.max of the run."""
    step_s = rates.predicted_s(rates.nodes)
    if rates.idle > IDLE and rates.taken < HALF_FULL:
        return _window(rates, max_staleness, max(rates.busy_s, rates.taken * rates.work_s / rates.nodes))
    if rates.idle > IDLE and 1 - step_s / rates.step_s > LOST:
        return _window(rates, max_staleness, step_s)
    if rates.idle > IDLE:
        nodes = max(rates.nodes + 1, min(math.ceil(rates.work_s / rates.busy_s), MOST_FACTOR * rates.nodes))
        words = f"{nodes - rates.nodes} more node{'s' * (nodes - rates.nodes > 1)}"
        return _faster(rates, "more_nodes", words, nodes, rates.predicted_s(nodes))
    if rates.waiting > WAITING:
        return _fewer(rates)
    text = f"learner and fleet keep pace: the learner is idle {rates.idle:.0%}, nodes {rates.waiting:.0%} of the time"
    return Advice("none", text, rates.nodes, rates.idle, rates.idle)


def _window(rates: Rates, max_staleness: int, step_s: float) -> Advice:
    why = f"learner and nodes wait for each other ({rates.idle:.0%} and {rates.waiting:.0%} of the time)"
    if rates.taken < HALF_FULL:
        why = f"engines are {rates.taken:.0%} full: the window is used up by groups of which long samples are left"
    if max_staleness == 0:
        why = "the run is synchronous: generation and training take turns"
    words = f"staleness.max {max_staleness + 1} instead of {max_staleness}"
    return _faster(rates, "larger_window", words, 0, step_s, f"; {why}")


def _faster(rates: Rates, change: str, words: str, nodes: int, step_s: float, why: str = "") -> Advice:
    """A change after which a step takes `step_s`."""
    idle_then = 1 - rates.busy_s / step_s
    speedup = rates.step_s / step_s
    gains = f"learner idle {rates.idle:.0%} -> about {idle_then:.0%}, steps up to {speedup:.1f} times as fast"
    return Advice(change, f"{words}: {gains}{why}", nodes, rates.idle, idle_then, speedup)


def _fewer(rates: Rates) -> Advice:
    """The learner is what is slow; how many nodes would do."""
    enough = max(1, math.ceil(rates.work_s / (SPARE * rates.busy_s)))
    less = rates.nodes - enough
    waits = f"nodes wait {rates.waiting:.0%} of the time"
    if less < 1:
        text = f"{waits}, and one fewer would be too few: the learner is what is slow ({rates.busy_s:.1f} s a step)"
        return Advice("none", text, rates.nodes, rates.idle, rates.idle)
    then = max(0.0, 1 - rates.work_s / (enough * rates.step_s))
    text = (
        f"{less} node{'s' * (less > 1)} fewer would do: {waits} for a learner that takes {rates.busy_s:.1f} s a step, "
        f"with {enough} about {then:.0%}"
    )
    return Advice("fewer_nodes", text, enough, rates.idle, rates.idle)


def advice_for(lines: Sequence[StepMetrics], max_staleness: int) -> Advice | None:
    """The advisor's line on a run's metrics; None while there are too few steps."""
    rates = rates_of(lines)
    return advise(rates, max_staleness) if rates is not None else None
