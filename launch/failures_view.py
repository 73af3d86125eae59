"""Failed samples by reason, in the words of `status`; docs/environments.md has the reasons."""

from collections.abc import Mapping

from broker.contract import BrokerStatus


def whole(status: BrokerStatus) -> dict[str, int]:
    """Of the nodes that the broker knows, by stop reason."""
    found: dict[str, int] = {}
    for node in status.nodes:
        for reason, count in node.report.samples_failed.items():
            found[reason] = found.get(reason, 0) + count
    return dict(sorted(found.items()))


def sentence(failed: Mapping[str, int]) -> str:
    """'15 samples failed: 12 environment_timeout, 3 timeout'; '' when none did."""
    if not failed:
        return ""
    by_size = sorted(failed.items(), key=lambda item: (-item[1], item[0]))
    return f"{sum(failed.values()):,} samples failed: " + ", ".join(f"{count:,} {reason}" for reason, count in by_size)
