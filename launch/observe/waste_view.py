"""Waste and failed samples, in the words of `status`, `top` and `report`.

The reasons are in docs/waste.md and docs/environments.md.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from broker.contract import BrokerStatus
from common.process.run_dir import RunDir
from common.waste import WASTE_REASONS, Waste, merged_waste, wasted_tokens
from launch.observe.metrics_tail import MetricsTail

SHOWN_NODES = 16


def whole(status: BrokerStatus) -> dict[str, Waste]:
    """The waste of all nodes and of the learner, by reason."""
    learner = status.learner.waste if status.learner is not None else {}
    return merged_waste((status.waste, learner))


def as_json(wasted: Mapping[str, Waste]) -> dict[str, dict[str, float]]:
    """Every reason, also those under which nothing was lost."""
    return {reason: msgspec.to_builtins(wasted.get(reason, Waste())) for reason in WASTE_REASONS}


def sentence(status: BrokerStatus) -> str:
    """'1,200 tokens (8% of those generated): 1,000 filtered, 200 lost'; '' when nothing was lost."""
    wasted = whole(status)
    tokens = wasted_tokens(wasted)
    if not tokens:
        return ""
    generated = status.tokens_generated_total
    share = f" ({tokens / generated:.0%} of those generated)" if generated else ""
    by_size = sorted(((w.tokens, reason) for reason, w in wasted.items() if w.tokens), reverse=True)
    return f"{tokens:,} tokens{share}: " + ", ".join(f"{count:,} {reason}" for count, reason in by_size)


def table(status: BrokerStatus) -> RenderableType:
    """Tokens and seconds by reason for the run, and for each node that wasted something."""
    rows = [("all", whole(status))]
    rows += [(node.report.node_id, node.waste) for node in status.nodes if any(map(_counts, node.waste.values()))]
    if status.learner is not None and wasted_tokens(status.learner.waste):
        rows.append(("learner", status.learner.waste))
    shown = [reason for reason in WASTE_REASONS if _counts(rows[0][1].get(reason, Waste()))]
    if not shown:
        return Text("nothing wasted", "dim")
    grid = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("wasted", *shown):
        grid.add_column(name, no_wrap=True, justify="left" if name == "wasted" else "right")
    for name, wasted in rows[: SHOWN_NODES + 1]:
        grid.add_row(name, *(_cell(wasted.get(reason, Waste())) for reason in shown))
    more = len(rows) - SHOWN_NODES - 1
    return Group(grid, Text(f"and {more} more; --json has all", "dim")) if more > 0 else grid


def failed_samples(status: BrokerStatus, run: RunDir | None) -> dict[str, int]:
    """By stop reason: of the nodes that are there; when none is any more, of the groups that were trained on."""
    if found := summed(node.report.samples_failed for node in status.nodes):
        return found
    return summed(line.get("samples_failed_by_reason", {}) for line in MetricsTail.of(run).lines)


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = sum((Counter(count) for count in counts), Counter[str]())
    return dict(sorted(total.items()))


def _counts(spent: Waste) -> bool:
    return spent.tokens > 0 or spent.seconds >= 0.05


def _cell(spent: Waste) -> str:
    parts = ([f"{spent.tokens:,}"] if spent.tokens else []) + ([f"{spent.seconds:,.1f} s"] if spent.seconds else [])
    return ", ".join(parts) or "-"
