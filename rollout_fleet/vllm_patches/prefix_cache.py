"""The change to vLLM's prefix cache: a request that has not begun reads no block of an older policy version.

The plugin applies it in every engine process (compat.py). The sender salts a request, but a flip may happen before the
engine begins it. The new weights would then read blocks of the old version, found under the old salt. So the engine
decides the salt.
"""

from typing import Any

from rollout_fleet.vllm_patches.compat import require

SEPARATOR = "#"  # behind the version: what else keeps a request to itself


def salt(label: str, own: str = "") -> str:
    """The cache salt of a request under the weights `label`; with `own` it shares no blocks with other requests."""
    return f"{label}{SEPARATOR}{own}" if own else label


def salt_by_version() -> None:
    """A request that enters the engine is salted with the version that it finds there.

    vLLM 0.32-0.33 hashes a request's blocks with the sender's salt in the thread that reads the socket. The engine's
    loop takes the request in later.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    require(EngineCore, "add_request")
    require(Request, "update_block_hashes")
    require(Scheduler, "_preempt_request")
    add = EngineCore.add_request

    def add_salted(engine: Any, request: Any, request_wave: int = 0) -> None:
        resalt(request, engine.get_weight_version())
        add(engine, request, request_wave)

    EngineCore.add_request = add_salted  # type: ignore[method-assign]


def resalt_waiting(scheduler: Any, label: str) -> None:
    """After a flip to `label`: those that have no keys and values yet compute all of them with the new weights."""
    for request in scheduler.waiting:
        if request.num_computed_tokens == 0:
            resalt(request, label)


def resalt(request: Any, label: str) -> None:
    """Hash the blocks of a request without computed tokens under `label`; a request without salt stays without."""
    if not request.cache_salt:
        return
    held, _, own = request.cache_salt.partition(SEPARATOR)
    if held == label:
        return
    request.cache_salt = salt(label, own)
    request.block_hashes.clear()
    request.update_block_hashes()
