"""The collective transports by name: each is one module and one line here."""

import importlib

from common.weights.collectives import Group, GroupFactory, Meeting
from common.weights.messages import Epoch

GROUPS = {"gloo": "GlooGroup", "nccl": "NcclGroup"}  # a transport's name is its module's


def receivable(transport: str) -> tuple[str, ...]:
    """The transports of a node whose config says `transport`, its choice first; the relay always works."""
    return {"relay": ("relay",), "nccl": ("nccl", "gloo", "relay")}.get(transport, (transport, "relay"))


def require(transport: str) -> None:
    """Raises UsageError when this machine cannot use `transport`, and says what to do."""
    if transport == "nccl":
        from common.weights.transports.nccl import require_device

        require_device()


def open_group(epoch: Epoch, meeting: Meeting) -> Group:
    """A group of the epoch's transport; waits and raises as that transport's class does, or RuntimeError."""
    if epoch.transport not in GROUPS:
        raise RuntimeError(f"weights travel over {epoch.transport!r}, this version knows relay, {', '.join(GROUPS)}")
    module = importlib.import_module(f"common.weights.transports.{epoch.transport}")
    form: GroupFactory = getattr(module, GROUPS[epoch.transport])
    return form(epoch, meeting)
