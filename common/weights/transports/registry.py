"""The ways that buckets can take, by name: one module and one line here for each."""

import importlib
from typing import cast

from common.weights.collectives import Group, GroupFactory
from common.weights.messages import Epoch

GROUPS = {
    "gloo": ("gloo", "GlooGroup"),
    "nccl": ("nccl", "NcclGroup"),
    "relay": ("relay", "RelayGroup"),
}


def receivable(transport: str) -> tuple[str, ...]:
    """What a node whose config says `transport` can receive over, its choice first; the relay always works."""
    return {"relay": ("relay",), "nccl": ("nccl", "gloo", "relay")}.get(transport, (transport, "relay"))


def require(transport: str) -> None:
    """Raises UsageError when this machine cannot use `transport`, and says what to do."""
    if transport == "nccl":
        from common.weights.transports.nccl import require_device

        require_device()


def group_of(transport: str) -> GroupFactory:
    """What forms this transport's groups; raises RuntimeError for a name that this version does not know."""
    if transport not in GROUPS:
        raise RuntimeError(f"weights travel over {transport!r}, this version knows {', '.join(GROUPS)}")
    module, name = GROUPS[transport]
    return cast(GroupFactory, getattr(importlib.import_module(f"common.weights.transports.{module}"), name))


def open_group(epoch: Epoch) -> Group:
    """A group of the epoch's transport; see the transport for what it raises and waits for."""
    return group_of(epoch.transport)(epoch)
