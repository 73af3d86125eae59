"""The machines of the learner: which of them train together, in which round, and when a round is over.

A launcher on each machine reports about once a second (launch/up/learner_machine.py). When enough of them wait,
they form a round: the ranks of one start of the learner. A round is over when the ranks of one machine have failed, or
when a machine falls silent. Then every launcher ends its ranks and waits for the next round, which may have others.

No two rounds ever run at once. A launcher ends its ranks when the broker has not answered for FENCE_S. A machine
counts as ended once it said so, or was silent for LOST_S. All of this is in memory. After a restart the broker learns
of a running round from its members; until LOST_S have passed it forms none.
"""

from dataclasses import dataclass, field

from broker.contract import MachineReport, MachineStatus, Member, RendezvousOrder
from common.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXITS_FOR_GOOD

FENCE_S = 30.0  # a launcher without an answer for this long ends its ranks
LOST_S = FENCE_S + 5.0
FRESH_S = 5.0  # only machines that reported within this time join a round
TOLD_TO_END = 143  # SIGTERM: exit code of ranks that were told to drain before they could
INTERFACE = "network interface"  # a fact that a machine with learner.interface does not state
MACHINES_EVENT = "learner_machines"  # a round was formed
WELL = (EXIT_DONE, TOLD_TO_END)


@dataclass
class Round:
    """One start of the learner on several machines."""

    number: int
    members: list[Member]
    formed_at: float
    over: str = ""  # why; '' while it runs
    draining: bool = False  # a launcher of it was told to leave
    ended: set[str] = field(default_factory=set[str])  # machines that have reported since it is over

    @property
    def ids(self) -> list[str]:
        return [member.machine for member in self.members]


