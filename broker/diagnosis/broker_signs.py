"""The broker's signs of life and the figures that an autoscaler of the fleet needs (docs/kubernetes.md)."""

import time
from collections.abc import Callable

from broker.contract import NODE_AWAY, BrokerStatus, Waste
from common.process.health import LifeSigns


class BrokerSigns(LifeSigns):
    """As LifeSigns; the leading broker's loop looks at its own status about once a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock=clock)
        self._looked_at, self._waited_s = clock(), 0.0

    def tick(self, status: Callable[[], BrokerStatus]) -> None:
        """Called in every turn of the loop."""
        passed_s = (now := self._clock()) - self._looked_at
        if passed_s < 1.0:
            return
        self._looked_at, found = now, status()
        if found.learner is not None and found.learner.state == "waiting":
            self._waited_s += passed_s
        figures = {
            "groups_pending": found.groups_pending,
            "groups_leased": found.groups_leased,
            "groups_ready": found.groups_ready,
            "nodes_ready": sum(node.alive and node.report.state not in NODE_AWAY for node in found.nodes),
            "nodes_waiting_seconds_total": found.waste.get("waiting", Waste()).seconds,
            "learner_waiting_seconds_total": self._waited_s,
        }
        self.show("leading", True, figures)
