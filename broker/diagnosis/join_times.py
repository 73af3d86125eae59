"""Says in a sentence how long each stage of a node's start took, up to its first group."""

from collections.abc import Iterable

from broker.contract import JoinTimes, NodeStatus


def sentence(times: JoinTimes) -> str:
    """'joined in 12.34 s: engine 11.40, weights 0.30, lease 0.01, first group 0.63'; '' before the first group.

    Each figure is in seconds since the stage before. `engine` counts from the start of the process. The other stages
    end when the weights are in use, when the first task is leased, and when the broker accepts the first group.
    """
    if not times.delivered:
        return ""
    stages = {"engine": times.engine, "weights": times.active, "lease": times.leased, "first group": times.delivered}
    parts: list[str] = []
    before = 0.0
    for name, reached in stages.items():
        parts.append(f"{name} {reached - before:.2f}")
        before = reached
    return f"joined in {times.delivered:.2f} s: {', '.join(parts)}"


def newest(nodes: Iterable[NodeStatus]) -> str:
    """The sentence of the newest living node that has handed in a group; '' when there is none."""
    joined = [node.report for node in nodes if node.alive and node.report.joined.delivered]
    if not joined:
        return ""
    report = max(joined, key=lambda r: r.joined.started_s)
    return f"{report.node_id} {sentence(report.joined)}"
