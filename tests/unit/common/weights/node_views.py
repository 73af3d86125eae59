"""Receivers, snapshots and attempts for the tests of the weight plane."""

from typing import Any

import torch
from msgspec.structs import replace

from common.weights.source.attempt import Attempt, new_attempt
from common.weights.source.nodes import NodeState, NodeView
from common.weights.source.snapshot import Snapshot, SnapshotMaker
from common.weights.wire.messages import Epoch, Part


def settled(name: str, version: int = 3, **changes: Any) -> NodeView:
    """A node that runs `version` and has nothing under way; others can fetch from it."""
    made = NodeView(
        name.encode(), name, 0.0, ("gloo", "relay"), NodeState.IDLE, version, version, settled=True, welcomed=0.0,
        address=address_of(name),
    )  # fmt: skip
    return replace(made, **changes)


def address_of(name: str) -> str:
    """Where a node of this name serves."""
    return f"tcp://{name}:7"


def newcomer(name: str, **changes: Any) -> NodeView:
    """A node that has just joined, and was not told the layout yet."""
    return replace(NodeView(name.encode(), name, 0.0, ("gloo", "relay")), **changes)


def snapshot_of(version: int) -> Snapshot:
    made = SnapshotMaker("float32").make(version, [("w", torch.arange(40.0))], None)
    made.add_checksums(64)
    return made


def make_parts(snapshot: Snapshot, *origins: str) -> None:
    """Let these sources have one part each of the whole version, all of one size."""
    size = snapshot.flat.numel()
    snapshot.full.elsewhere = {number: size for number in range(1, len(origins))}
    for number, origin in enumerate(origins):
        snapshot.full.add_parts(number, [Part(f"v{snapshot.version}p{number}", origin, 0, size, 64, b"digests")])


def attempt_at(
    snapshot: Snapshot, *members: str, epoch: int = 1, transport: str = "gloo", timeout_s: float = 8.0
) -> Attempt:
    """An attempt that starts at 0.0."""
    made = Epoch(epoch, 0, len(members) + 1, timeout_s, transport)
    attempt = new_attempt(snapshot, snapshot.full, made, members=[m.encode() for m in members], incarnation=0)
    attempt.started, attempt.deadline = 0.0, timeout_s
    return attempt
