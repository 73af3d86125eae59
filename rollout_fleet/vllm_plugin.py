"""Entry point of vLLM's general plugins; loaded in every vLLM process of this environment, sometimes twice."""

from common.process.lifecycle import die_with_parent

BACKEND = "slipstream"  # name in vLLM's weight transfer registry
_registered = False


def register() -> None:
    """Add our weight transfer engine and the patches of vllm_patches/; in engine processes, die with the parent."""
    global _registered
    if _registered:
        return
    _registered = True

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from rollout_fleet.vllm_patches import compat, cpu_routing, cpu_weights, finished_outputs, flip, prefix_cache

    compat.check_version()
    WeightTransferEngineFactory.register_engine(
        BACKEND, "rollout_fleet.weights.worker_extension", "SlipstreamTransferEngine"
    )
    if current_platform.is_cpu():
        cpu_weights.keep_cpu_linear_weights_live()
        cpu_weights.keep_cpu_expert_weights_live()
        cpu_routing.return_routed_experts_on_cpu()
    if compat.in_engine_process():
        die_with_parent()
        flip.flip_in_one_call()
        finished_outputs.send_only_finished_outputs()
        prefix_cache.salt_by_version()
    else:
        finished_outputs.take_in_logprobs_at_once()
