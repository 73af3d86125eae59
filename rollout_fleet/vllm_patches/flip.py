"""The change of weights as one call between two engine steps; vLLM's own is a sequence of calls."""

import time
from typing import Any

from rollout_fleet.vllm_patches.compat import require
from rollout_fleet.vllm_patches.finished_outputs import release_held
from rollout_fleet.vllm_patches.prefix_cache import resalt_waiting


def flip_in_one_call() -> None:
    """EngineCore.slipstream_flip: vLLM's own start / update / finish / set-version sequence between two steps.

    Separate calls would each wait for an engine step, the pause too (vLLM's pause_generation also sleeps 20 ms).
    Without the pause a token could be sampled between the new weights and the new label. One utility call runs in the
    engine's loop between two steps, so labels are exact by construction.
    """
    from vllm.v1.engine.core import EngineCore

    require(EngineCore, "set_weight_version", "_reset_caches", "collective_rpc", "pause_scheduler")
    EngineCore.slipstream_flip = _flip  # type: ignore[attr-defined]


def _flip(engine: Any, incarnation: int, version: int, recompute: bool) -> float:
    """Seconds that generation stood still. A failure leaves the engine paused: its weights may be half new."""
    if engine.batch_queue:
        raise RuntimeError("batches are in flight: pause generation before the flip")
    started = time.perf_counter()
    try:
        engine.collective_rpc("start_weight_update")
        update = {"incarnation": incarnation, "version": version}
        engine.collective_rpc("update_weights", kwargs={"update_info": update})
        engine.collective_rpc("finish_weight_update")
    except BaseException:
        engine.pause_scheduler("keep", False)
        raise
    release_held(engine)  # tokens sampled so far keep their label
    label = f"{incarnation}:{version}"
    engine.set_weight_version(label)
    if recompute:
        drop_cache(engine)
    resalt_waiting(engine.scheduler, label)
    return time.perf_counter() - started


def drop_cache(engine: Any) -> None:
    """Put all running requests back, to be computed again from their prompts."""
    running = list(engine.scheduler.running)
    engine._reset_caches(reset_running_requests=True)
    for request in running:
        # scheduler_stats.py counts preemptions for want of KV cache, and a flip is none. Requests that were preempted
        # earlier are reset too: the step that lets them in again would count as lost time, and the flip caused it.
        request.num_preemptions = 0
