"""Which vLLM the patches of this folder fit, and in which of its processes they belong.

The plugin (rollout_fleet/vllm_plugin.py) applies the patches in all processes of an engine. A patch raises an
error when it does not find the code it expects: a half-patched engine would silently sample from wrong weights.
"""

import logging
import multiprocessing
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


def require(owner: Any, *names: str) -> None:
    """Raise RuntimeError when this vLLM's class or module lacks what a patch replaces or calls."""
    for name in names:
        if not hasattr(owner, name):
            raise RuntimeError(f"this vLLM's {owner.__name__} has no {name}: adapt rollout_fleet/vllm_patches")
