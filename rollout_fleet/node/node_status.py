"""A node's report on itself: the node loop writes it, the heartbeat thread reads it."""

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from broker.contract import NODE_AWAY, GroupWork, NodeReport, RunInfo, Waste
from common.process.health import LifeSigns
from common.span_buffer import SPANS
from common.staleness import window_end
from rollout_fleet.episode.sampler_protocol import EngineCounters, WeightsState
from rollout_fleet.join_timing import JoinTimer

IDLE = ("joining", "waiting")  # states in which the engine runs and no episode does


class OwnStatus:
    """The node's state and since when, its leases and counters. Thread-safe."""

    def __init__(self, node_id: str, clock: Callable[[], float] = time.monotonic, pool: str = "") -> None:
        self.node_id, self.pool = node_id, pool
        self.joining = JoinTimer()
        self.signs = LifeSigns()
        self._clock = clock
        self._lock = threading.Lock()
        self._state, self._waiting_on, self._since = "starting", "the engine's start", clock()
        self._weights, self._counters = WeightsState(), EngineCounters()
        self._leases: list[str] = []
        self._episodes, self._groups, self._limit = 0, list[GroupWork](), 0
        self._evaluation_tokens = 0
        self._cancelled_tokens, self._cancelled_s = 0, 0.0
        self._failed: dict[str, int] = {}
        self._waited_s = 0.0  # in states of IDLE that are over
        self._rate_at, self._rate_tokens, self._rate = clock(), 0, 0.0

    def show(self, state: str, waiting_on: str = "") -> None:
        """Set the state and what it waits for; the clock of a state runs on while it stays the same."""
        with self._lock:
            if state != self._state:
                now = self._clock()
                self._waited_s += self._idle_s(now)
                self._since = now
                SPANS.state(state)
            self._state, self._waiting_on = state, waiting_on

    def measure(
        self, weights: WeightsState, counters: EngineCounters, leases: list[str], evaluation_tokens: int = 0
    ) -> None:
        """Current figures of engine, weights and leases; tokens sampled for held-out problems so far."""
        with self._lock:
            self._weights, self._leases = weights, leases
            # The engine keeps counting. A copy keeps both figures of one moment, so their difference never falls.
            self._counters, self._evaluation_tokens = replace(counters), evaluation_tokens

    def work(self, episodes: int, groups: list[GroupWork], limit: int) -> None:
        """Running episodes, the oldest groups, and how many episodes run at once at most."""
        with self._lock:
            self._episodes, self._groups, self._limit = episodes, groups, limit

    def turned(self) -> None:
        """The node loop is alive."""
        with self._lock:
            self.signs.show(self._state, self._state not in NODE_AWAY)

    def cancelled(self, tokens: int, seconds: float) -> None:
        """Count the tokens of a group that ended half-way, and the seconds that no other counter has."""
        with self._lock:
            self._cancelled_tokens += tokens
            self._cancelled_s += seconds

    def sample_failed(self, reason: str) -> None:
        """Count a sample that failed, by its stop reason."""
        with self._lock:
            self._failed[reason] = self._failed.get(reason, 0) + 1

    @property
    def leases(self) -> list[str]:
        """Tokens to renew."""
        with self._lock:
            return list(self._leases)

    def report(self) -> NodeReport:
        """A snapshot for a heartbeat; tokens_per_s is over the time since the last one."""
        with self._lock:
            now, generated = self._clock(), self._counters.tokens_generated
            evaluated = generated if self.pool else min(generated, self._evaluation_tokens)
            if now - self._rate_at >= 0.5:
                self._rate = (generated - self._rate_tokens) / (now - self._rate_at)
                self._rate_at, self._rate_tokens = now, generated
            return NodeReport(
                node_id=self.node_id,
                pid=os.getpid(),
                host=socket.gethostname(),
                state=self._state,
                policy_version=self._weights.version,
                waiting_on=self._waiting_on,
                since_s=now - self._since,
                tokens_generated=generated - evaluated,
                evaluation_tokens=evaluated,
                pool=self.pool,
                tokens_wasted=self._cancelled_tokens,
                tokens_per_s=self._rate,
                generation_stall_s=self._weights.stall_s,
                flips=self._weights.flips,
                canary_max_difference=self._weights.canary_max_difference,
                kv_cache_usage=self._counters.kv_cache_usage,
                preemptions=self._counters.preemptions,
                prefix_hit_rate=self._counters.cached_tokens / max(1, self._counters.prompt_tokens),
                samples_failed=dict(self._failed),
                joined=self.joining.times,
                episodes_running=self._episodes,
                groups=self._groups,
                concurrency=self._limit,
                waste={}
                if self.pool  # it costs the training nothing
                else {
                    "cancelled": Waste(self._cancelled_tokens, self._cancelled_s),
                    "stalled": Waste(seconds=self._weights.stall_s),
                    "waiting": Waste(seconds=self._waited_s + self._idle_s(now)),
                },
            )

    def _idle_s(self, now: float) -> float:
        """Seconds of the current state that the engine had nothing to do."""
        return now - self._since if self._state in IDLE else 0.0


def explain(
    weights: WeightsState,
    learner_incarnation: int | None,
    episodes: int,
    starting: int,
    leased_before: bool,
    run: RunInfo,
    pool: str = "",
) -> tuple[str, str]:
    """(state, waiting_on) of a node that is neither starting nor leaving.

    `starting` counts those of the running `episodes` whose environment has not given its first observation.
    """
    if weights.excluded is not None:
        return "excluded", weights.excluded
    if weights.flipping:
        return "flipping", ""
    if episodes:
        return ("environments", f"the start of {starting} environments") if starting == episodes else ("generating", "")
    if learner_incarnation is None:
        return "joining" if weights.version < 0 else "waiting", "learner (none is attached)"
    if pool and weights.waiting_on in ("", WeightsState().waiting_on):
        return "joining" if weights.version < 0 else "waiting", "the next version that is evaluated"
    if weights.version < 0:
        return "joining", weights.waiting_on or "weights from learner"
    if weights.incarnation != learner_incarnation:
        return "waiting", f"weights from learner (it restarted as incarnation {learner_incarnation})"
    if not leased_before:
        return "waiting", "tasks (learner has offered none)"
    last = window_end(weights.version, run.groups_per_step, run.max_staleness) - 1
    return "waiting", f"task window: version {weights.version} may lease to serial {last}"
