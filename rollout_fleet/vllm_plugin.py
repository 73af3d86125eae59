"""Entry point of vLLM's general plugins; loaded in every vLLM process of this environment, sometimes twice."""

from common.lifecycle import die_with_parent

BACKEND = "slipstream"  # name in vLLM's weight transfer registry
_registered = False


def register() -> None:
    """Add our weight transfer engine and the patches of vllm_compat.py; in engine processes, die with the parent."""
    global _registered
    if _registered:
        return
    _registered = True

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from rollout_fleet import vllm_compat, vllm_prefix

    vllm_compat.check_version()
    WeightTransferEngineFactory.register_engine(BACKEND, "rollout_fleet.transfer", "SlipstreamTransferEngine")
    if current_platform.is_cpu():
        vllm_compat.keep_cpu_linear_weights_live()
        vllm_compat.keep_cpu_expert_weights_live()
        vllm_compat.return_routed_experts_on_cpu()
    if vllm_compat.in_engine_process():
        die_with_parent()
        vllm_compat.flip_in_one_call()
        vllm_compat.send_only_finished_outputs()
        vllm_prefix.salt_by_version()
    else:
        vllm_compat.take_in_logprobs_at_once()
