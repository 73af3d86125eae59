"""Failed samples by reason, in the words of `status`; docs/environments.md has the reasons."""

from collections.abc import Iterable, Mapping

from broker.contract import BrokerStatus
from common.process.run_dir import RunDir
from launch.observe.metrics_tail import MetricsTail


def whole(status: BrokerStatus, run: RunDir) -> dict[str, int]:
    """By stop reason: of the nodes that are there; when none is any more, of the groups that were trained on."""
    if found := summed(node.report.samples_failed for node in status.nodes):
        return found
    tail = MetricsTail(run.metrics)
    tail.update()
    return summed(line.get("samples_failed_by_reason", {}) for line in tail.lines)


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of counts, by reason."""
    found: dict[str, int] = {}
    for count in counts:
        for reason, number in count.items():
            found[reason] = found.get(reason, 0) + number
    return dict(sorted(found.items()))


def sentence(failed: Mapping[str, int]) -> str:
    """'15 samples failed: 12 environment_timeout, 3 timeout'; '' when none did."""
    if not failed:
        return ""
    by_size = sorted(failed.items(), key=lambda item: (-item[1], item[0]))
    return f"{sum(failed.values()):,} samples failed: " + ", ".join(f"{count:,} {reason}" for reason, count in by_size)
