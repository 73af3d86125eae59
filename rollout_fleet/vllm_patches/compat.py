"""Every change to vLLM's own code (the prefix cache's: vllm_prefix.py), its reason, the versions it was read against.

Applied by the plugin in all processes of an engine. What does not find the code it expects refuses to start:
an engine with half of these would sample from wrong weights without a word.
"""

import logging
import multiprocessing
import time
from typing import Any

from rollout_fleet.vllm_patches.prefix_cache import resalt_waiting

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
    raises, and with tied embeddings lm_head silently keeps the old packed weights after a layerwise reload. Reading
    the parameters costs little and makes in-place updates, checksums and the proof after a flip possible.
    """
    import torch
    from vllm.model_executor.layers import utils

    from rollout_fleet.vllm_patches.unpacked_linear import linear

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise RuntimeError("this vLLM has no dispatch_cpu_unquantized_gemm: live weights on CPU need a new look")

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = plain


def keep_cpu_expert_weights_live() -> None:
    """CPU experts compute with `w13_weight` and `w2_weight` as they were loaded, not with a packed copy.

    vLLM 0.32-0.33 pads and prepacks them in place of the parameters: a later load_weights writes rows of one layout
    into another, and what the engine holds cannot be read back. Plain matrix products per expert in use.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for name in ("process_weights_after_loading", "apply"):
        if name not in vars(CPUUnquantizedExperts):
            raise RuntimeError(f"this vLLM's CPUUnquantizedExperts has no {name}: live experts on CPU need a new look")

    def nothing(experts: Any, layer: Any) -> None: ...

    CPUUnquantizedExperts.process_weights_after_loading = nothing  # type: ignore[method-assign]
    CPUUnquantizedExperts.apply = _apply_experts  # type: ignore[method-assign]


def _apply_experts(
    experts: Any,
    *,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    expert_map: Any,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """output [T, H] = sum over a token's experts of weight * w2 (act(gate x) * up x); w1 [E, 2 I, H], w2 [E, H, I]."""
    import torch
    from torch.nn import functional as F
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    functions = {
        MoEActivation.SILU: F.silu,
        MoEActivation.GELU: F.gelu,
        MoEActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    }
    if activation not in functions or expert_map is not None:
        raise NotImplementedError(f"experts with {activation} or spread over ranks, on CPU")
    chosen = topk_ids.flatten()
    order = chosen.argsort(stable=True)
    total = torch.zeros_like(output, dtype=torch.float32)
    at = 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=len(w1)).tolist()):
        if not count:
            continue
        places = order[at : at + count]
        at += count
        tokens = places // topk_ids.shape[1]
        bias1, bias2 = (None if b is None else b[expert] for b in (experts.w1_bias, experts.w2_bias))
        gate, up = F.linear(hidden_states[tokens], w1[expert], bias1).chunk(2, -1)
        out = F.linear(functions[activation](gate) * up, w2[expert], bias2).float()
        total.index_add_(0, tokens, out if apply_router_weight_on_input else out * topk_weights.flatten()[places, None])
    output.copy_(total)


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
    _release_held(engine)  # what was sampled so far keeps its label
    label = f"{incarnation}:{version}"
    engine.set_weight_version(label)
    if recompute:
        _drop_cache(engine)
    resalt_waiting(engine.scheduler, label)
    return time.perf_counter() - started


def _drop_cache(engine: Any) -> None:
    """Put all running requests back, to be computed again from their prompts."""
    running = list(engine.scheduler.running)
    engine._reset_caches(reset_running_requests=True)
    for request in running:
        # Not for want of KV cache, which engine_stats.py counts. One that was preempted earlier must not be told apart
        # either: the time of the step that lets it in again would count as lost, and that is the flip's.
        request.num_preemptions = 0


