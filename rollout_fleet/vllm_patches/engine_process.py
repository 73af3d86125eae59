"""Changes to vLLM's engine process: the change of weights as one call, and outputs that leave it once per request.

A **flip** runs between two engine steps, and the prefix cache shares no block across it. A sender salts its request
with the version, but a flip may come before the engine begins the request. The new weights would then read blocks of
the old version, found under the old salt. So the engine decides the salt.

With `weights.kv_cache: keep_episode` the later requests of a session keep the salt of its first one, so they find its
blocks after a flip. Other conversations with the same salt may read the blocks of its first prompt, which were computed
when they began or later. From the block with its first sampled token on, the hashes have the session's number, too.

**Canaries** come before all other waiting requests.

**Outputs** are kept until their request ends, if only its end was asked for. A flip sends them first.
"""

import time
from typing import Any

import numpy as np

CANARY = "canary-"  # the ids of requests that read a canary begin so; those of other requests are numbers
SEPARATOR = "#"  # behind the version: what else keeps a request to itself


def salt(label: str, own: str = "") -> str:
    """The cache salt of a request under the weights `label`; with `own` it shares no blocks with other requests."""
    return f"{label}{SEPARATOR}{own}" if own else label


def session_key(number: int, first_prompt: int) -> str:
    """vLLM's `session_id` of a request whose KV blocks outlive flips for its session."""
    return f"{number}{SEPARATOR}{first_prompt}"


def require(owner: Any, *names: str) -> None:
    """Raise RuntimeError when this vLLM's class or module lacks what a patch replaces or calls.

    Every patch checks it: a half-patched engine would silently sample from wrong weights.
    """
    for name in names:
        if not hasattr(owner, name):
            raise RuntimeError(f"this vLLM's {owner.__name__} has no {name}: adapt rollout_fleet/vllm_patches")


def flip_in_one_call() -> None:
    """EngineCore.slipstream_flip: vLLM's own start / update / finish / set-version sequence between two steps.

    Separate calls would each wait for an engine step, the pause too (vLLM's pause_generation also sleeps 20 ms).
    Without the pause a token could be sampled between the new weights and the new label. One utility call runs in the
    engine's loop between two steps, so labels are exact by construction. There a request is salted, too: vLLM
    0.32 hashes its blocks in the thread that reads the socket.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    require(kv_cache_utils, "generate_block_hash_extra_keys")
    require(EngineCore, "set_weight_version", "_reset_caches", "collective_rpc", "pause_scheduler", "add_request")
    require(Request, "update_block_hashes")
    require(Scheduler, "_preempt_request")
    add = EngineCore.add_request
    preempt = Scheduler._preempt_request
    extra_keys = kv_cache_utils.generate_block_hash_extra_keys

    def add_salted(engine: Any, request: Any, request_wave: int = 0) -> None:
        _resalt(request, engine.get_weight_version())
        add(engine, request, request_wave)
        if request.request_id.startswith(CANARY):
            let_canaries_first(engine.scheduler, request.request_id)

    def preempt_behind_canaries(scheduler: Any, *arguments: Any, **named: Any) -> None:
        preempt(scheduler, *arguments, **named)
        let_canaries_first(scheduler)

    def keys_of_session(request: Any, start: int, end: int, mm: int) -> tuple[tuple[Any, ...] | None, int]:
        keys, mm = extra_keys(request, start, end, mm)
        if request.session_id and start <= _first_prompt(request) < end:
            keys = (*(keys or ()), ("session", request.session_id))
        return keys, mm

    kv_cache_utils.generate_block_hash_extra_keys = keys_of_session
    Scheduler._preempt_request = preempt_behind_canaries  # type: ignore[method-assign]
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
    _release_held(engine)  # tokens sampled so far keep their label
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


def let_canaries_first(scheduler: Any, new: str | None = None) -> None:
    """Put waiting canaries before the other requests; `new` is the id of one that was added just now.

    vLLM admits no request behind one that finds no room, and it puts preempted requests first. A canary needs little
    room, and its node is not active before the answer. A queue by priority keeps its own order.
    """
    canaries: set[str] = scheduler.__dict__.setdefault("slipstream_canaries", set())
    if new is not None:
        canaries.add(new)
    canaries.intersection_update(scheduler.requests)  # finished ones leave
    if canaries:
        for request in [one for one in scheduler.waiting if one.request_id in canaries]:
            scheduler.waiting.remove_request(request)
            scheduler.waiting.prepend_request(request)


def _first_prompt(request: Any) -> int:
    return int(request.session_id.rpartition(SEPARATOR)[2])


def _resalt(request: Any, label: str) -> None:
    """Hash the blocks of a request without computed tokens under `label`; a request without salt stays without.

    A request that continues its session keeps its salt, unless that is of another learner's start.
    """
    if not request.cache_salt:
        return
    before, _, own = request.cache_salt.partition(SEPARATOR)
    if before == label:
        return
    same_start = before.partition(":")[0] == label.partition(":")[0]
    if request.session_id and same_start and request.num_tokens > _first_prompt(request):
        return
    request.cache_salt = salt(label, own)
    request.block_hashes.clear()
    request.update_block_hashes()


# -------------------------------------------------------------------- finished outputs


def send_only_finished_outputs() -> None:
    """The engine process hands over a request when it ends, not token by token, if only its end was asked for.

    vLLM 0.32 sends every sampled token to the front process, which with output_kind=FINAL_ONLY drops all but the
    last: 15 us of CPU per token. A flip first sends the delayed outputs, under the version that sampled them.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    require(EngineCore, "_attach_weight_version")
    require(EngineCoreProc, "_send_finish_outputs_to_client")
    attach = EngineCore._attach_weight_version
    abort = EngineCore.abort_requests
    finish = EngineCoreProc._send_finish_outputs_to_client

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

    EngineCore._attach_weight_version = attach_and_hold  # type: ignore[method-assign]
    EngineCoreProc._send_finish_outputs_to_client = release_and_finish  # type: ignore[method-assign]
    EngineCore.abort_requests = forget_and_abort  # type: ignore[method-assign]


