"""The learner as the broker sees it: newest report, fencing of replaced learners, silence."""

import msgspec

from broker.contract import LEARNER_ENDED, LOST_AFTER_S, LearnerReport
from common.errors import BrokerError


class LearnerRecord:
    """What is known of the learner; `now` arguments are monotonic seconds."""

    def __init__(self) -> None:
        self.report: LearnerReport | None = None
        self._seen_at = 0.0
        self._replaced: set[str] = set()  # instances of the current incarnation that another one replaced

    def check(self, incarnation: int | None, instance: str = "") -> None:
        """Fence a learner that was replaced; None is a client that never attached.

        Raises:
            BrokerError: when a later incarnation, or another process of the same one, is the learner now.
        """
        current = self.report
        if incarnation is None or current is None or incarnation > current.incarnation:
            return
        if incarnation < current.incarnation:
            by = f"incarnation {current.incarnation}"
        elif instance in self._replaced or self._is_other(instance):
            by = "another process of the same incarnation"
        else:
            return
        raise BrokerError(
            f"learner incarnation {incarnation} was replaced by {by} (pid {current.pid}); this process must stop"
        )

    def update(self, report: LearnerReport, now: float) -> LearnerReport | None:
        """Keep `report`; returns the one before. Raises BrokerError when fenced, or when the learner is alive."""
        before = self.report
        if before is not None and report.incarnation > before.incarnation:
            self._replaced.clear()
        elif before is not None and report.incarnation == before.incarnation and self._is_other(report.instance):
            self._replace(before, report, now)
        self.check(report.incarnation, report.instance)
        self.report = report
        self._seen_at = now
        return before

    def _is_other(self, instance: str) -> bool:
        """Whether this is another process than the learner's; one that does not say cannot be told apart."""
        current = self.report
        return current is not None and bool(instance) and bool(current.instance) and instance != current.instance

    def _replace(self, current: LearnerReport, report: LearnerReport, now: float) -> None:
        """Another process of the same incarnation comes; BrokerError while the learner is alive."""
        if report.instance in self._replaced:
            return  # check says so
        silent_s = self.silent_s(now)
        if current.state not in LEARNER_ENDED and silent_s <= LOST_AFTER_S:
            raise BrokerError(
                f"learner incarnation {report.incarnation} is alive already: process {current.pid}, {current.state}, "
                f"seen {silent_s:.1f} s ago; stop it, or wait until it has been silent for {LOST_AFTER_S:.0f} s"
            )
        self._replaced.add(current.instance)
        self.report = None

    def seen(self, now: float) -> None:
        """Any request of the learner is a sign of life."""
        self._seen_at = now

    def silent_s(self, now: float) -> float:
        """Seconds since the last sign of life; 0 when there never was a learner."""
        return max(0.0, now - self._seen_at) if self.report is not None else 0.0

    def status(self, now: float) -> LearnerReport | None:
        """The newest report, in state `lost` when the learner fell silent without saying that it ended."""
        report, silent_s = self.report, self.silent_s(now)
        if report is None or silent_s <= LOST_AFTER_S or report.state in LEARNER_ENDED:
            return report
        waiting_on = f"not seen for {silent_s:.0f} s, was {report.state}"
        return msgspec.structs.replace(report, state="lost", waiting_on=waiting_on, since_s=silent_s)