@dataclass
class LearnerMachines:
    """Times are monotonic. How many machines make a round, and how many failed ones end the job, is in the reports."""

    hold_until: float = 0.0  # no round is formed before: an earlier one may still run
    restarts: int = 0
    round: Round | None = None
    last_number: int = 0
    reports: dict[str, MachineReport] = field(default_factory=dict[str, MachineReport])  # in order of arrival
    seen_at: dict[str, float] = field(default_factory=dict[str, float])
    # last answers, with an exit code
    verdicts: dict[str, RendezvousOrder] = field(default_factory=dict[str, RendezvousOrder])

    def gather(self, report: MachineReport, learner_state: str, now: float, stopping: bool = False) -> RendezvousOrder:
        """Keep a launcher's report; returns what it is to do. `learner_state` is that of the learner's own report.

        A warm start has none; its launchers say how it ended. `stopping`: after `slipstream stop` no round begins any
        more, and the ranks of a warm start are told to drain.
        """
        self.reports[report.machine] = report
        self.seen_at[report.machine] = now
        self.last_number = max(self.last_number, report.round)
        if self.round is None and report.running and report.members:  # an earlier broker process formed it
            self.round = Round(report.round, report.members, now)
        if self.round is not None and self.round.over:
            self.round.ended.add(report.machine)
        if self.round is not None and stopping and not learner_state:
            self.round.draining = True
        self._look_at_round(learner_state, now)
        if stopping and not self._active:
            self._end_job(EXIT_DONE, "slipstream stop")
        self._forget(now)
        self._compare(now)
        self._form(now)
        return self._answer(report, now)

    def waits(self, now: float) -> str:
        """Why no round runs; '' when one does, or no machine is here."""
        wanted = max((report.wanted for report in self.reports.values()), default=0)
        if self._active or not wanted:
            return ""
        return f"{len(self._here(now))} of {wanted} machines here. {self._why(now)}".strip()

    def status(self, now: float) -> list[MachineStatus]:
        members = self.round.ids if self.round is not None else []
        found: list[MachineStatus] = []
        for name, report in self.reports.items():
            state = "running" if report.running else "leaving" if report.leaving else "waiting"
            rank = members.index(name) if report.running and name in members else -1
            found.append(MachineStatus(report.host, report.address, state, rank, now - self.seen_at[name]))
        return found

    def _look_at_round(self, learner_state: str, now: float) -> None:
        """End the round when it cannot continue, and the job when it is done or failed for good."""
        current = self.round
        if current is None or current.over:
            return
        well: list[str] = []
        for member in current.members:
            report = self.reports.get(member.machine)
            silent_s = now - max(self.seen_at.get(member.machine, 0.0), current.formed_at)
            left = report is not None and _has_left(report)
            if silent_s > LOST_S and not left:
                return self._end_round(f"{member.host} has been silent for {silent_s:.0f} s")
            if report is None or report.round != current.number:
                if left:
                    current.draining = True
                    return self._end_round("")
                continue  # its ranks have not started yet
            current.draining |= report.leaving
            if report.running:
                continue
            if report.exit_code in EXITS_FOR_GOOD:
                what = report.reason or f"its ranks ended with exit code {report.exit_code}; their log says why"
                current.over = f"{member.host}: {what}"
                return self._end_job(report.exit_code, current.over)
            if report.exit_code not in WELL:
                return self._end_round(f"the ranks on {member.host} ended with exit code {report.exit_code}")
            well.append(member.machine)
        if len(well) == len(current.members):
            learner_state = learner_state or self.reports[current.ids[0]].state
            if learner_state == "done" or (learner_state == "drained" and not current.draining):
                current.over = learner_state
                return self._end_job(EXIT_DONE, learner_state)
            self._end_round("" if current.draining else "every rank left, and the learner did not say why")

    def _end_round(self, reason: str) -> None:
        """`reason` is empty for a drain, which uses up no restart."""
        assert self.round is not None
        self.round.over = reason or "a machine was told to leave"
        if self.round.draining:
            return
        self.restarts += 1
        most = max((report.max_restarts for report in self.reports.values()), default=0)
        if self.restarts > most:
            self._end_job(EXIT_FAILED, f"{reason}; run.max_restarts ({most}) is used up")

    def _end_job(self, exit_code: int, reason: str) -> None:
        """Every launcher of now is told; one that comes later starts the job again."""
        for name in self.reports:
            self.verdicts.setdefault(name, RendezvousOrder(exit_code=exit_code, reason=reason))
        self.restarts = 0

    def _forget(self, now: float) -> None:
        """Machines that are gone: nothing of theirs can run any more. The others of a round end it first."""
        needed = self.round.ids if self.round is not None and not self.round.over else []
        for name, report in list(self.reports.items()):
            if _has_left(report) and name in needed:
                continue
            if _has_left(report) or now - self.seen_at[name] > LOST_S:
                del self.reports[name], self.seen_at[name]
                self.verdicts.pop(name, None)

    def _compare(self, now: float) -> None:
        """Refuse machines whose facts are not those of the first one that is here: a killed one may have had others."""
        here = self._here(now)
        for report in here[1:]:
            first = here[0]
            for key in {**first.facts, **report.facts}:
                ours = report.facts.get(key, "nothing")
                theirs = first.facts.get(key, "nothing")
                if ours != theirs and not (key == INTERFACE and "nothing" in (ours, theirs)):  # one was told
                    reason = f"{key}: {report.host} has {ours}, {first.host} has {theirs}; they must agree"
                    self.verdicts[report.machine] = RendezvousOrder(exit_code=EXIT_USAGE, reason=reason)
                    break

    def _form(self, now: float) -> None:
        """A round of the first machines that wait, once the ranks of the last one have ended everywhere."""
        last = self.round
        if now < self.hold_until or (last is not None and (not last.over or self._unended(last))):
            return
        able = [report for report in self._here(now) if not report.running and not report.leaving]
        if not able or len(able) < able[0].wanted:
            return
        members = [Member(r.machine, r.host, r.address, r.endpoint) for r in able[: able[0].wanted]]
        self.last_number += 1
        self.round = Round(self.last_number, members, now)

    def _unended(self, last: Round) -> list[MachineReport]:
        """Machines whose ranks of that round may still run; those that were lost are forgotten by now."""
        reports = [self.reports[name] for name in last.ids if name in self.reports]
        return [r for r in reports if r.running or (r.round != last.number and r.machine not in last.ended)]

    def _answer(self, report: MachineReport, now: float) -> RendezvousOrder:
        if report.machine in self.verdicts:
            return self.verdicts[report.machine]
        current = self.round
        here = len(self._here(now))
        if current is None or current.over or report.machine not in current.ids:
            return RendezvousOrder(reason=self._why(now), active=self._active, machines=here)
        return RendezvousOrder(current.number, current.members, current.draining, active=True, machines=here)

    @property
    def _active(self) -> bool:
        return self.round is not None and not self.round.over

    def _here(self, now: float) -> list[MachineReport]:
        """Machines that reported lately and have no verdict, in order of arrival."""
        known = ((name, report) for name, report in self.reports.items() if name not in self.verdicts)
        return [report for name, report in known if now - self.seen_at[name] <= FRESH_S]

    def _why(self, now: float) -> str:
        """Why no round runs, besides too few machines."""
        if now < self.hold_until:
            return "ranks of before the broker's restart may still run"
        if self.round is None or not self.round.over:
            return ""
        left = [report.host for report in self._unended(self.round)]
        text = f"round {self.round.number} is over: {self.round.over}"
        return f"{text}; its ranks on {', '.join(left)} may still run" if left else text


def _has_left(report: MachineReport) -> bool:
    return report.leaving and not report.running
