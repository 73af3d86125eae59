"""A node's report on itself: the node loop writes it, the heartbeat thread reads it."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from broker.contract import NODE_AWAY, GroupWork, JoinTimes, NodeReport
from common.process.health import LifeSigns
from common.process.lifecycle import start_ticks
from common.span_buffer import SPANS
from common.waits import NO_WAIT, WaitFor, WaitKind
from common.waste import Waste
from common.weights.receive.contract import WeightsState
from rollout_fleet.episode.sampler_protocol import EngineCounters

JoinStage = Literal["registered", "engine", "staged", "active", "leased", "delivered"]
IDLE = ("joining", "waiting")  # states in which the engine runs and no episode does


class NodeStatusTracker:
    """The node's state and since when, its leases and counters. Thread-safe."""

    def __init__(self, node_id: str, clock: Callable[[], float] = time.monotonic, pool: str = "") -> None:
        self.node_id = node_id
        self.pool = pool
        self.joining = JoinTimer()
        self.signs = LifeSigns()
        self._clock = clock
        self._lock = threading.Lock()
        self._report = NodeReport(
            node_id=node_id,
            pid=os.getpid(),
            host=socket.gethostname(),
            state="starting",
            policy_version=-1,
            wait=WaitFor(WaitKind.ENGINE),
            pool=pool,
            instance=secrets.token_hex(8),
        )
        self._since = clock()  # its state began
        self._leases: list[str] = []
        self._cancelled = Waste()
        self._failed: dict[str, int] = {}
        self._waited_s = 0.0  # in states of IDLE that are over
        self._rate_at = clock()
        self._rate_tokens = 0

    def belongs_to(self, run_id: str) -> None:
        """The node has this run's config or joined it, and says so from now on: another run's broker refuses it."""
        with self._lock:
            self._report = replace(self._report, run_id=run_id)

    def show(self, state: str, wait: WaitFor = NO_WAIT) -> None:
        """Set the state and what it waits for; the clock of a state runs on while it stays the same."""
        with self._lock:
            if state != self._report.state:
                now = self._clock()
                self._waited_s += self._idle_s(now)
                self._since = now
                SPANS.state(state)
            self._report = replace(self._report, state=state, wait=wait)

    def measure(self, weights: WeightsState, counters: EngineCounters, leases: list[str], evaluated: int = 0) -> None:
        """Current figures of engine, weights and leases; `evaluated`: tokens sampled for held-out problems so far."""
        generated = counters.tokens_generated  # both are of one moment, so their difference never falls
        evaluated = generated if self.pool else min(generated, evaluated)
        with self._lock:
            self._leases = leases
            self._report = replace(
                self._report,
                policy_version=weights.version,
                tokens_generated=generated - evaluated,
                evaluation_tokens=evaluated,
                generation_stall_s=weights.stall_s,
                flips=weights.flips,
                canary_max_difference=weights.canary_max_difference,
                kv_cache_usage=counters.kv_cache_usage,
                preemptions=counters.preemptions,
                prefix_hit_rate=counters.cached_tokens / max(1, counters.prompt_tokens),
            )

    def work(self, episodes: int, groups: list[GroupWork], limit: int) -> None:
        """Running episodes, the oldest groups, and how many episodes run at once at most."""
        with self._lock:
            self._report = replace(self._report, episodes_running=episodes, groups=groups, concurrency=limit)

    def turned(self) -> None:
        """The node loop is alive."""
        with self._lock:
            self.signs.show(self._report.state, self._report.state not in NODE_AWAY)

    def cancelled(self, tokens: int, seconds: float) -> None:
        """Count the tokens of a group that ended half-way, and the seconds that no other counter has."""
        with self._lock:
            self._cancelled = Waste(self._cancelled.tokens + tokens, self._cancelled.seconds + seconds)

    def sample_failed(self, reason: str) -> None:
        with self._lock:
            self._failed[reason] = self._failed.get(reason, 0) + 1

    @property
    def leases(self) -> list[str]:
        with self._lock:
            return list(self._leases)

    def report(self) -> NodeReport:
        """A snapshot for a heartbeat; tokens_per_s is over the time since the last one."""
        with self._lock:
            now = self._clock()
            known = self._report
            rate = known.tokens_per_s
            if now - self._rate_at >= 0.5:
                generated = known.tokens_generated + known.evaluation_tokens
                rate = (generated - self._rate_tokens) / (now - self._rate_at)
                self._rate_at = now
                self._rate_tokens = generated
            waste = {
                "cancelled": self._cancelled,
                "stalled": Waste(seconds=known.generation_stall_s),
                "waiting": Waste(seconds=self._waited_s + self._idle_s(now)),
            }
            self._report = replace(
                known,
                since_s=now - self._since,
                tokens_per_s=rate,
                tokens_wasted=self._cancelled.tokens,
                waste={} if self.pool else waste,  # a node of the pool costs the training nothing
                samples_failed=dict(self._failed),
                joined=self.joining.times,
            )
            return self._report

    def _idle_s(self, now: float) -> float:
        """Seconds of the current state that the engine had nothing to do."""
        return now - self._since if self._report.state in IDLE else 0.0


def explain(
    weights: WeightsState,
    *,
    learner: int | None,
    episodes: int,
    starting: int,
    leased: bool,
    pool: str = "",
    paused: str = "",
) -> tuple[str, WaitFor]:
    """(state, what it waits for) of a node that is neither starting nor leaving.

    `learner`: the incarnation of the one that is attached; `leased`: this node has leased a task before.
    `paused`: why it takes no tasks now. `starting` counts those of the running `episodes` whose environment has not
    given its first observation.
    """
    if weights.excluded is not None:
        return "excluded", WaitFor(WaitKind.REPAIR, cause=weights.excluded)
    if weights.flipping:
        return "flipping", NO_WAIT
    if episodes:
        starts = starting == episodes
        return ("environments", WaitFor(WaitKind.ENVIRONMENTS, count=starting)) if starts else ("generating", NO_WAIT)
    state = "joining" if weights.version < 0 else "waiting"
    if learner is None:
        return state, WaitFor(WaitKind.LEARNER)
    if pool and not weights.refused:
        return state, WaitFor(WaitKind.EVALUATED_VERSION)
    if weights.version < 0:
        return state, WaitFor(WaitKind.WEIGHTS, cause=weights.refused)
    if weights.incarnation != learner:
        return state, WaitFor(WaitKind.OTHER_WEIGHTS, count=learner, cause=weights.refused)
    if paused:
        return state, WaitFor(WaitKind.SCORER, cause=paused)
    if not leased:
        return state, WaitFor(WaitKind.TASKS)
    return state, WaitFor(WaitKind.WINDOW, version=weights.version)


class JoinTimer:
    """When the process reached each stage on its way into the job; only the first time counts."""

    def __init__(self, age_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`age_s`: as `process_age_s`, which stands in for None."""
        age_s = process_age_s() if age_s is None else age_s
        self._clock = clock
        self._origin = clock() - age_s
        self.times = JoinTimes(started_s=time.time() - age_s)  # may be read from any thread

    def reached(self, stage: JoinStage) -> bool:
        """Note a stage; True when it is new. For one thread."""
        if getattr(self.times, stage):
            return False
        self.times = replace(self.times, **{stage: self._clock() - self._origin})
        return True


def process_age_s() -> float:
    """Seconds since this process started, to a hundredth; 0 where the operating system does not say (not Linux)."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