class _Held:
    """The first unsent output of a request and what followed; joined at the end, so that a token costs an append."""

    __slots__ = ("client", "logprobs", "output", "routed")

    def __init__(self, client: int, output: Any) -> None:
        self.client = client
        self.output = output
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

    def join_into(self, output: Any) -> None:
        """Give `output`, the first or the last of them, the tokens of all; one candidate per token, the sampled one."""
        output.new_token_ids = self.output.new_token_ids
        if self.logprobs:
            sample = self.logprobs[0]
            output.new_logprobs = sample._replace(
                logprob_token_ids=np.array(output.new_token_ids, sample.logprob_token_ids.dtype)[:, None],
                logprobs=np.concatenate([lists.logprobs[:, :1] for lists in self.logprobs]),
                sampled_token_ranks=np.concatenate([lists.sampled_token_ranks for lists in self.logprobs]),
            )
        if self.routed:
            output.routed_experts = np.concatenate(self.routed)  # [tokens, layers, experts per token]
        if output.prefill_stats is None:
            output.prefill_stats = self.output.prefill_stats


def _held(engine: Any) -> dict[str, _Held]:
    return engine.__dict__.setdefault("slipstream_held", {})


def _hold_unfinished(engine: Any, outputs: dict[int, Any]) -> None:
    """Take the outputs that do not end their request out of `outputs`, in place, and delay them."""
    held = _held(engine)
    requests = engine.scheduler.requests
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
                entry.add(output)
                entry.join_into(output)
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
    """Send the delayed outputs of these requests, or of all, under the current version."""
    from vllm.v1.engine import EngineCoreOutputs

    held = _held(engine)
    batches: dict[int, list[Any]] = {}
    for request_id in list(held) if request_ids is None else request_ids & held.keys():
        entry = held.pop(request_id)
        entry.join_into(entry.output)
        batches.setdefault(entry.client, []).append(entry.output)
    for client, batch in batches.items():
        message = EngineCoreOutputs(outputs=batch, weight_version=engine.get_weight_version())
        engine.output_queue.put_nowait((client, message))
