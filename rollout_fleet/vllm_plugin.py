"""Entry point of vLLM's general plugins; loaded in every vLLM process of this environment, sometimes twice."""

import logging
import multiprocessing
import multiprocessing.util
import os
from functools import cache

from common.process.lifecycle import die_with_parent

logger = logging.getLogger(__name__)

BACKEND = "slipstream"  # name in vLLM's weight transfer registry
TESTED = "0.32."  # the versions that the patches were read against
PLAIN_ENGINE = "SLIPSTREAM_PLAIN_ENGINE"  # variable of a server that is no node: its vLLM is not changed
ENGINE_PROCESSES = ("EngineCore", "VllmWorker")  # names that vLLM gives to the processes it starts


@cache
def register() -> None:
    """Add our weight transfer engine and the patches of vllm_patches/; in engine processes, die with the parent."""
    if PLAIN_ENGINE in os.environ:
        multiprocessing.util.register_after_fork(register, lambda _: _end_with_parent())
        _end_with_parent()
        return
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from rollout_fleet.vllm_patches import worker_process

    if not vllm.__version__.startswith(TESTED):
        logger.warning("vLLM %s is untested; the patches here were read against %s*", vllm.__version__, TESTED)
    module = "rollout_fleet.weights.worker_extension"
    WeightTransferEngineFactory.register_engine(BACKEND, module, "SlipstreamTransferEngine")
    if current_platform.is_cpu():
        worker_process.keep_cpu_weights_live()
        worker_process.compute_mla_from_parameters()
        worker_process.return_routed_experts_on_cpu()
    # A forked child inherits that vLLM has loaded its plugins and that this function has run: neither runs again.
    multiprocessing.util.register_after_fork(register, lambda _: _prepare_engine_process())
    _prepare_engine_process()


def _prepare_engine_process() -> None:
    """Nothing in a program that only imports vLLM."""
    if _end_with_parent():
        _patch_engine()


def _end_with_parent() -> bool:
    """Whether this is an engine process, which now dies with its parent."""
    is_child = multiprocessing.parent_process() is not None
    engine = is_child and multiprocessing.current_process().name.startswith(ENGINE_PROCESSES)
    if engine:
        die_with_parent()
    return engine


@cache  # a forked worker inherits the patches of its engine, and must not apply them twice
def _patch_engine() -> None:
    from rollout_fleet.vllm_patches import engine_process

    engine_process.flip_in_one_call()
    engine_process.send_only_finished_outputs()
