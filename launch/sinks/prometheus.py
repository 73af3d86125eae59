"""The sink prometheus: the newest state of a run on a port of this machine, for Prometheus to scrape.

Every series has the label run; those of a process have node, role and host as well. A node has series while the broker
lists it, so the fleet bounds their number. Names are those of the fields in broker/contract.py and common/metrics.py.
"""

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from broker.contract import LEARNER_ENDED, LOST_AFTER_S, BrokerStatus, LearnerReport, NodeReport
from common.errors import SlipstreamError
from common.json_lines import Event, decoder_of
from common.process.health import Series, TextServer, serving
from common.run_reader import LineTail
from common.waste import WASTE_REASONS, Waste
from launch.observe.observation import Observation, observe, whole_waste
from launch.resolve_target import Target
from launch.sinks.feed import Cursor, FedRun, Feed, Point

SCRAPE_S = 60.0  # the first one reads a long events.jsonl
# Kinds of events that alerts count: they start at 0, so that the first one is an increase.
NOTED = ("ejection", "node_lost", "lease_expired", "task_dead", "role_crashed", "checkpoint")
OF_NODE = ("episodes_running", "concurrency", "tokens_generated", "tokens_per_s", "flips", "generation_stall_s")
OF_NODE += ("kv_cache_usage", "preemptions", "prefix_hit_rate")
BROKER = {"node": "broker", "role": "broker", "host": socket.gethostname()}
GROWING = {"events", "wasted_tokens", "wasted_s", "node_tokens_generated", "node_flips", "node_generation_stall_s"}
GROWING |= {"node_preemptions", "broker_groups_committed", "broker_groups_filtered", "broker_groups_dead"}
GROWING |= {"broker_lease_expiries", "broker_stale_results", "broker_refused_messages"}


class RunSeries(Series):
    """The series of a run, which have the label run."""

    def add(self, name: str, value: float, **labels: str) -> None:
        """The unit is written out; a name of GROWING is a counter's."""
        full = re.sub("_per_s$", "_per_second", re.sub("(?<!_per)_s$", "_seconds", name))
        super().add(full + "_total" * (name in GROWING), value, **labels)


class Prometheus:
    """Serves the newest state; each scrape asks the broker."""

    def __init__(self, job: FedRun, cursor: Cursor, feeds: Sequence[Feed]) -> None:
        """`feeds`: those of all sinks. Raises OSError when the port is in use."""
        self._has_broker = job.config.rl is not None
        credentials = job.config.broker.credentials if self._has_broker else None
        self._name = job.config.run.name
        self._target = Target(job.run, credentials)
        self._feeds = feeds
        self._events = LineTail(job.run.events, decoder_of(Event))
        self._counts = Counter[str](dict.fromkeys(NOTED, 0))
        self._newest: dict[str, Point] = {}  # by dataset, '' for the steps
        self._checkpoint_s = 0.0  # Unix time of the newest one, or of the learner's first start
        self._lock = threading.Lock()  # each scrape is a thread
        self._server = ExitStack()
        server = TextServer("127.0.0.1", job.config.telemetry.prometheus_port, self.answer, SCRAPE_S)
        self._server.enter_context(serving(server, "prometheus"))

    def write(self, points: Sequence[Point]) -> None:
        self._newest = self._newest | {point.dataset: point for point in points}

    def close(self) -> None:
        self._server.close()

    def answer(self, path: str) -> tuple[int, str]:
        """All series, as of now; a thread of the server calls it for each scrape."""
        if path.partition("?")[0] not in ("/", "/metrics"):
            return 404, "expected /metrics\n"
        series = RunSeries(run=self._name)
        with self._lock:
            self._add_events(series)
        for feed in self._feeds:
            series.add("sink_lag_bytes", feed.lag_bytes(), sink=feed.name)
        for dataset, point in self._newest.items():
            for path, value in point.values.items():
                _, name, *keys = path.split("/", 2)
                if dataset:
                    series.add("evaluation", value, dataset=dataset, metric=keys[0])
                else:
                    series.add(f"learner_{name}", value, key="".join(keys))
        try:
            seen = observe(self._target)
            add_broker(series, seen.status)
            add_processes(series, seen)
        except SlipstreamError:  # it left nothing
            if self._has_broker:
                series.add("node_up", 0, **BROKER)
        return 200, series.text()

    def _add_events(self, series: Series) -> None:
        for event in self._events.all():
            self._counts[event.kind] += 1
            if event.kind == "checkpoint" or (event.kind == "learner_started" and not self._checkpoint_s):
                self._checkpoint_s = event.time_s
        for kind, count in self._counts.items():
            series.add("events", count, kind=kind)
        if self._checkpoint_s:
            series.add("checkpoint_age_s", max(0.0, time.time() - self._checkpoint_s))


def add_broker(series: Series, status: BrokerStatus) -> None:
    """Every number of the status, and the waste by reason."""
    for name, value in msgspec.structs.asdict(status).items():
        if isinstance(value, int | float) and name not in ("pid", "learner_last_seen_s"):
            series.add(f"broker_{name}", value)
    series.add("max_staleness", status.run.max_staleness)
    wasted = whole_waste(status)
    for reason in WASTE_REASONS:
        waste = wasted.get(reason, Waste())
        series.add("wasted_tokens", waste.tokens, reason=reason)
        series.add("wasted_s", waste.seconds, reason=reason)


def add_processes(series: Series, seen: Observation) -> None:
    """Whether each process lives, its state, heartbeat and version; and more of each node."""
    status = seen.status
    newest = -1

    def add(report: LearnerReport | NodeReport, role: str, node: str, up: bool, silent_s: float, state: str) -> None:
        labels = {"node": node, "role": role, "host": report.host}
        series.add("node_up", seen.live and up, **labels)
        series.add("state_s", report.since_s + silent_s, **labels, state=state)
        series.add("policy_version", report.policy_version, **labels)
        if state not in LEARNER_ENDED:
            series.add("heartbeat_age_s", silent_s + seen.age_s, **labels)
        if isinstance(report, NodeReport):
            if up and report.policy_version >= 0 <= newest:
                series.add("versions_behind", newest - report.policy_version, **labels)
            for name in OF_NODE:
                series.add(f"node_{name}", getattr(report, name), **labels)

    series.add("node_up", seen.live, **BROKER)
    if (learner := status.learner) is not None:
        newest = learner.policy_version
        up = learner.state not in LEARNER_ENDED and status.learner_last_seen_s <= LOST_AFTER_S
        add(learner, "learner", "learner", up, status.learner_last_seen_s, learner.state)
    for node in status.nodes:
        state = node.report.state if node.alive else "gone"
        add(node.report, "rollout", node.report.node_id, node.alive, node.last_seen_s, state)
