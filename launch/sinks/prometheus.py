"""The sink prometheus: the newest state of a run on a port of this machine, for Prometheus to scrape.

Every series has the label run; those of a process have node, role and host as well. A node has series while the broker
lists it, so the fleet bounds their number. Names are those of the fields in broker/contract.py and common/metrics.py.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from broker.contract import LEARNER_ENDED, LOST_AFTER_S, WASTE_REASONS, BrokerStatus, Waste
from common.config.schema import Config
from common.errors import SlipstreamError
from launch.observe import waste_view
from launch.observe.line_tail import LineTail
from launch.observe.observation import Observation, observe
from launch.resolve_target import Target
from launch.sinks.points import Cursor, Job, Point

ASK_EVERY_S = 5.0
# Kinds of events that alerts count: they start at 0, so that the first one is an increase.
NOTED = ("ejection", "node_lost", "lease_expired", "task_dead", "role_crashed", "checkpoint")
PROCESS = ("run", "node", "role", "host")
OF_NODE = ("episodes_running", "concurrency", "tokens_generated", "tokens_per_s", "flips", "generation_stall_s")
OF_NODE += ("kv_cache_usage", "preemptions", "prefix_hit_rate")
OF_BROKER = ("groups_pending", "groups_ready", "groups_leased", "groups_taken", "groups_committed", "groups_filtered")
OF_BROKER += ("groups_dead", "lease_expiries", "stale_results", "refused_messages", "oldest_lease_s", "bytes_held")
OF_BROKER += ("tokens_generated_total",)
GROWING = {"tokens_generated", "flips", "generation_stall_s", "preemptions", "groups_committed", "groups_filtered"}
GROWING |= {"groups_dead", "lease_expiries", "stale_results", "refused_messages"}


class Prometheus(Collector):
    """Serves the newest state; the broker is asked about every five seconds, scraped or not."""

    def __init__(self, job: Job, cursor: Cursor, lags: Callable[[], Mapping[str, int]]) -> None:
        """`lags`: lines that each sink has not taken. Raises OSError when the port is in use."""
        self._has_broker = isinstance(job.config, Config)
        credentials = job.config.broker.credentials if isinstance(job.config, Config) else None
        self._run, self._target, self._lags = [job.name], Target(job.run, credentials), lags
        self._events, self._counts = LineTail(job.run.events), Counter(dict.fromkeys(NOTED, 0))
        self._seen: tuple[Observation, float] | None = None  # and the Unix time of it
        self._ask_at = 0.0
        self._step: dict[str, float] = {}
        self._evaluations: dict[str, Point] = {}
        self._checkpoint_s = 0.0  # Unix time of the newest one, or of the learner's first start
        self.tick()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, _ = start_http_server(job.config.telemetry.prometheus_port, "127.0.0.1", registry)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.dataset:
                self._evaluations[point.dataset] = point
            else:
                self._step = point.values

    def tick(self) -> None:
        while events := self._events.read()[1]:
            for event in events:
                kind = str(event.get("kind"))
                self._counts[kind] += 1
                if kind == "checkpoint" or (kind == "learner_started" and not self._checkpoint_s):
                    self._checkpoint_s = float(event.get("time_s", 0.0))
        if time.monotonic() >= self._ask_at:
            try:
                self._seen = observe(self._target), time.time()
            except SlipstreamError:  # it left nothing, and the state of long ago is no news
                self._seen = None
            self._ask_at = time.monotonic() + ASK_EVERY_S

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """All series, from what was last seen; a thread of the server calls it for each scrape."""
        yield self._one("events", ["kind"], list(self._counts.items()), grows=True)
        yield self._one("sink_lag_lines", ["sink"], self._lags().items())
        if self._checkpoint_s:
            yield self._one("checkpoint_age_s", [], [((), max(0.0, time.time() - self._checkpoint_s))])
        families: dict[str, Any] = {}
        for path, value in self._step.items():
            name, *keys = path.split("/", 2)[1:]
            shown = families.setdefault(name, family(f"learner_{name}", ["run", *(["key"] if keys else [])]))
            shown.add_metric([*self._run, *keys], value)
        yield from families.values()
        evaluated = [
            ((p.dataset, name.split("/", 2)[2]), v)
            for p in list(self._evaluations.values())
            for name, v in p.values.items()
        ]
        yield self._one("evaluation", ["dataset", "metric"], evaluated)
        if self._seen is not None:
            seen, at_s = self._seen
            yield from self._of_broker(seen.status)
            yield from self._of_processes(seen.status, seen.live, time.time() - at_s)
        elif self._has_broker:
            yield self._one("node_up", list(PROCESS[1:]), [(("broker", "broker", socket.gethostname()), 0)])

    def _one(self, name: str, labels: list[str], values: Iterable[tuple[Any, float]], grows: bool = False) -> Metric:
        """A family with one value per entry: (its label or labels besides the run, value)."""
        made = family(name, ["run", *labels], grows)
        for key, value in values:
            made.add_metric([*self._run, *([key] if isinstance(key, str) else key)], value)
        return made

    def _of_broker(self, status: BrokerStatus) -> Iterator[Metric]:
        for name in OF_BROKER:
            yield self._one(f"broker_{name}", [], [((), getattr(status, name))], name in GROWING)
        yield self._one("max_staleness", [], [((), status.run.max_staleness)])
        wasted = waste_view.whole(status)
        spent = [(reason, wasted.get(reason, Waste())) for reason in WASTE_REASONS]
        yield self._one("wasted_tokens", ["reason"], [(reason, waste.tokens) for reason, waste in spent], grows=True)
        yield self._one("wasted_s", ["reason"], [(reason, waste.seconds) for reason, waste in spent], grows=True)

    def _of_processes(self, status: BrokerStatus, live: bool, passed_s: float) -> Iterator[Metric]:
        """Whether each process lives, its state, heartbeat and version; and more of each node."""
        up, age, version, behind = (
            family(name, PROCESS) for name in ("node_up", "heartbeat_age_s", "policy_version", "versions_behind")
        )
        state = family("state_s", [*PROCESS, "state"])
        up.add_metric([*self._run, "broker", "broker", socket.gethostname()], live)
        newest = -1
        if (learner := status.learner) is not None:
            labels = [*self._run, "learner", "learner", learner.host]
            newest, silent_s, ended = learner.policy_version, status.learner_last_seen_s, learner.state in LEARNER_ENDED
            up.add_metric(labels, live and not ended and silent_s <= LOST_AFTER_S)
            state.add_metric([*labels, learner.state], learner.since_s + silent_s)
            version.add_metric(labels, newest)
            if not ended:
                age.add_metric(labels, silent_s + passed_s)
        more = {name: family(f"node_{name}", PROCESS, name in GROWING) for name in OF_NODE}
        for node in status.nodes:
            report = node.report
            labels = [*self._run, report.node_id, "rollout", report.host]
            up.add_metric(labels, live and node.alive)
            age.add_metric(labels, node.last_seen_s + passed_s)
            state.add_metric([*labels, report.state if node.alive else "gone"], report.since_s + node.last_seen_s)
            version.add_metric(labels, report.policy_version)
            if node.alive and report.policy_version >= 0 <= newest:
                behind.add_metric(labels, newest - report.policy_version)
            for name, shown in more.items():
                shown.add_metric(labels, getattr(report, name))
        yield from (up, age, state, version, behind, *more.values())


def family(name: str, labels: Sequence[str], grows: bool = False) -> Any:
    """An empty family slipstream_NAME with the unit written out; a counter when it only grows."""
    name = name.removesuffix("_s") + "_second" if name.endswith("_per_s") else name
    name = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
    kind = CounterMetricFamily if grows or name.endswith("_total") else GaugeMetricFamily
    return kind(f"slipstream_{name}", f"docs/sinks.md: {name}", labels=labels)
