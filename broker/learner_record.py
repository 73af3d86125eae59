"""The learner as the broker sees it: newest report, fencing of replaced incarnations, silence."""

import msgspec

from broker.contract import LearnerReport
from common.errors import BrokerError

LOST_AFTER_S = 10.0


class LearnerRecord:
    """What is known of the learner; `now` arguments are monotonic seconds."""

    def __init__(self) -> None:
        self.report: LearnerReport | None = None
        self._seen_at = 0.0

    def check(self, incarnation: int | None) -> None:
        """Fence a learner that was replaced; None is a client that never attached.

        Raises:
            BrokerError: when a later incarnation has attached.
        """
        current = self.report
        if incarnation is not None and current is not None and incarnation < current.incarnation:
            raise BrokerError(
                f"learner incarnation {incarnation} was replaced by incarnation {current.incarnation} "
                f"(pid {current.pid}); this process must stop"
            )

    def update(self, report: LearnerReport, now: float) -> LearnerReport | None:
        """Keep `report`; returns the one before. Raises BrokerError when fenced."""
        self.check(report.incarnation)
        before, self.report = self.report, report
        self._seen_at = now
        return before

    def seen(self, now: float) -> None:
        """Any request of the learner is a sign of life."""
        self._seen_at = now

    def silent_s(self, now: float) -> float:
        """Seconds since the last sign of life; 0 when there never was a learner."""
        return max(0.0, now - self._seen_at) if self.report is not None else 0.0

    def status(self, now: float) -> LearnerReport | None:
        """The newest report, in state `lost` when the learner fell silent without saying that it ended."""
        report, silent_s = self.report, self.silent_s(now)
        if report is None or silent_s <= LOST_AFTER_S or report.state in ("done", "failed"):
            return report
        waiting_on = f"not seen for {silent_s:.0f} s, was {report.state}"
        return msgspec.structs.replace(report, state="lost", waiting_on=waiting_on, since_s=silent_s)
