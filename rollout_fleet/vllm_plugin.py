"""Entry point of vLLM's general plugins; loaded in every vLLM process of this environment, sometimes twice."""

import logging
import multiprocessing
import multiprocessing.util
from functools import cache

from common.process.lifecycle import die_with_parent

logger = logging.getLogger(__name__)

BACKEND = "slipstream"  # name in vLLM's weight transfer registry
TESTED = "0.32."  # the versions that the patches were read against
ENGINE_PROCESSES = ("EngineCore", "VllmWorker")  # names that vLLM gives to the processes it starts


@cache
def register() -> None:
    """Add our weight transfer engine and the patches of vllm_patches/; in engine processes, die with the parent."""
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
    is_child = multiprocessing.parent_process() is not None
    if is_child and multiprocessing.current_process().name.startswith(ENGINE_PROCESSES):
        die_with_parent()
        _patch_engine()


@cache  # a forked worker inherits the patches of its engine, and must not apply them twice
def _patch_engine() -> None:
    from rollout_fleet.vllm_patches import engine_process

    engine_process.flip_in_one_call()
    engine_process.send_only_finished_outputs()
