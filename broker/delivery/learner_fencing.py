"""The learner as the broker sees it: its newest report, fencing of replaced learners, silence."""

import msgspec

from broker.contract import LEARNER_ENDED, LOST_AFTER_S, LearnerReport
from common.errors import BrokerError
from common.waits import WaitFor, WaitKind


class LearnerRecord:
    """Data about the learner; `now` arguments are monotonic seconds."""

    def __init__(self) -> None:
        self.report: LearnerReport | None = None
        self.replaced: set[str] = set()  # instances of the current incarnation that another instance replaced
        self.job_ended = False  # the report is of a job that ended, and no learner has reported since
        self.seen_at = 0.0  # time of the last request of a learner; any of them is a sign of life

    def check(self, incarnation: int | None, instance: str = "") -> None:
        """Raise BrokerError for a learner that was replaced; an incarnation of None is a client that never attached."""
        current = self.report
        if incarnation is None or current is None or incarnation > current.incarnation:
            return
        if incarnation < current.incarnation:
            by = f"incarnation {current.incarnation}"
        elif instance in self.replaced or self._is_other(instance):
            by = "another process of the same incarnation"
        else:
            return
        replaced = f"learner incarnation {incarnation} was replaced by {by} (pid {current.pid})"
        raise BrokerError(f"{replaced}; this process must stop")

    def check_report(self, report: LearnerReport, now: float) -> None:
        """Raise BrokerError for the report of a learner that was replaced, or that would replace a living one."""
        current = self.report
        newcomer = report.instance not in self.replaced and self._is_other(report.instance)
        if current is None or report.incarnation != current.incarnation or not newcomer:
            self.check(report.incarnation, report.instance)
        elif current.state not in LEARNER_ENDED and (silent_s := self.silent_s(now)) <= LOST_AFTER_S:
            alive = f"process {current.pid}, {current.state}, seen {silent_s:.1f} s ago"
            hint = f"stop it, or wait until it has been silent for {LOST_AFTER_S:.0f} s"
            raise BrokerError(f"learner incarnation {report.incarnation} is alive already: {alive}; {hint}")

    def accept(self, report: LearnerReport) -> None:
        """Keep a report that passed `check_report`. An earlier instance of its incarnation is replaced for good."""
        before = self.report
        self.report = report
        self.job_ended = False
        if before is None or report.incarnation > before.incarnation:
            self.replaced.clear()
        elif before.instance and report.instance and before.instance != report.instance:
            self.replaced.add(before.instance)

    def _is_other(self, instance: str) -> bool:
        """Whether this is another process than the learner's; a process without an instance counts as the same."""
        current = self.report
        return current is not None and bool(instance) and bool(current.instance) and instance != current.instance

    def silent_s(self, now: float) -> float:
        """Seconds since the last sign of life; 0 when there never was a learner."""
        return max(0.0, now - self.seen_at) if self.report is not None else 0.0

    def status(self, now: float) -> LearnerReport | None:
        """The newest report, in state `lost` when the learner fell silent without reporting an end."""
        report = self.report
        silent_s = self.silent_s(now)
        if report is None or silent_s <= LOST_AFTER_S or report.state in LEARNER_ENDED:
            return report
        wait = WaitFor(WaitKind.SIGN_OF_LIFE, count=round(silent_s), cause=report.state)
        return msgspec.structs.replace(report, state="lost", wait=wait, since_s=silent_s)


def lasting(report: LearnerReport) -> tuple[int | str, ...]:
    """The part of a report that matters after a restart; the journal records a report when this part changes."""
    state = report.state if report.state in LEARNER_ENDED else ""
    return report.pid, report.incarnation, report.instance, report.weights_address, state
