"""The experts that a token was routed to, also from the CPU's model runner."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from rollout_fleet.vllm_patches.compat import require


def return_routed_experts_on_cpu() -> None:
    """enable_return_routed_experts also with the model runner that the CPU has.

    vLLM 0.32 serves it only in its second model runner, which needs triton. That one's connector needs two things
    from a runner: the requests of the batch, and the progress of each.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    require(VllmConfig, "_verify_aux_output_compatibility")
    initialize = CPUModelRunner.initialize_kv_cache
    execute = CPUModelRunner.execute_model
    sample = CPUModelRunner.sample_tokens

    def verify(config: Any) -> None:
        if config.aux_output_config.enabled and not config.model_config.is_moe:
            raise ValueError("routed experts of a model without experts")

    def initialize_with_routing(runner: Any, config: Any, is_profiling: bool = False, **options: Any) -> None:
        initialize(runner, config, is_profiling, **options)
        if runner.vllm_config.aux_output_config.enabled and not is_profiling:
            runner.slipstream_routing = get_aux_output_connector(runner.model, runner.vllm_config, config)

    def execute_with_routing(runner: Any, scheduled: Any, *rest: Any, **options: Any) -> Any:
        connector = getattr(runner, "slipstream_routing", None)
        if connector is not None:
            connector.begin_step(scheduled.aux_output_connector_metadata)
        result = execute(runner, scheduled, *rest, **options)
        if connector is not None and runner.execute_model_state is not None:
            batch = runner.input_batch
            counts = [scheduled.num_scheduled_tokens[request_id] for request_id in batch.req_ids]
            read = SimpleNamespace(  # the three attributes of the second runner's batch that the connector reads
                req_ids=list(batch.req_ids),
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(counts)].copy(),
            )
            runner.slipstream_routed = connector.prepare_output(read)
        return result

    def sample_with_routing(runner: Any, *rest: Any, **options: Any) -> Any:
        output = sample(runner, *rest, **options)
        routed = runner.__dict__.pop("slipstream_routed", None)
        if routed is not None:
            sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            routed.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = routed.process_output()
        return output

    VllmConfig._verify_aux_output_compatibility = verify  # type: ignore[method-assign]
    CPUModelRunner.initialize_kv_cache = initialize_with_routing  # type: ignore[method-assign]
    CPUModelRunner.execute_model = execute_with_routing  # type: ignore[method-assign]
    CPUModelRunner.sample_tokens = sample_with_routing  # type: ignore[method-assign]
