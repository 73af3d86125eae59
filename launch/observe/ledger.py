"""slipstream ledger RUN [--json]: what became of every task."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence

import msgspec

from broker.contract import LedgerEntry
from launch.observe.observation import observe_ledger
from launch.resolve_target import find_run


def command(args: argparse.Namespace) -> int:
    """Print the ledger while the job runs or after it ended; other programs rely on the keys of --json."""
    entries = observe_ledger(find_run(args.run))
    if args.json:
        print(json.dumps(msgspec.to_builtins(entries)))
        return 0
    show(entries)
    return 0


def show(entries: Sequence[LedgerEntry]) -> None:
    """A table for people, then how many tasks are in which state."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("serial", "state", "step", "versions", "attempts", "reward", "nodes"):
        table.add_column(name, justify="left" if name in ("state", "nodes") else "right", no_wrap=True)
    for entry in entries:
        table.add_row(*_row(entry))
    console = Console()
    console.print(table)
    counts = Counter(entry.state for entry in entries)
    retried = sum(entry.attempts > 1 for entry in entries)
    parts = [f"{count} {state}" for state, count in counts.items()]
    if filtered := sum(entry.filtered for entry in entries):
        parts.append(f"{filtered} of them filtered")
    console.print(f"{len(entries)} tasks: {', '.join(parts) or 'none'}; {retried} with more than one attempt")


def _row(entry: LedgerEntry) -> list[str]:
    versions = "-" if entry.version_min is None else f"{entry.version_min}..{entry.version_max}"
    reward = "-" if entry.reward_mean is None else f"{entry.reward_mean:.3f}"
    step = "-" if entry.step is None else str(entry.step)
    nodes = ", ".join(entry.nodes) + (f"  ({entry.reason})" if entry.reason else "")
    state = entry.state + ", filtered" * entry.filtered
    return [str(entry.serial), state, step, versions, str(entry.attempts), reward, nodes]
