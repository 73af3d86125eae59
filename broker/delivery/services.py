"""Scorers that report to the broker of their run. They are no nodes: no lease, window or stall rule knows them.

All of this is in memory. After a restart the broker learns of them by their next reports.
"""

from dataclasses import dataclass, field

from msgspec.structs import asdict, replace

from broker.contract import LOST_AFTER_S, ServiceOrder, ServiceReport, ServiceStatus
from broker.delivery.learner_machines import LOST_S
from broker.delivery.logs import LogTails
from common.errors import BrokerError


@dataclass
class Services:
    """Times are monotonic. A name may serve on several hosts, each with a url of its own."""

    run: str  # run.name
    logs: LogTails
    # by name and host: the newest report, and when it came
    known: dict[tuple[str, str], tuple[ServiceReport, float]] = field(
        default_factory=dict[tuple[str, str], tuple[ServiceReport, float]]
    )

    def report(self, report: ServiceReport, log: str | None, now: float, stopping: bool) -> ServiceOrder:
        """Keep a report, or forget who leaves; returns what it is to do. Raises BrokerError for another run's."""
        if report.run not in ("", self.run):
            raise BrokerError(f"this is the broker of the run {self.run!r}, and {report.name} is of {report.run!r}")
        key = report.name, report.host
        if not report.leaving:
            self.known[key] = report, now
        elif key in self.known and self.known[key][0].pid == report.pid:  # no other process has come for it
            del self.known[key]
        self._forget(now)
        self.logs.answer(report.name, log)
        return ServiceOrder(stopping, report.name in self.logs.asked)

    def has(self, name: str) -> bool:
        return any(name == known for known, _ in self.known)

    def status(self, now: float) -> list[ServiceStatus]:
        self._forget(now)
        found: list[ServiceStatus] = []
        for report, seen_at in self.known.values():
            silent_s = now - seen_at
            if silent_s > LOST_AFTER_S:
                report = replace(report, state="gone", since_s=0.0)
            aged = replace(report, since_s=report.since_s + silent_s)
            found.append(ServiceStatus(**asdict(aged), last_seen_s=silent_s))
        return found

    def _forget(self, now: float) -> None:
        for key, (_, seen_at) in list(self.known.items()):
            if now - seen_at > LOST_S:
                del self.known[key]
