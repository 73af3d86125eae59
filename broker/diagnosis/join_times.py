"""Says in a sentence how long each stage of a node's start took, up to its first group."""

import itertools
from collections.abc import Iterable

from broker.contract import JoinTimes, NodeStatus


def sentence(times: JoinTimes) -> str:
    """'joined in 12.34 s: engine 11.40, weights 0.30, lease 0.01, first group 0.63'; '' before the first group.

    Each figure is in seconds since the stage before; `engine` counts from the start of the process.
    """
    if not times.delivered:
        return ""
    reached = [0.0, times.engine, times.active, times.leased, times.delivered]
    took = [after - before for before, after in itertools.pairwise(reached)]
    names = ("engine", "weights", "lease", "first group")
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in zip(names, took, strict=True))
    return f"joined in {times.delivered:.2f} s: {parts}"


def newest(nodes: Iterable[NodeStatus]) -> str:
    """The sentence of the newest living node that has handed in a group; '' when there is none."""
    joined = [node.report for node in nodes if node.alive and node.report.joined.delivered]
    report = max(joined, key=lambda r: r.joined.started_s, default=None)
    return "" if report is None else f"{report.node_id} {sentence(report.joined)}"
