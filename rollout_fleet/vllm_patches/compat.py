"""The check that every patch of this folder makes; rollout_fleet/vllm_plugin.py applies them in vLLM's processes.

A patch raises an error when it does not find the code it expects: a half-patched engine would silently sample from
wrong weights.
"""

from typing import Any


def require(owner: Any, *names: str) -> None:
    """Raise RuntimeError when this vLLM's class or module lacks what a patch replaces or calls."""
    for name in names:
        if not hasattr(owner, name):
            raise RuntimeError(f"this vLLM's {owner.__name__} has no {name}: adapt rollout_fleet/vllm_patches")
