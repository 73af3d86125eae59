"""slipstream ledger RUN|ADDRESS [--json]: what became of every task, over all brokers of a run.

A run that was stopped and continued has several brokers, and each numbers its tasks from 0. An earlier broker
may have got a task into no lasting step. The next one offered it again, so the older entry is left out. A step that no
later learner repeated counts as committed, because learners continue from durable checkpoints only. So every step
appears once, with its groups.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker.contract import LedgerEntry
from broker.journal.recording import stored_ledger
from common.errors import SlipstreamError, UsageError
from common.process.logs import visible
from common.process.run_dir import RunDir
from launch.observe.observation import ask
from launch.resolve_target import Target, config_of, find_target

COMMITTED = "committed"
COLUMNS = ("serial", "state", "step", "versions", "attempts", "reward", "nodes")
LEFT = ("state", "nodes")  # the others are aligned to the right
MOST_LAID_OUT = 1000  # rows that are fitted to the terminal's width, which takes almost a millisecond each


def command(args: argparse.Namespace) -> int:
    """Print the ledger while the job runs or after it ended; other programs rely on the keys of --json."""
    entries = observe_ledger(find_target(args))
    if args.json:
        print(msgspec.json.encode(entries).decode())
    else:
        show(entries)
    return 0


def observe_ledger(job: Target) -> list[LedgerEntry]:
    """The run's delivery ledger, over all its brokers; raises SlipstreamError when there is none.

    The newest broker's part comes from itself while it runs, else from its store. Without a store it is in
    RUN/ledger.json, which is some seconds old when the broker was killed.
    Those of earlier brokers are in RUN/ledger-1.json, ledger-2.json and so on, oldest first. With an ADDRESS only the
    running broker's part is known.
    """
    former: list[list[LedgerEntry]] = []
    if (run := job.run) is None:
        return ask(job, lambda client: client.ledger())
    try:
        newest = ask(job, lambda client: client.ledger())
        reason = ""
    except SlipstreamError as error:
        newest = _stored(run)
        reason = str(error)
    try:
        if newest is None:
            newest = msgspec.json.decode(run.ledger_json.read_bytes(), type=list[LedgerEntry])
        while (path := run.path / f"ledger-{len(former) + 1}.json").exists():
            former.append(msgspec.json.decode(path.read_bytes(), type=list[LedgerEntry]))
        return whole_ledger(former, newest)
    except OSError:
        raise SlipstreamError(f"{run.path}: {reason}, and it left no ledger.json") from None
    except ValueError as error:
        raise SlipstreamError(f"{run.path}: an unreadable ledger of this or an earlier broker: {error}") from None


def _stored(run: RunDir) -> list[LedgerEntry] | None:
    """The ledger in the run's store; None where there is none, as with broker.durability: memory."""
    try:
        config = config_of(run)
        return None if config is None else stored_ledger(run, config)
    except UsageError:
        return None


def whole_ledger(former: Sequence[list[LedgerEntry]], newest: list[LedgerEntry]) -> list[LedgerEntry]:
    """The run's ledger, ascending by serial; serials continue from broker to broker, with gaps for repeated tasks."""
    ledgers = [*former, newest]
    entries: list[LedgerEntry] = []
    offset = 0
    for number, ledger in enumerate(ledgers, 1):
        later_steps = [e.step for later in ledgers[number:] for e in later if e.step is not None]
        for entry in ledger:
            numbered = msgspec.structs.replace(entry, serial=entry.serial + offset)
            if number == len(ledgers) or (entry.step is not None and not later_steps):
                entries.append(numbered)
            elif entry.step is not None and entry.step < min(later_steps):
                entries.append(msgspec.structs.replace(numbered, state=COMMITTED))
        offset += max((entry.serial + 1 for entry in ledger), default=0)
    return entries


def _cells(entry: LedgerEntry) -> tuple[str, ...]:
    """The text of each of COLUMNS; `visible`, as an environment, a judge or another machine may have written it."""
    versions = "-" if entry.version_min is None else f"{entry.version_min}..{entry.version_max}"
    reward = "-" if entry.reward_mean is None else f"{entry.reward_mean:.3f}"
    step = "-" if entry.step is None else str(entry.step)
    nodes = ", ".join(entry.nodes) + (f"  ({entry.reason})" if entry.reason else "")
    state = entry.state + ", filtered" * entry.filtered + f", {entry.source}" * bool(entry.source)
    return str(entry.serial), visible(state), step, versions, str(entry.attempts), reward, visible(nodes)


def _show_lines(entries: Sequence[LedgerEntry]) -> None:
    """The table in plain lines."""
    widths = [len(name) for name in COLUMNS[:-1]]
    for entry in entries:
        widths = [max(width, len(cell)) for width, cell in zip(widths, _cells(entry), strict=False)]
    aligned = [f"{{:{'<' if name in LEFT else '>'}{width}}}" for name, width in zip(COLUMNS, widths, strict=False)]
    line = "  ".join([*aligned, "{}"])
    for cells in chain([COLUMNS], map(_cells, entries)):
        print(" ".join(line.format(*cells).splitlines()))


def show(entries: Sequence[LedgerEntry]) -> None:
    console = Console()
    if len(entries) <= MOST_LAID_OUT:
        table = Table(box=None, pad_edge=False)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "nodes")
        for entry in entries:
            table.add_row(*map(Text, _cells(entry)))
        console.print(table)
    else:
        _show_lines(entries)
    retried = sum(entry.attempts > 1 for entry in entries)
    parts = [f"{count} {state}" for state, count in Counter(entry.state for entry in entries).items()]
    if filtered := sum(entry.filtered for entry in entries):
        parts.append(f"{filtered} of them filtered")
    counts = visible(", ".join(parts)) or "none"
    console.print(f"{len(entries)} tasks: {counts}; {retried} with more than one attempt", markup=False)