def send_only_finished_outputs() -> None:
    """The engine process hands over a request when it ends, not token by token, if only its end was asked for.

    vLLM 0.32-0.33 sends every sampled token of every request to the front process at every step, even with
    output_kind=FINAL_ONLY, where the front throws all but the last away: 15 us of front CPU per token, which on two
    cores is taken from the learner. A flip releases what is held first, under the version that sampled it.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    for cls, name in ((EngineCore, "_attach_weight_version"), (EngineCoreProc, "_send_finish_outputs_to_client")):
        if not hasattr(cls, name):
            raise RuntimeError(f"this vLLM's {cls.__name__} has no {name}: holding outputs back needs a new look")
    attach, finish, abort = (
        EngineCore._attach_weight_version,
        EngineCoreProc._send_finish_outputs_to_client,
        EngineCore.abort_requests,
    )

    def attach_and_hold(engine: Any, outputs: dict[int, Any]) -> None:
        attach(engine, outputs)
        _hold_unfinished(engine, outputs)

    def release_and_finish(engine: Any, req_ids: list[str], client_index: int, finish_reason: Any) -> None:
        _release_held(engine, set(req_ids))
        finish(engine, req_ids, client_index, finish_reason)

    def forget_and_abort(engine: Any, request_ids: list[str]) -> None:
        for request_id in request_ids:
            _held(engine).pop(request_id, None)
        abort(engine, request_ids)

    EngineCore._attach_weight_version = attach_and_hold
    EngineCoreProc._send_finish_outputs_to_client = release_and_finish
    EngineCore.abort_requests = forget_and_abort


class _Held:
    """The first unsent output of a request and what followed; joined at the end, so that a token costs an append."""

    __slots__ = ("client", "logprobs", "output", "routed")

    def __init__(self, client: int, output: Any) -> None:
        self.client, self.output = client, output
        self.logprobs: list[Any] = []  # LogprobsLists of one step each
        self.routed: list[Any] = []  # [tokens, layers, experts per token] each, where routing is recorded
        self._take(output)

    def _take(self, output: Any) -> None:
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if output.routed_experts is not None:
            self.routed.append(output.routed_experts)

    def add(self, output: Any) -> None:
        self.output.new_token_ids += output.new_token_ids
        self._take(output)

    def finish_into(self, final: Any) -> None:
        """`final` gets everything that was held, in front of its own."""
        self.add(final)
        final.new_token_ids = self.output.new_token_ids
        final.new_logprobs = self.joined()
        final.routed_experts = self.joined_routing()
        if final.prefill_stats is None:
            final.prefill_stats = self.output.prefill_stats

    def joined(self) -> Any:
        """LogprobsLists of all tokens, [n, 1] each; the sampled token is the only candidate of each place."""
        import numpy as np

        if not self.logprobs:
            return None
        sample = self.logprobs[0]
        return sample._replace(
            logprob_token_ids=np.array(self.output.new_token_ids, sample.logprob_token_ids.dtype)[:, None],
            logprobs=np.concatenate([lists.logprobs[:, :1] for lists in self.logprobs]),
            sampled_token_ranks=np.concatenate([lists.sampled_token_ranks for lists in self.logprobs]),
        )

    def joined_routing(self) -> Any:
        """[tokens, layers, experts per token] of all that was held, or None."""
        import numpy as np

        return np.concatenate(self.routed) if self.routed else None


def _held(engine: Any) -> dict[str, _Held]:
    return engine.__dict__.setdefault("slipstream_held", {})


def _hold_unfinished(engine: Any, outputs: dict[int, Any]) -> None:
    """Keep back, in place, what is not the end of its request."""
    held, requests = _held(engine), engine.scheduler.requests
    for client, batch in list(outputs.items()):
        sent = []
        for output in batch.outputs:
            entry = held.get(output.request_id)
            if output.finish_reason is None:
                if entry is not None:
                    entry.add(output)
                elif _may_wait(output, requests.get(output.request_id)):
                    held[output.request_id] = _Held(client, output)
                else:
                    sent.append(output)
                continue
            if entry is not None:
                del held[output.request_id]
                entry.finish_into(output)
            sent.append(output)
        batch.outputs = sent
        if not (sent or batch.scheduler_stats or batch.finished_requests or batch.utility_output):
            del outputs[client]


def _may_wait(output: Any, request: Any) -> bool:
    """Whether only the end of this request was asked for, and this output is tokens and nothing else."""
    from vllm.sampling_params import RequestOutputKind

    params = getattr(request, "sampling_params", None)
    plain = output.pooling_output is None and output.new_sampling_mask is None
    if params is None or not plain or params.output_kind != RequestOutputKind.FINAL_ONLY:
        return False
    return params.logprobs in (None, 0) and params.prompt_logprobs is None


def _release_held(engine: Any, request_ids: set[str] | None = None) -> None:
    """Send what is held, of these requests or of all, under the version of now."""
    from vllm.v1.engine import EngineCoreOutputs

    held = _held(engine)
    batches: dict[int, list[Any]] = {}
    for request_id in list(held) if request_ids is None else request_ids & held.keys():
        entry = held.pop(request_id)
        entry.output.new_logprobs = entry.joined()
        entry.output.routed_experts = entry.joined_routing()
        batches.setdefault(entry.client, []).append(entry.output)
    for client, batch in batches.items():
        message = EngineCoreOutputs(outputs=batch, weight_version=engine.get_weight_version())
        engine.output_queue.put_nowait((client, message))


def return_routed_experts_on_cpu() -> None:
    """enable_return_routed_experts also with the model runner that the CPU has.

    vLLM 0.32-0.33 serves it in its second model runner alone, which needs triton. Its connector, with the store that
    remembers the routing of cached prefixes, asks little of a runner: what is in the batch, how far each request is.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if not hasattr(VllmConfig, "_verify_aux_output_compatibility"):
        raise RuntimeError("this vLLM's VllmConfig has no _verify_aux_output_compatibility: routing needs a new look")
    initialize, execute, sample = (
        CPUModelRunner.initialize_kv_cache,
        CPUModelRunner.execute_model,
        CPUModelRunner.sample_tokens,
    )

    def verify(config: Any) -> None:
        if config.aux_output_config.enabled and not config.model_config.is_moe:
            raise ValueError("routed experts of a model without experts")
        if config.aux_output_config.enabled and not config.cache_config.enable_prefix_caching:
            raise ValueError("routed experts need prefix caching")

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
            runner.slipstream_routed = connector.prepare_output(_batch_of(runner.input_batch, scheduled))
        return result

    def sample_with_routing(runner: Any, *rest: Any, **options: Any) -> Any:
        output = sample(runner, *rest, **options)
        routed = runner.__dict__.pop("slipstream_routed", None)
        if routed is not None:
            import numpy as np

            sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            routed.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = routed.process_output()
        return output

    VllmConfig._verify_aux_output_compatibility = verify  # type: ignore[method-assign]
    CPUModelRunner.initialize_kv_cache = initialize_with_routing  # type: ignore[method-assign]
    CPUModelRunner.execute_model = execute_with_routing  # type: ignore[method-assign]
    CPUModelRunner.sample_tokens = sample_with_routing  # type: ignore[method-assign]


