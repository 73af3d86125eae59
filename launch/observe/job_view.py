"""A run on the terminal: the live view of `up` and `top`, the table of `status`, and the plain line."""

import errno
import itertools
import math
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from broker.contract import LEARNER_ENDED, BrokerStatus
from broker.diagnosis.stalls import Stall, explain
from common.config.schema import Config
from common.metrics import StepMetrics
from common.process.logs import visible
from common.process.run_dir import RunDir
from common.run_reader import LATEST, RecentTail
from common.waste import WASTE_REASONS, Waste, wasted_tokens
from launch.observe.advisor import Advice, advice_for
from launch.observe.observation import Observation, Outcome, failed_samples, given_up, whole_waste

# ---------------------------------------------------------------- stalls
# docs/stalls.md explains every kind.


SHOWN_STALLS = 12
STOPPING = frozenset(
    ("store", "no_learner", "learner_silent", "learner_failed", "no_node", "broker_away", "broker_gone", "excluded")
)  # kinds that a person has to do something about


def plain_text(words: str, style: str = "") -> Text:
    """A line or a cell. Judges, models and other machines may have written `words`, so nothing in them is obeyed."""
    return Text(visible(words, kept=""), style)


def duration(seconds: float) -> str:
    """'0.4 s', '12 s', '3 min', '2.1 h'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def stalls_of(seen: Observation) -> list[Stall]:
    """The stalls that `explain` finds while the broker answers, else one that says that it does not."""
    if seen.live:
        return [] if seen.begins else explain(seen.status)
    learner, address = seen.status.learner, seen.status.address
    if seen.unreachable:
        waits = f"the broker at {address}, which does not answer ({seen.note.partition(';')[0]})"
        release = "it answers again: nodes wait for a minute, and no acknowledged rollout is lost"
        return [Stall("broker_away", "everyone", waits, seen.age_s, release)]
    if learner is not None and learner.state in LEARNER_ENDED:
        return []
    release = "`slipstream up CONFIG` continues the run, or `slipstream broker CONFIG` for the broker alone"
    return [Stall("broker_gone", "everyone", "the broker, which has ended before the learner was done", None, release)]


def stall_sentence(stall: Stall) -> str:
    """'node-0 waits for weights, since 3.0 s; until: version 4 reaches it'."""
    several = " and " in stall.who or stall.who == "nodes"
    who = f"{stall.who}," if ", which " in stall.who else stall.who
    since = f", since {duration(stall.since_s)}" if stall.since_s is not None else ""
    return f"{who} wait{'' if several else 's'} for {stall.waits_for}{since}; until: {stall.release}"


def stalls_page(seen: Observation) -> RenderableType:
    """Every stall, for `status`; the state of the job when there is none."""
    found = stalls_of(seen)
    if not found:
        alive = sum(node.alive for node in seen.status.nodes)
        moving = f"The learner is {seen.learner_state}; {alive} node{'' if alive == 1 else 's'} alive."
        return plain_text(moving if seen.live else "")
    more = [Text(f"and {len(found) - SHOWN_STALLS} more; --json has all", "dim")] if len(found) > SHOWN_STALLS else []
    return Group(*stall_lines(seen, SHOWN_STALLS), *more)


def stall_lines(seen: Observation, most: int = 3) -> list[RenderableType]:
    stalls = stalls_of(seen)
    return [plain_text(stall_sentence(s), "red" if s.kind in STOPPING else "yellow") for s in stalls[:most]]


# ---------------------------------------------------------------- views

BARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH, SPARKLINE_WIDTH = 24, 48
PLAIN_EVERY_S = 3.0
NOTES_SHOWN = 4
SHOWN_NODES = 16
COLOURS = {
    "green": "training generating publishing checkpointing done serving",
    "yellow": "waiting starting joining flipping replaying draining drained environments unreachable",
    "red": "silent lost gone failed excluded absent",
    "dim": "ended",
}
COLOUR_OF = {state: colour for colour, states in COLOURS.items() for state in states.split()}


@contextmanager
def unheard() -> Iterator[None]:
    """Around words for a person: a reader or terminal that is gone, or a full disk, ends nothing.

    On a full disk later words are tried again; otherwise stdout is /dev/null from then on.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print a line for a person, who may be gone."""
    with unheard():
        print(visible(text), flush=True)


@contextmanager
def open_display(config: Config, tail: RecentTail, plain: bool) -> Iterator["Display"]:
    """The live view when stdout is a terminal, else lines."""
    live = None if plain or not sys.stdout.isatty() else Live(auto_refresh=False)
    try:
        if live is not None:
            with unheard():
                live.start()
        yield Display(config, tail, live)
    finally:
        if live is not None:
            with unheard():
                live.stop()


class Display:
    """Redraws a rich view in place; without one, prints a line when something changed."""

    def __init__(self, config: Config, tail: RecentTail, live: Live | None) -> None:
        self._config = config
        self._tail = tail
        self._live = live
        self._notes: deque[str] = deque(maxlen=NOTES_SHOWN)
        self._last = ""
        self.every_s = max(config.telemetry.refresh_s, 0.0 if live else PLAIN_EVERY_S)  # between two looks at the job

    def show(self, seen: Observation | None) -> None:
        if self._live is not None:
            self._live.update(render_live(self._config, seen, self._tail, self._notes), refresh=True)
        elif (line := plain_line(self._config, seen, self._tail)) != self._last:
            print(line, flush=True)
            self._last = line

    def note(self, text: str) -> None:
        """Tell a person something: under the view, or as a line."""
        self._notes.append(text)
        if self._live is None:
            print(visible(text), flush=True)


def render_live(config: Config, seen: Observation | None, tail: RecentTail, notes: Sequence[str]) -> RenderableType:
    now = [processes(seen), *stall_lines(seen)] if seen else [Text("waiting for the broker to answer", "yellow")]
    return Group(progress(config, seen, tail), *now, *(plain_text(note, "dim") for note in notes))


def render_status(
    run: RunDir | None,
    seen: Observation,
    advice: Advice | None = None,
    finished: Outcome | None = None,
    tail: RecentTail | None = None,
) -> RenderableType:
    """The page of `status`; of a `finished` run its outcome in place of processes that have left.

    `tail`: as in `failed_samples`.
    """
    facts = seen.status.run
    folder = run.path if run else facts.run_dir
    parts: list[RenderableType] = [plain_text(f"{facts.name}  {folder}", "bold")]
    if finished is not None:
        parts.append(plain_text(finished.sentence(), "green"))
        parts.append(plain_text(f"`slipstream web {folder}` shows it in a browser"))
    elif not seen.live:
        parts.append(plain_text(seen.note, "yellow"))
    if seen.live or finished is None:
        parts.append(processes(seen))
        if joined := seen.status.newest_join:
            parts.append(plain_text(f"newest node: {joined}", "dim"))
        parts.append(stalls_page(seen))
    parts.append(waste_table(seen.status))
    if (lost := given_up(seen.status.groups_dead)) and finished is None:
        parts.append(plain_text(lost, "yellow"))
    if failed := failed_samples(seen.status, tail):
        by_size = ", ".join(f"{count:,} {reason}" for reason, count in Counter(failed).most_common())
        parts.append(plain_text(f"{sum(failed.values()):,} samples failed: {by_size}", "yellow"))
    if advice is not None:
        parts.append(plain_text(f"advice: {advice.text}"))
    return Group(*parts)


def progress(config: Config, seen: Observation | None, tail: RecentTail) -> RenderableType:
    done = _version(tail, seen)
    steps = config.run.steps
    filled = round(BAR_WIDTH * min(1.0, done / steps))
    bar = "█" * filled + "░" * (BAR_WIDTH - filled)
    step_s = tail.mean(lambda line: line.step_s, LATEST)
    left = "" if step_s is None else "finishing" if done >= steps else f"{duration((steps - done) * step_s)} left"
    rows = {config.run.name: f"step {done}/{steps}  {bar}  {left}", **figures(config, seen, tail)}
    if "reward" in rows:
        rows["reward"] += f"  {sparkline(tail.rewards)}"
    grid = Table.grid(Column(style="bold", no_wrap=True), Column(), padding=(0, 2))
    for name, text in rows.items():
        _add_row(grid, name, text)
    return grid


def figures(config: Config, seen: Observation | None, tail: RecentTail) -> dict[str, str]:
    """Reward, staleness, rates and times of the newest steps, in words; the times are means of the last ten."""
    rows = dict[str, str]()
    if rewards := tail.series(lambda line: line.reward_mean):

        def newest(metric: Callable[[StepMetrics], float], unknown: float = 0.0) -> float:
            """That of the newest step; `unknown` where it is no number."""
            value = metric(tail.lines[-1])
            return unknown if math.isnan(value) else value

        def recent(metric: Callable[[StepMetrics], float]) -> float:
            return tail.mean(metric, LATEST) or 0.0

        rows["reward"] = f"{rewards[-1]:.3f}  last ten {recent(lambda line: line.reward_mean):.3f}"
        rows["staleness"] = (
            f"mean {newest(lambda line: line.staleness_mean):.2f}  max {tail.lines[-1].staleness_max} of "
            f"{config.staleness.max} allowed  expired tokens {tail.expired}"
        )
        step_s, idle_s = recent(lambda line: line.step_s), recent(lambda line: line.learner_idle_s)
        rows["step"] = (
            f"{step_s:.2f} s, {idle_s / step_s if step_s else 0.0:.0%} waiting for groups  "
            f"publish {recent(lambda line: line.publish_s):.2f} s  "
            f"flip stall {recent(lambda line: line.generation_stall_s):.3f} s"
        )
        rows["policy"] = (
            f"entropy {newest(lambda line: line.entropy):.3f}  ratio max {newest(lambda line: line.ratio_max, 1.0):.2f}"
            f"  gradient norm {newest(lambda line: line.grad_norm):.3f}"
        )
    if seen is not None:
        rows["generation"] = f"{_rate(seen):,.0f} tokens/s  {seen.status.tokens_generated_total:,} in all"
        rows["wasted"] = waste_sentence(seen.status)
        rows["failed"] = given_up(seen.status.groups_dead)
    if advice := advice_for(tail.lines, config.staleness.max):
        rows["advice"] = advice.text
    return {name: text for name, text in rows.items() if text}


def processes(seen: Observation) -> RenderableType:
    status, state = seen.status, seen.learner_state
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("process", "pid", "state", "version", "since", "waiting on"):
        table.add_column(name, no_wrap=name != "waiting on", justify="right" if name in ("pid", "version") else "left")
    learner = status.learner
    if learner is None:
        waits = "" if not seen.live else "its imports: RUN/logs/learner-0.log" if seen.begins else "a learner to start"
        _add_row(table, "learner", "-", _state(state), "-", "", waits)
    else:
        since = duration(status.learner_last_seen_s if state == "silent" else learner.since_s)
        version = str(learner.policy_version)
        _add_row(table, "learner", str(learner.pid), _state(state), version, since, learner.waiting_on)
    for machine in status.machines:
        ranks = f"machine {machine.index} of the round" if machine.index >= 0 else "a spare one, or a round to form"
        where = f"{machine.address}: {ranks}"
        _add_row(table, machine.host, "", _state(machine.state), "", duration(machine.last_seen_s), where)
    groups = f"{status.groups_ready} groups ready, {status.groups_leased} leased, {status.groups_pending} pending"
    stuck = status.store.stuck if status.store is not None else ""
    state = "serving" if seen.live else "unreachable" if seen.unreachable else "ended"
    state = "stopping" if seen.live and status.stopping else state
    _add_row(table, "broker", str(status.pid), _state(state), "", "", stuck or groups)
    for node in status.nodes:
        report = node.report
        state = node.report.state if node.alive else "gone"
        since = duration(report.since_s + node.last_seen_s if node.alive else node.last_seen_s)
        work = f"{node.leases} leases, {report.tokens_per_s:,.0f} tokens/s"
        detail = f"{report.waiting_on}  ({work})" if report.waiting_on else work
        _add_row(table, report.node_id, str(report.pid), _state(state), str(report.policy_version), since, detail)
    for service in status.services:
        where = f"{service.kind} at {service.url} on {service.host}"
        _add_row(table, service.name, str(service.pid), _state(service.state), "", duration(service.since_s), where)
    mixture = [plain_text(text) for text in [weights_sentence(status)] if text]
    return Group(table, *mixture, *(plain_text(alarm, "red") for alarm in (learner.alarms if learner else ())))


def weights_sentence(status: BrokerStatus) -> str:
    """'shares of sources: math 0.75, code 0.25; asked for: code 3'; '' in a job of one source."""
    if status.weights is None:
        return ""
    text = "shares of sources: " + ", ".join(f"{name} {share:.2f}" for name, share in status.weights.shares.items())
    asked = [f"{name} {weight:g}" for request in status.weight_requests for name, weight in request.weights.items()]
    return f"{text}; asked for: {', '.join(asked)}" if asked else text


def waste_sentence(status: BrokerStatus) -> str:
    """'1,200 tokens (8% of those generated): 1,000 filtered, 200 lost'; '' when nothing was lost."""
    wasted = whole_waste(status)
    tokens = wasted_tokens(wasted)
    if not tokens:
        return ""
    generated = status.tokens_generated_total
    share = f" ({tokens / generated:.0%} of those generated)" if generated else ""
    by_size = sorted(((w.tokens, reason) for reason, w in wasted.items() if w.tokens), reverse=True)
    return f"{tokens:,} tokens{share}: " + ", ".join(f"{count:,} {reason}" for count, reason in by_size)


def waste_table(status: BrokerStatus) -> RenderableType:
    """Tokens and seconds by reason for the run, and for each node that wasted something."""
    rows = [("all", whole_waste(status))]
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
        _add_row(grid, name, *(_cell(wasted.get(reason, Waste())) for reason in shown))
    more = len(rows) - SHOWN_NODES - 1
    return Group(grid, Text(f"and {more} more; --json has all", "dim")) if more > 0 else grid


def plain_line(config: Config, seen: Observation | None, tail: RecentTail) -> str:
    """The same in one line, for logs; `visible`."""
    parts = [f"step {_version(tail, seen)}/{config.run.steps}"]
    if last := tail.last:
        reward, staleness = (0.0 if math.isnan(value) else value for value in (last.reward_mean, last.staleness_mean))
        parts.append(f"reward {reward:.3f}")
        parts.append(f"staleness {staleness:.2f} max {last.staleness_max}")
    if seen is None:
        return "  ".join([*parts, "broker: no answer yet"])
    status = seen.status
    learner = seen.status.learner
    parts.append(f"{_rate(seen):,.0f} tokens/s")
    waits = f"{_with_reason('', learner.waiting_on)} {duration(learner.since_s)}" if learner else ""
    parts.append(f"learner: {seen.learner_state}{waits}")
    parts.append(f"groups: {status.groups_ready} ready {status.groups_leased} leased")
    if lost := given_up(status.groups_dead):
        parts.append(lost)
    for node in status.nodes:
        state = _with_reason(node.report.state if node.alive else "gone", node.report.waiting_on)
        parts.append(f"{node.report.node_id}: {state} v{node.report.policy_version}")
    return visible("  ".join(parts), kept="")


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Values as bars between their own minimum and maximum; more values than `width` are averaged."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in values)


def _version(tail: RecentTail, seen: Observation | None) -> int:
    """Steps that are trained: by the metrics, else by the learner's report."""
    if tail.last is not None and tail.last.policy_version:
        return tail.last.policy_version
    learner = seen.status.learner if seen is not None else None
    return learner.policy_version if learner is not None else 0


def _rate(seen: Observation) -> float:
    """Tokens per second of the living nodes."""
    return sum(node.report.tokens_per_s for node in seen.status.nodes if node.alive)


def _add_row(table: Table, *cells: str | Text) -> None:
    table.add_row(*(plain_text(cell) if isinstance(cell, str) else cell for cell in cells))


def _state(state: str) -> Text:
    return plain_text(state, COLOUR_OF.get(state, ""))


def _with_reason(state: str, waiting_on: str) -> str:
    return f"{state} ({waiting_on})" if waiting_on else state


def _counts(spent: Waste) -> bool:
    return spent.tokens > 0 or spent.seconds >= 0.05


def _cell(spent: Waste) -> str:
    parts = ([f"{spent.tokens:,}"] if spent.tokens else []) + ([f"{spent.seconds:,.1f} s"] if spent.seconds else [])
    return ", ".join(parts) or "-"
