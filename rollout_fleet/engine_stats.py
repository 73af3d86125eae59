"""What vLLM says of its KV cache, engine step by engine step; only asked for where somebody acts on it."""

from typing import Any

from rollout_fleet.sampler_protocol import EngineCounters


def stat_logger(counters: EngineCounters) -> Any:
    """A factory for `AsyncLLM.from_engine_args(stat_loggers=[...])` whose loggers write into `counters`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class KeepNewest(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                counters.kv_cache_usage = float(scheduler_stats.kv_cache_usage)
                counters.waiting = int(scheduler_stats.num_waiting_reqs)
            if iteration_stats is not None:
                counters.preemptions += int(iteration_stats.num_preempted_reqs)

        def log_engine_initialized(self) -> None:
            pass

    return KeepNewest
