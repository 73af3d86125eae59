"""What vLLM's scheduler says of every engine step; only asked for where somebody acts on it.

Not its iteration statistics: the engine process holds outputs back until their request ends (vllm_compat.py), and what
they would say of preemptions and tokens comes too late or not at all.
"""

import time
from collections.abc import Callable
from typing import Any

from rollout_fleet.sampler_protocol import EngineCounters

SMOOTHING = 0.05  # of the usual duration of a step
OUTLIER = 4.0  # times the usual; more is a flip or a pause, not the work of a step


class StepClock:
    """How much longer than usual the steps take that compute preempted requests again."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ended: float | None = None  # the last step; None: the engine was idle since
        self._usual_s: float | None = None
        self._again = False  # the last step let preempted requests in

    def step(self, running: int, recomputed: int) -> float:
        """Seconds lost in the step that ended now, negative by chance; `running` requests are left, `recomputed` tokens
        were computed again.

        With batches in flight the scheduler speaks of the next step, so the one after counts as well.
        """
        now, began = self._clock(), self._ended
        again, self._again = self._again or recomputed > 0, recomputed > 0
        self._ended = now if running else None
        if began is None:
            return 0.0
        took_s = now - began
        if again:
            return 0.0 if self._usual_s is None else took_s - self._usual_s
        if self._usual_s is None:
            self._usual_s = took_s
        self._usual_s += SMOOTHING * (min(took_s, OUTLIER * self._usual_s) - self._usual_s)
        return 0.0


def stat_logger(counters: EngineCounters) -> Any:
    """A factory for `AsyncLLM.from_engine_args(stat_loggers=[...])` whose loggers write into `counters`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Count(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._clock = StepClock()

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is None:
                return
            running = int(scheduler_stats.num_running_reqs)
            back = scheduler_stats.prefix_cache_stats  # of the requests that this step let in
            recomputed = int(back.preempted_queries - back.preempted_hits)
            finished = len(iteration_stats.finished_requests) if iteration_stats is not None else 0
            counters.kv_cache_usage = float(scheduler_stats.kv_cache_usage)
            counters.running, counters.waiting = running, int(scheduler_stats.num_waiting_reqs)
            counters.preemptions += int(back.preempted_requests)
            counters.tokens_recomputed += recomputed
            counters.recompute_s += self._clock.step(running, recomputed)
            counters.tokens_sampled += running + finished  # a step is a token for every request in it

        def log_engine_initialized(self) -> None:
            pass

    return Count
