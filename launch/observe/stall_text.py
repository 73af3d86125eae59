"""Who waits for whom, in the words of `status`, `top` and `doctor`; docs/stalls.md explains every kind."""

from rich.console import Group, RenderableType
from rich.text import Text

from broker.contract import LEARNER_ENDED
from broker.diagnosis.stalls import Stall, explain
from launch.observe.observation import Observation

SHOWN = 12
STOPPING = frozenset(
    ("store", "no_learner", "learner_silent", "learner_failed", "no_node", "broker_away", "broker_gone", "excluded")
)  # kinds that a person has to do something about


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
        return explain(seen.status)
    learner, address = seen.status.learner, seen.status.address
    if seen.unreachable:
        waits = f"the broker at {address}, which does not answer ({seen.note.partition(';')[0]})"
        release = "it answers again: nodes wait for a minute, and no acknowledged rollout is lost"
        return [Stall("broker_away", "everyone", waits, seen.age_s, release)]
    if learner is not None and learner.state in LEARNER_ENDED:
        return []
    release = "`slipstream up CONFIG` continues the run, or `slipstream broker CONFIG` for the broker alone"
    return [Stall("broker_gone", "everyone", "the broker, which has ended before the learner was done", None, release)]


def sentence(stall: Stall) -> str:
    """'node-0 waits for weights, since 3.0 s; until: version 4 reaches it'."""
    several = " and " in stall.who or stall.who == "nodes"
    who = f"{stall.who}," if ", which " in stall.who else stall.who
    since = f", since {duration(stall.since_s)}" if stall.since_s is not None else ""
    return f"{who} wait{'' if several else 's'} for {stall.waits_for}{since}; until: {stall.release}"


def page(seen: Observation) -> RenderableType:
    """Every stall, for `status`; the state of the job when there is none."""
    found = stalls_of(seen)
    if not found:
        alive = sum(node.alive for node in seen.status.nodes)
        moving = f"The learner is {seen.learner_state}; {alive} node{'' if alive == 1 else 's'} alive."
        return Text(moving if seen.live else "")
    more = [Text(f"and {len(found) - SHOWN} more; --json has all", "dim")] if len(found) > SHOWN else []
    return Group(*lines(seen, SHOWN), *more)


def lines(seen: Observation, most: int = 3) -> list[RenderableType]:
    """The first stalls, a sentence each."""
    stalls = stalls_of(seen)
    return [Text(sentence(s), "red" if s.kind in STOPPING else "yellow") for s in stalls[:most]]
