"""Every change to vLLM's own code, in one place, each with its reason and the versions that it was read against.

Applied by the plugin in all processes of an engine. What does not find the code it expects refuses to start:
an engine with half of these would sample from wrong weights without a word.
"""

import logging
import multiprocessing
import time
from typing import Any

logger = logging.getLogger(__name__)

TESTED = ("0.32.", "0.33.")
ENGINE_PROCESSES = ("EngineCore", "VllmWorker")  # names that vLLM gives to the processes it starts


def in_engine_process() -> bool:
    """Whether vLLM started this process as an engine core or a worker (not: a program that imports vLLM)."""
    is_child = multiprocessing.parent_process() is not None
    return is_child and multiprocessing.current_process().name.startswith(ENGINE_PROCESSES)


def check_version() -> None:
    """Say so when this vLLM is not one that the patches were read against."""
    import vllm

    if not vllm.__version__.startswith(TESTED):
        logger.warning("vLLM %s is untested; the patches here were read against %s*", vllm.__version__, TESTED)


def keep_cpu_linear_weights_live() -> None:
    """CPU linear layers compute with their parameters, not with a packed copy.

    vLLM 0.32-0.33 prepacks linear weights for oneDNN or AMX and empties `layer.weight`: a later load_weights
    raises, and with tied embeddings lm_head silently keeps the old packed weights after a layerwise reload. Plain
    F.linear costs 5-20 % in bf16 and makes in-place updates, checksums and the proof after a flip possible.
    """
    import torch
    from vllm.model_executor.layers import utils

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise RuntimeError("this vLLM has no dispatch_cpu_unquantized_gemm: live weights on CPU need a new look")

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def flip_in_one_call() -> None:
    """EngineCore.slipstream_flip: vLLM's own start / update / finish / set-version sequence between two steps.

    As separate calls each one waits for a step of the engine, a pause included (vLLM's pause_generation also
    sleeps 20 ms), and without the pause a token can be sampled between the new weights and the new label. One
    utility call runs in the engine's loop between two steps, so labels are exact by construction.
    """
    from vllm.v1.engine.core import EngineCore

    for name in ("set_weight_version", "_reset_caches", "collective_rpc", "pause_scheduler"):
        if not hasattr(EngineCore, name):
            raise RuntimeError(f"this vLLM's EngineCore has no {name}: the flip needs a new look")
    EngineCore.slipstream_flip = _flip  # type: ignore[attr-defined]


def _flip(engine: Any, incarnation: int, version: int, recompute: bool) -> float:
    """Seconds that generation stood still. A failure leaves the engine paused: its weights may be half new."""
    if engine.batch_queue:
        raise RuntimeError("batches are in flight: pause generation before the flip")
    started = time.perf_counter()
    try:
        engine.collective_rpc("start_weight_update")
        update = {"op": "apply", "incarnation": incarnation, "version": version}
        engine.collective_rpc("update_weights", kwargs={"update_info": update})
        engine.collective_rpc("finish_weight_update")
    except BaseException:
        engine.pause_scheduler("keep", False)
        raise
    engine.set_weight_version(f"{incarnation}:{version}")
    if recompute:
        engine._reset_caches(reset_running_requests=True)
    return time.perf_counter() - started