def _batch_of(batch: Any, scheduled: Any) -> Any:
    """The three attributes of the second model runner's batch that its routing connector reads."""
    from types import SimpleNamespace

    import numpy as np

    counts = [scheduled.num_scheduled_tokens[request_id] for request_id in batch.req_ids]
    return SimpleNamespace(
        req_ids=list(batch.req_ids),
        query_start_loc_np=np.cumsum([0, *counts]),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(counts)].copy(),
    )


def take_in_logprobs_at_once() -> None:
    """The front process appends the log-probabilities of many tokens in one go.

    vLLM 0.32-0.33 handles each token by itself (3 us); with logprobs=0, flat_logprobs and no detokenizer the flat
    lists can be extended directly. Everything else goes the old way.
    """
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    one_by_one = LogprobsProcessor._update_sample_logprobs

    def at_once(processor: Any, lists: Any) -> None:
        flat = processor.logprobs
        if processor.num_logprobs != 0 or processor.tokenizer is not None or type(flat) is not FlatLogprobs:
            one_by_one(processor, lists)
            return
        logprobs = lists.logprobs[:, 0].tolist()
        before = len(flat.logprobs)
        flat.start_indices.extend(range(before, before + len(logprobs)))
        flat.end_indices.extend(range(before + 1, before + 1 + len(logprobs)))
        flat.token_ids.extend(lists.logprob_token_ids[:, 0].tolist())
        flat.logprobs.extend(logprobs)
        flat.ranks.extend(lists.sampled_token_ranks.tolist())
        flat.decoded_tokens.extend([None] * len(logprobs))
        processor.cumulative_logprob += sum(logprobs)

    LogprobsProcessor._update_sample_logprobs = at_once  # type: ignore[method-assign]
