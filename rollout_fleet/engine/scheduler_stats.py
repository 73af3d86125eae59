"""Reads the statistics of vLLM's scheduler after every engine step; used only where rollout.concurrency is auto.

vLLM's iteration statistics do not serve: the engine process delays outputs until their request ends
(vllm_patches/engine_process.py). Their counts of preemptions and tokens come too late or not at all.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from rollout_fleet.episode.sampler_protocol import EngineCounters

SMOOTHING = 0.05  # weight of the newest step in the usual duration of a step
OUTLIER = 4.0  # times the usual; more is a pause, not the work of a step


class StepClock:
    """How much longer than usual the steps take that compute preempted requests again."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        batch: float = math.inf,
        flips: Callable[[], int] = lambda: 0,
    ) -> None:
        """`batch`: tokens that a step computes at most; `flips`: EngineWeights.half_flips, as of now."""
        self._clock = clock
        self._batch = batch
        self._flips = flips
        self._flips_seen = 0
        self._ended: float | None = None  # the last step; None: the engine was idle since
        self._usual_s: float | None = None
        self._left = 0.0  # tokens to compute again, before the last step took its share of them

    def step(self, running: int, recomputed: int) -> float:
        """Seconds lost in the step that ended now, negative by chance; `running` requests are left.

        `recomputed` tokens were computed again; those beyond a batch follow in the next steps. With batches in flight
        the scheduler reports the next step, so the one after counts as well. A step with a flip does not count.
        """
        now = self._clock()
        began = self._ended
        flips = self._flips()
        again = recomputed > 0 or self._left > 0
        self._left = max(0.0, self._left - self._batch) + recomputed
        flipped = flips != self._flips_seen or flips % 2 == 1
        self._flips_seen = flips
        self._ended = now if running else None
        if began is None or flipped:
            return 0.0
        took_s = now - began
        usual_s = took_s if self._usual_s is None else self._usual_s
        if again:
            return took_s - usual_s
        self._usual_s = usual_s + SMOOTHING * (min(took_s, OUTLIER * usual_s) - usual_s)
        return 0.0


def stat_logger(counters: EngineCounters, flips: Callable[[], int]) -> Any:
    """A factory for `AsyncLLM.from_engine_args(stat_loggers=[...])` whose loggers write into `counters`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Count(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._clock = StepClock(batch=vllm_config.scheduler_config.max_num_batched_tokens, flips=flips)

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is None:
                return
            running = int(scheduler_stats.num_running_reqs)
            back = scheduler_stats.prefix_cache_stats  # covers the requests that this step admitted
            recomputed = int(back.preempted_queries - back.preempted_hits)
            finished = len(iteration_stats.finished_requests) if iteration_stats is not None else 0
            counters.kv_cache_usage = float(scheduler_stats.kv_cache_usage)
            counters.running = running
            counters.waiting = int(scheduler_stats.num_waiting_reqs)
            counters.preemptions += int(back.preempted_requests)
            counters.tokens_recomputed += recomputed
            counters.recompute_s += self._clock.step(running, recomputed)
            # A step is a token for every request in it. With batches in flight a request counts from the step before.
            counters.tokens_sampled += running + finished

        def log_engine_initialized(self) -> None:
            pass

    return Count
