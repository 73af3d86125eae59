"""The change of weights as one call between two engine steps, and a prefix cache that shares no block across it.

A sender salts its request with the version, but a flip may come before the engine begins the request. The new weights
would then read blocks of the old version, found under the old salt. So the engine decides the salt.
"""

import time
from typing import Any

from rollout_fleet.vllm_patches.compat import require
from rollout_fleet.vllm_patches.finished_outputs import release_held

SEPARATOR = "#"  # behind the version: what else keeps a request to itself


def salt(label: str, own: str = "") -> str:
    """The cache salt of a request under the weights `label`; with `own` it shares no blocks with other requests."""
    return f"{label}{SEPARATOR}{own}" if own else label


def flip_in_one_call() -> None:
    """EngineCore.slipstream_flip: vLLM's own start / update / finish / set-version sequence between two steps.

    Separate calls would each wait for an engine step, the pause too (vLLM's pause_generation also sleeps 20 ms).
    Without the pause a token could be sampled between the new weights and the new label. One utility call runs in the
    engine's loop between two steps, so labels are exact by construction. There a request is salted, too: vLLM
    0.32 hashes its blocks in the thread that reads the socket.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    require(EngineCore, "set_weight_version", "_reset_caches", "collective_rpc", "pause_scheduler", "add_request")
    require(Request, "update_block_hashes")
    add = EngineCore.add_request

    def add_salted(engine: Any, request: Any, request_wave: int = 0) -> None:
        _resalt(request, engine.get_weight_version())
        add(engine, request, request_wave)

    EngineCore.add_request = add_salted  # type: ignore[method-assign]
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
    for request in engine.scheduler.waiting:
        if request.num_computed_tokens == 0:  # all its keys and values will be of the new weights
            _resalt(request, label)
    return time.perf_counter() - started


def drop_cache(engine: Any) -> None:
    """Put all running requests back, to be computed again from their prompts."""
    running = list(engine.scheduler.running)
    engine._reset_caches(reset_running_requests=True)
    for request in running:
        # scheduler_stats.py counts preemptions for want of KV cache, and a flip is none. Requests that were preempted
        # earlier are reset too: the step that lets them in again would count as lost time, and the flip caused it.
        request.num_preemptions = 0


def _resalt(request: Any, label: str) -> None:
    """Hash the blocks of a request without computed tokens under `label`; a request without salt stays without."""
    if not request.cache_salt:
        return
    before, _, own = request.cache_salt.partition(SEPARATOR)
    if before == label:
        return
    request.cache_salt = salt(label, own)
    request.block_hashes.clear()
    request.update_block_hashes()
