"""Explains from a status alone who waits for whom, since when, and what would end the wait.

A job that runs well has few and short waits. Ordinary ones are included, such as a learner that waits for groups that
are being generated; `since_s` shows how serious a wait is.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from broker.contract import (
    LEARNER_ENDED,
    LOST_AFTER_S,
    BrokerStatus,
    Delivery,
    GroupWork,
    LearnerReport,
    NodeReport,
    NodeStatus,
)
from common.waits import WaitKind, sentence

NAMED = 4  # a sentence names so many nodes or groups and counts the rest
PROMPT_S = 2.0  # shorter flips, broadcasts and copies of the weights are not reported
SLOW_ENVIRONMENT_S = 20.0
MIB = 1 << 20

# Advice on a wait that lasts, by its kind, where a person can do more than the wait's own `release` says.
ADVICE = {
    "store": "make room on the disk of run.dir",
    "full": "a larger broker.max_bytes, a smaller learner.checkpoint.every, or a new run with a smaller staleness.max",
    "store_lags": "a faster disk for run.dir or a faster Redis server, or a larger broker.memory_bytes",
    "no_node": "start nodes; RUN/logs/rollout-*.log says why earlier ones ended",
    "no_learner": "start the learner; RUN/logs/learner-0.log says why an earlier one ended",
    "learner_silent": "look at the learner's process: stopped (kill -CONT), out of memory (dmesg), a rank that hangs",
    "learner_failed": "RUN/logs/learner-0.log",
    "learner_stalled": "look at the processes and the network of these ranks; a larger learner.timeout_s",
    "learner_starting": "model.verify=false saves the forward check; a large model is read from the disk first",
    "learner_checkpointing": "learner.checkpoint.asynchronous, a larger learner.checkpoint.every, or a faster disk",
    "learner_publishing": "a new run with a larger weights.publish_every",
    "groups": "more nodes or a larger rollout.concurrency, or a new run with a smaller rollout.max_tokens; "
    "`status` has the advisor's line",
    "broadcast": "look at the node that is named: stopped, swapping, or cut off; it is ejected by itself",
    "window": "fewer nodes, or a new run with a larger staleness.max: the learner is what is slow; "
    "`status` has the advisor's line",
    "excluded": "the node's log; memory errors of the machine; learner and node from the same release",
    "node_gone": "the node's log; dmesg for the out-of-memory killer; the network between node and broker",
    "starting": "the node's log; the first start of an engine compiles",
    "flipping": "the node's log",
    "environment": "the environment: what does it wait for? rollout.sample_timeout_s bounds an episode",
    "scorer": "the scorer's server and its log; the reason of the last failure names the request's end",
    "straggler": "a smaller rollout.sample_timeout_s, or a new run with a smaller rollout.max_tokens or "
    "rollout.max_turns; staleness.expired=mask does not wait for it",
    "broker_away": "the broker's process and its log, or the Redis server",
}


class Stall(msgspec.Struct, frozen=True):
    kind: str  # a name for programs; docs/stalls.md lists all of them
    who: str  # the one that waits
    waits_for: str  # the other side, and its progress
    since_s: float | None  # duration so far; None where it is unknown
    release: str  # the event that would end the wait
    nodes: list[str] = []  # that take part, those that are waited for first
    task: int | None = None  # a task that is late

    @property
    def advice(self) -> str:
        return ADVICE.get(self.kind, self.release)


def explain(status: BrokerStatus) -> list[Stall]:
    """Every wait in a job with this status. Those that stop the most come first."""
    parts = (_store, _paused, _learner, _evaluation, _broadcast, _full, _nodes, _groups)
    return [stall for part in parts for stall in part(status)]


def learner_silent(status: BrokerStatus) -> bool:
    """Whether the learner missed its reports without having ended."""
    learner = status.learner
    return learner is not None and learner.state not in LEARNER_ENDED and status.learner_last_seen_s > LOST_AFTER_S


def named(names: Iterable[str]) -> str:
    """'a', 'a and b', 'a, b, c, d and 12 more'."""
    every = list(names)
    if len(every) > NAMED + 1:
        return f"{', '.join(every[:NAMED])} and {len(every) - NAMED} more"
    return " and ".join([", ".join(every[:-1]), every[-1]] if len(every) > 1 else every)


def _store(status: BrokerStatus) -> Iterator[Stall]:
    if status.store is not None and status.store.stuck:
        waits = f"the broker, which cannot write its store and acknowledges nothing until it can: {status.store.stuck}"
        yield Stall("store", "everyone", waits, None, "the disk takes writes again; nothing is lost meanwhile")


def _full(status: BrokerStatus) -> Iterator[Stall]:
    if not status.full:
        return
    nodes = [n.report.node_id for n in _alive(status)]
    if status.store_lags:
        waits = f"the store, which is slower than the nodes: {status.bytes_in_memory / MIB:,.1f} MiB are in memory"
        yield Stall("store_lags", named(nodes) or "nodes", waits, None, "it has written them", nodes)
        return
    used = f"{status.bytes_held / MIB:,.1f} of {status.run.max_bytes / MIB:,.1f} MiB"
    release = "the learner takes a step's groups or commits a checkpoint; or a larger broker.max_bytes"
    waits = f"room in the broker: {used} used, and more on its way"
    yield Stall("full", named(nodes) or "nodes", waits, None, release, nodes)


ENDED = {  # state -> the one that waits, the end, the release
    "drained": ("nodes", "was told to stop and left at version {version}", "started again, it continues from there"),
    "failed": ("everyone", "failed at version {version}: {reason}", "started again, it continues from its checkpoint"),
}
BUSY = {  # state -> the release
    "starting": "it has loaded and checked the model, and publishes its first version",
    "checkpointing": "the checkpoint is copied, or on the disk when it is the last one",
    "publishing": "the weights are copied for the weight plane",
    "evaluating": "all problems are done; without results it gives up, and the run ends",
    "stalled": "the ranks answer again; else all end after learner.timeout_s and resume from the checkpoint",
}


def _learner(status: BrokerStatus) -> Iterator[Stall]:
    learner = status.learner
    if status.machines_wait:
        release = "`slipstream learner` on another machine, or the end of ranks that may still run"
        yield Stall("machines", "the learner", f"its machines: {status.machines_wait}", None, release)
        return
    if learner is None:
        release = "start one with `slipstream learner CONFIG`"
        yield Stall("no_learner", "everyone", "a learner: none has attached so far", None, release)
        return
    since_s = learner.since_s + status.learner_last_seen_s
    if learner_silent(status):
        waits = f"the learner (pid {learner.pid}), which has sent nothing since it was {learner.state}"
        release = "it reports again (is it stopped, swapping or cut off?), or is started again"
        yield Stall("learner_silent", "everyone", waits, status.learner_last_seen_s, release)
    elif learner.state in ENDED:
        who, how, release = ENDED[learner.state]
        how = how.format(version=learner.policy_version, reason=sentence(learner.wait) or "see its log")
        yield Stall(f"learner_{learner.state}", who, f"the learner, which {how}", status.learner_last_seen_s, release)
    elif learner.state in ("waiting", "replaying"):
        yield from _waiting(status, learner, since_s)
    elif learner.state in BUSY and since_s > PROMPT_S:
        waits = f"{sentence(learner.wait) or 'itself'} ({learner.state})"
        yield Stall(f"learner_{learner.state}", "the learner", waits, since_s, BUSY[learner.state])


def _paused(status: BrokerStatus) -> Iterator[Stall]:
    learner = status.learner
    if learner is not None and learner.paused and learner.state not in LEARNER_ENDED:
        release = f"`slipstream resume {status.run.run_dir}`, or the metric is well again"
        yield Stall("paused", "nodes", f"the end of a pause in publishing: {learner.paused}", None, release)


def _waiting(status: BrokerStatus, learner: LearnerReport, since_s: float) -> Iterator[Stall]:
    missing = learner.groups_missing or status.run.groups_per_step
    ready = min(status.groups_ready, missing)
    waits = f"groups for step {learner.step}: {ready} of {missing} ready"
    alive = [node for node in _alive(status) if not node.report.pool]
    if not alive:
        release = "a node joins: `slipstream rollout CONFIG`, or `--join ADDRESS` elsewhere"
        yield Stall("no_node", "the learner", f"{waits}, and no node is alive", since_s, release)
        return
    nodes = [node.report.node_id for node in alive]
    at_work = [(node.report.node_id, g) for node in alive for g in node.report.groups if g.evaluates < 0]
    if at_work:
        nearest = sorted(at_work, key=lambda pair: (pair[1].samples - pair[1].finished, pair[1].serial))
        nodes = [node for node, _ in nearest]
        shown = [
            f"{node} task {group.serial}: {group.finished} of {group.samples} samples, {group.tokens:,} tokens"
            for node, group in nearest[:NAMED]
        ] + ["..."] * (len(nearest) > NAMED)
        waits += f", {status.groups_leased} being generated ({'; '.join(shown)})"
        release = f"{missing - ready} more of them are finished" if missing > ready else "the broker hands them out"
    elif status.groups_leased:
        waits += f", {status.groups_leased} leased by {named(nodes)}"
        release = "they are finished"
    elif status.groups_pending:
        waits += f", none being generated by {named(nodes)}"
        release = "a node leases a task; the lines below say what each of them waits for"
    else:
        release = "the learner offers tasks"
        waits += ", and no task is offered"
    yield Stall("groups", "the learner", waits, since_s, release, nodes)


def _evaluation(status: BrokerStatus) -> Iterator[Stall]:
    """A version whose held-out problems wait for a node."""
    now = status.evaluation
    if now is None or now.leased or not now.pending:
        return
    done = f"{now.finished} of {now.pending + now.finished} problems are done"
    nodes = [node.report.node_id for node in _alive(status) if now.shared or node.report.pool]
    who = named(nodes) if nodes else "a node of the pool, and none is alive"
    release = f"version {now.version} reaches it" if nodes else "`slipstream rollout --pool eval` starts one"
    yield Stall("evaluation", f"the evaluation of version {now.version}", f"{who}: {done}", None, release, nodes)


def _broadcast(status: BrokerStatus) -> Iterator[Stall]:
    """A version that has not reached every node."""
    learner = status.learner
    if learner is None or learner.state in LEARNER_ENDED:
        return
    late: dict[tuple[int, str], list[Delivery]] = {}
    for delivery in learner.deliveries:
        if delivery.since_s > PROMPT_S:
            late.setdefault((delivery.version, delivery.stage), []).append(delivery)
    does = {"receiving": "has not staged it", "flipping": "staged it and is not active"}
    more = learner.deliveries_waiting - len(learner.deliveries)
    for (version, stage), deliveries in late.items():
        nodes = [d.node_id for d in deliveries]
        names = named(nodes)
        waits = f"{names}, which {does.get(stage, f'is {stage}')}" + (f" (and {more} nodes more)" if more > 0 else "")
        release = "it answers, or is ejected at the end of weights.timeout_s and the others continue without it"
        if stage == "queued":
            waits = f"the broadcast before it, to reach {names}"
            release = "that one is through, or cut off"
        since_s = max(d.since_s for d in deliveries) + status.learner_last_seen_s
        yield Stall("broadcast", f"version {version}", waits, since_s, release, nodes)


def _alive(status: BrokerStatus) -> list[NodeStatus]:
    return [node for node in status.nodes if node.alive]


def _nodes(status: BrokerStatus) -> Iterator[Stall]:
    """Nodes that do not generate. Nodes with the same reason share one stall, which has their longest wait."""
    merged: dict[tuple[str, str, str], dict[str, float]] = {}
    for node in _alive(status):
        reason = _reason(status, node)
        if reason is not None:
            merged.setdefault(reason, {})[node.report.node_id] = node.report.since_s + node.last_seen_s
    for (kind, waits, release), since in merged.items():
        yield Stall(kind, named(since), waits, max(since.values()), release, list(since))
    gone = {node.report.node_id: node.last_seen_s for node in status.nodes if not node.alive}
    if gone:
        release = "it comes back, or the broker forgets it; other nodes get its tasks"
        waits = "nobody: it sends no heartbeats"
        yield Stall("node_gone", named(gone), waits, min(gone.values()), release, list(gone))


def _reason(status: BrokerStatus, node: NodeStatus) -> tuple[str, str, str] | None:
    """(kind, waits for, release) of a living node; None while it generates or is about to."""
    report = node.report
    learner = status.learner
    on = sentence(report.wait)
    if report.state == "excluded":
        return "excluded", f"nobody: it may not generate ({on})", "it is started again and proves its weights"
    if report.state in ("starting", "draining"):
        release = {"starting": "the engine is up", "draining": "its groups are finished or given back"}[report.state]
        return report.state, on or report.state, release
    if report.state == "flipping":
        slow = report.since_s + node.last_seen_s > PROMPT_S
        return ("flipping", "its engine, which changes weights", "the flip is proven") if slow else None
    if report.pool and report.state in ("joining", "waiting"):
        return "pool", on or "problems", "the learner publishes the next version that evaluation.every selects"
    if report.state not in ("joining", "waiting") or (report.state == "waiting" and report.groups):
        return None
    if learner is None or learner.state in LEARNER_ENDED or learner_silent(status):
        return "node_waits", on or "the learner", "see the learner"
    if report.state == "joining" or report.wait.kind in (WaitKind.WEIGHTS, WaitKind.OTHER_WEIGHTS):
        return "weights", on or "weights", f"version {learner.policy_version} reaches it"
    if report.wait.kind == WaitKind.SCORER:
        return "scorer", on, "it answers a request that failed"
    return _window(status, learner, report)


def _window(status: BrokerStatus, learner: LearnerReport, report: NodeReport) -> tuple[str, str, str]:
    """The reason why a node with weights gets no task: the window, a full broker, or a lack of tasks."""
    version = report.policy_version
    if status.full:
        return "store_lags" if status.store_lags else "full", "room in the broker", "see the broker"
    if (new := learner.policy_version) > version:
        waits = f"version {new}, with which it may lease more tasks; it has version {version}"
        return "weights", waits, f"version {new} reaches it"
    idle = status.groups_pending == 0 and learner.state not in ("waiting", "replaying")
    if idle and report.wait.kind != WaitKind.WINDOW:
        return "tasks", "tasks: none is pending", f"the learner, which is {learner.state}, offers more"
    end = f"below {status.window.end(version)}" if status.window is not None else "in it"
    waits = f"the window: with version {version} tasks {end} may be leased, and they are"
    release = f"step {learner.step} is trained and version {new + 1} published (the learner is {learner.state})"
    return "window", waits, release


_ENDS = {
    "environment": "it answers, or rollout.sample_timeout_s ends the episode",
    "queued": "an episode before it ends",
    "engine": "they end, or reach rollout.max_tokens or rollout.sample_timeout_s",
    "scorer": "it answers, or scorers.NAME.timeout_s ends the request",
    "done": "the broker has it",
}


class _Late(NamedTuple):
    since_s: float
    node_id: str
    group: GroupWork
    there_s: float  # since its episode has its state


def _groups(status: BrokerStatus) -> list[Stall]:
    """Overtaken groups, and groups whose environment does not answer; one stall for all that wait for the same."""
    due = status.window.first_due(status.learner.step) if status.learner and status.window else 0
    merged: dict[tuple[str, bool], list[_Late]] = {}
    for node in _alive(status):
        for group in node.report.groups:
            overtaken = group.evaluates < 0 and group.serial < due
            stuck = group.state == "environment" and group.state_s + node.last_seen_s > SLOW_ENVIRONMENT_S
            if overtaken or stuck:
                state = group.state if group.state in _ENDS else "engine"
                since_s = (group.state_s if state == "environment" else group.age_s) + node.last_seen_s
                late = _Late(since_s, node.report.node_id, group, group.state_s + node.last_seen_s)
                merged.setdefault((state, overtaken), []).append(late)
    return [_straggler(state, overtaken, groups) for (state, overtaken), groups in merged.items()]


def _straggler(state: str, overtaken: bool, groups: list[_Late]) -> Stall:
    longest = max(groups, key=lambda late: late.since_s)
    samples = sum(late.group.samples for late in groups)
    missing = samples - sum(late.group.finished for late in groups)
    nodes = sorted({late.node_id for late in groups})
    at = f"{missing} of {samples} samples on {named(nodes)}"
    first = f"task {longest.group.serial}: " if len(groups) > 1 else ""
    # A node counts tokens when a call to the engine returns, so a running call adds none.
    known = f"{longest.group.episode_tokens:,} tokens" + (" before it" if state == "engine" else "")
    episode = f"{first}turn {longest.group.turns}, {known}, {longest.there_s:.0f} s there"
    waits = {
        "environment": f"its environment ({at}; {episode})",
        "queued": f"a free slot in the engine ({at})",
        "engine": f"the engine ({at}; {episode})",
        "scorer": f"a scorer's answer ({at})",
        "done": f"the broker, to which {named(nodes)} hands it in",
    }[state]
    names = named(str(serial) for serial in sorted(late.group.serial for late in groups))
    who = f"task{'s' if len(groups) > 1 else ''} {names}" + (", which later ones have overtaken" if overtaken else "")
    kind = "environment" if state == "environment" else "straggler"
    return Stall(kind, who, waits, longest.since_s, _ENDS[state], nodes, longest.group.serial)
