"""The rounds of a learner of several machines, on a clock that the tests set."""

import random
import re
from typing import Any

import msgspec
import pytest

from broker.contract import MachineReport, RendezvousOrder
from broker.delivery.learner_machines import FENCE_S, LOST_S, MACHINES_EVENT, LearnerMachines
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.logs import FRESH_S
from tests.rigs.brokers import learner_report, new_state, run_info

FACTS = {"torch": "2.13.0", "network interface": "eth0"}


class Launcher:
    """A machine as launch/up/learner_machine.py behaves, with ranks that live until they are ended."""

    def __init__(self, host: str, wanted: int = 2, facts: dict[str, str] | None = None, max_restarts: int = 99) -> None:
        self.report = MachineReport(host, host, "a", "a:1", facts or FACTS, wanted=wanted, max_restarts=max_restarts)
        self.told = RendezvousOrder()
        self.cut, self.answered = False, 0.0

    def change(self, **fields: Any) -> None:
        self.report = msgspec.structs.replace(self.report, **fields)

    def tick(
        self, machines: LearnerMachines, now: float, learner: str = "training", stopping: bool = False
    ) -> RendezvousOrder:
        """A second of its life."""
        if self.cut:
            if self.report.running and now - self.answered > FENCE_S:
                self.change(running=False, exit_code=1)
            return self.told
        self.told, self.answered = machines.gather(self.report, learner, now, stopping), now
        if self.report.running and self.told.round != self.report.round:
            self.change(running=False, exit_code=1)
        elif self.told.round > self.report.round:
            self.change(running=True, round=self.told.round, members=self.told.members, exit_code=0)
        return self.told


def ticks(machines: LearnerMachines, launchers: list[Launcher], now: float, learner: str = "training") -> None:
    for launcher in launchers:
        launcher.tick(machines, now, learner)


def running(launchers: list[Launcher]) -> list[str]:
    return [launcher.report.host for launcher in launchers if launcher.report.running]


def started(*hosts: str, learner: str = "training", **options: Any) -> tuple[LearnerMachines, list[Launcher]]:
    """Machines that report a few times: the first ones run, any further one is spare."""
    machines, launchers = LearnerMachines(), [Launcher(host, **options) for host in hosts]
    for now in (0.0, 0.5, 1.0):
        ticks(machines, launchers, now, learner)
    return machines, launchers


def test_the_first_machines_form_a_round_and_a_further_one_is_spare() -> None:
    machines, launchers = started("h1", "h2", "h3")
    assert running(launchers) == ["h1", "h2"]
    assert launchers[2].told == RendezvousOrder(active=True, machines=3)
    states = [(m.host, m.state, m.index) for m in machines.status(1.0)]
    assert states == [("h1", "running", 0), ("h2", "running", 1), ("h3", "waiting", -1)]


def test_launchers_are_asked_for_the_log_of_a_rank_until_one_has_sent_it_or_nobody_asks_any_more() -> None:
    now = [0.0]
    state = new_state(clock=lambda: now[0])
    one, two = (Launcher(host).report for host in ("h1", "h2"))
    assert LearnerRules(state).gather(one).log_rank == -1
    assert state.log("learner-3") is None
    assert [LearnerRules(state).gather(one).log_rank, LearnerRules(state).gather(two, None, 3).log_rank] == [3, 3], (
        "it is not theirs yet"
    )
    assert LearnerRules(state).gather(two, "the end", 3).log_rank == -1
    assert [state.log("learner-3"), state.log("learner-9"), state.log("learner-4")] == ["the end", None, None]
    now[0] += FRESH_S / 2
    state.log("learner-4")
    now[0] += FRESH_S / 2
    assert LearnerRules(state).gather(one).log_rank == 4, "the question for rank 9 is out of date"


def test_too_few_machines_wait() -> None:
    _, launchers = started("h1")
    assert launchers[0].told == RendezvousOrder(machines=1)


def test_failed_ranks_end_the_round_everywhere_and_the_next_one_waits_for_that() -> None:
    machines, (one, two, spare) = started("h1", "h2", "h3")
    one.change(running=False, exit_code=1)
    reason = one.tick(machines, 2.0).reason
    assert re.findall(r"h?\d", reason) == ["1", "h1", "1", "h2"]  # round 1: h1 ended with exit code 1, h2 may still run
    assert spare.tick(machines, 2.0).round == 0
    two.tick(machines, 2.0)
    assert running([one, two, spare]) == []
    ticks(machines, [one, two, spare], 3.0)
    assert machines.round is not None
    assert (machines.round.number, machines.restarts) == (2, 1)


def test_a_silent_machine_is_replaced_when_its_launcher_must_have_killed_its_ranks() -> None:
    machines, (one, two, spare) = started("h1", "h2", "h3")
    one.cut = True
    for second in range(2, 80):
        was_running = running([one])
        ticks(machines, [one, two, spare], float(second))
        if was_running:
            assert spare.report.round == 0, "while ranks of the first round run, no second one begins"
    assert running([one, two, spare]) == ["h2", "h3"]
    one.cut = False
    assert one.tick(machines, 80.0).active, "it comes back as a spare one"


@pytest.mark.parametrize("code", [2, 3])
def test_an_exit_for_good_ends_every_launcher_with_its_code_and_a_new_start_begins_anew(code: int) -> None:
    machines, (one, two, spare) = started("h1", "h2", "h3")
    one.change(running=False, exit_code=code, reason="why")
    for launcher in (one, two, spare):
        told = launcher.tick(machines, 2.0)
        assert (told.exit_code, told.reason) == (code, "h1: why")
        launcher.change(running=False, leaving=True)
        launcher.tick(machines, 2.5)
    again = [Launcher("h1b"), Launcher("h2b")]
    for now in (3.0, 4.0):
        ticks(machines, again, now)
    assert running(again) == ["h1b", "h2b"]


def test_after_max_restarts_the_job_fails_and_waiting_uses_none_up() -> None:
    machines, (one, two) = started("h1", "h2", max_restarts=1)
    one.change(running=False, exit_code=1)
    for second in range(2, 100):  # nothing runs meanwhile
        ticks(machines, [one], float(second))
    for now in (101.0, 102.0, 103.0):
        ticks(machines, [one, two], now)
    assert machines.restarts == 1
    assert running([one, two]) == ["h1", "h2"]
    two.change(running=False, exit_code=1)
    assert two.tick(machines, 104.0).exit_code == 1
    assert "run.max_restarts (1)" in one.tick(machines, 104.0).reason


@pytest.mark.parametrize("state", ["done", "drained"])
def test_a_job_that_ended_ends_every_launcher_with_0(state: str) -> None:
    machines, (one, two, spare) = started("h1", "h2", "h3")
    one.change(running=False)
    assert one.tick(machines, 2.0, state).exit_code is None, "the other ranks still leave"
    two.change(running=False, exit_code=143)
    assert [launcher.tick(machines, 3.0, state).exit_code for launcher in (two, one, spare)] == [0, 0, 0]


@pytest.mark.parametrize("state", ["done", "drained"])
def test_launchers_of_a_warm_start_say_how_it_ended(state: str) -> None:
    machines, launchers = started("h1", "h2", "h3", learner="")
    for launcher, own in zip(launchers, (state, "", ""), strict=True):
        launcher.change(running=False, exit_code=0, state=own)
        launcher.tick(machines, 2.0, "")
    assert [launcher.tick(machines, 3.0, "").exit_code for launcher in launchers] == [0, 0, 0]


def test_a_stop_drains_a_warm_start() -> None:
    machines, (one, two) = started("h1", "h2", learner="")
    assert not one.tick(machines, 2.0, "").drain
    assert [launcher.tick(machines, 2.0, "", stopping=True).drain for launcher in (one, two)] == [True, True]
    for launcher, state in ((one, "drained"), (two, "")):
        launcher.change(running=False, exit_code=0, state=state)
        launcher.tick(machines, 3.0, "", stopping=True)
    assert [launcher.tick(machines, 4.0, "", stopping=True).exit_code for launcher in (one, two)] == [0, 0]


def test_a_machine_that_leaves_drains_the_round_and_uses_up_no_restart() -> None:
    machines, (one, two, spare) = started("h1", "h2", "h3")
    two.change(leaving=True)
    two.tick(machines, 2.0)
    assert one.tick(machines, 2.0).drain
    for launcher in (one, two):
        launcher.change(running=False)
        launcher.tick(machines, 3.0, "drained")
    ticks(machines, [one, spare], 4.0, "drained")
    ticks(machines, [one, spare], 5.0)
    assert running([one, spare]) == ["h1", "h3"]
    assert machines.restarts == 0


def test_a_machine_with_other_facts_is_refused_with_both_named() -> None:
    machines = LearnerMachines()
    one, two = Launcher("h1"), Launcher("h2", facts=FACTS | {"torch": "2.12.0"})
    ticks(machines, [one, two], 0.0)
    assert two.told.exit_code == 2
    assert re.findall(r"torch|h\d|[\d.]{6}", two.told.reason) == ["torch", "h2", "2.12.0", "h1", "2.13.0"]
    assert one.told.exit_code is None


def test_a_broker_that_restarts_learns_of_the_running_round() -> None:
    _, launchers = started("h1", "h2", "h3")
    later = LearnerMachines(hold_until=100.0)
    for now in (50.0, 51.0):
        ticks(later, launchers, now)
    assert running(launchers) == ["h1", "h2"]
    assert later.round is not None
    assert later.round.number == 1


def test_a_restarted_broker_forms_no_round_while_an_unknown_one_may_run() -> None:
    machines, launchers = LearnerMachines(hold_until=1000.0 + LOST_S), [Launcher("h1"), Launcher("h2")]
    ticks(machines, launchers, 1001.0)
    assert launchers[1].told.reason == "ranks of before the broker's restart may still run"
    ticks(machines, launchers, 1001.0 + LOST_S)
    ticks(machines, launchers, 1002.0 + LOST_S)
    assert running(launchers) == ["h1", "h2"]


@pytest.mark.parametrize(
    ("last", "formed", "held"),
    [
        ("", False, False),
        ("", True, True),  # no lead rank had reported yet
        ("training", False, True),
        ("failed", True, True),
        ("failed", False, False),
        ("drained", True, False),
        ("done", True, False),
    ],
)
def test_a_broker_that_starts_waits_where_ranks_of_before_may_run(last: str, formed: bool, held: bool) -> None:
    state = new_state(run_info(), lambda: 1000.0)
    if formed:
        state.event_log.add(MACHINES_EVENT)
    if last:
        LearnerRules(state).report(learner_report(last))
    state.resume()
    assert state.machines.hold_until == (1000.0 + LOST_S if held else 0.0)


@pytest.mark.parametrize("seed", range(60))
def test_no_two_rounds_ever_run_at_once(seed: int) -> None:
    """Whatever is cut, killed, restarted and connected again: ranks that run are all of one round."""
    draw = random.Random(seed)
    machines, launchers, born = LearnerMachines(), [Launcher(f"h{i}") for i in range(4)], 4
    formed: set[int] = set()
    for second in range(600):
        for index, launcher in enumerate(launchers):
            if draw.random() < 0.01:
                launcher.cut = not launcher.cut
            if draw.random() < 0.004 and launcher.report.running:  # its ranks fail
                launcher.change(running=False, exit_code=1)
            if draw.random() < 0.003:  # the machine dies, another one comes
                launchers[index], born = Launcher(f"h{born}"), born + 1
        if draw.random() < 0.005:
            machines = LearnerMachines(hold_until=second + LOST_S)
        draw.shuffle(launchers)
        ticks(machines, launchers, float(second))
        rounds = {launcher.report.round for launcher in launchers if launcher.report.running}
        assert len(rounds) <= 1, f"rounds {rounds} at second {second}"
        formed |= rounds
    assert len(formed) > 1


def test_a_stop_ends_launchers_that_wait_and_those_whose_ranks_have_drained() -> None:
    machines, (one, two, spare) = started("h1", "h2", "h3")
    assert spare.tick(machines, 2.0, stopping=True).exit_code is None, "the ranks drain first"
    for launcher in (one, two):
        launcher.change(running=False)
        launcher.tick(machines, 3.0, "drained", stopping=True)
    told = [launcher.tick(machines, 4.0, "drained", stopping=True) for launcher in (one, two, spare)]
    assert [answer.exit_code for answer in told] == [0, 0, 0]
    late = Launcher("h4")
    assert late.tick(machines, 5.0, stopping=True).exit_code == 0


def test_a_member_that_never_started_its_ranks_holds_up_no_later_round() -> None:
    machines, (one, two) = LearnerMachines(), (Launcher("h1"), Launcher("h2"))
    ticks(machines, [one, two], 0.0)
    two.change(running=False, exit_code=1)
    two.tick(machines, 0.5)  # before h1 has heard of the round
    for now in (1.0, 2.0, 3.0):
        ticks(machines, [one, two], now)
    assert running([one, two]) == ["h1", "h2"]


def test_a_machine_that_left_first_lets_the_others_drain_as_long_as_it_takes() -> None:
    machines, (one, two, spare) = started("h1", "h2", "h3")
    two.change(leaving=True)
    two.tick(machines, 2.0)
    two.change(running=False)
    two.tick(machines, 3.0)
    for second in range(3, 200):
        ticks(machines, [one, spare], float(second))
    assert running([one, spare]) == ["h1"]
    one.change(running=False)
    for now in (200.0, 201.0, 202.0):
        ticks(machines, [one, spare], now, "drained")
    assert (running([one, spare]), machines.restarts) == (["h1", "h3"], 0)


def test_a_member_that_leaves_before_its_ranks_start_ends_the_round_at_once() -> None:
    machines, (one, two, spare) = LearnerMachines(), (Launcher("h1"), Launcher("h2"), Launcher("h3"))
    one.tick(machines, 0.0)
    machines.gather(two.report, "", 0.0)  # the answer is lost
    two.change(leaving=True)
    machines.gather(two.report, "", 0.5)
    for now in (1.0, 2.0, 3.0):
        ticks(machines, [one, spare], now)
    assert (running([one, spare]), machines.restarts) == (["h1", "h3"], 0)


def test_a_machine_that_was_killed_does_not_refuse_those_that_come_with_other_facts() -> None:
    machines, again = LearnerMachines(), [Launcher("h1"), Launcher("h2")]
    Launcher("h0", facts=FACTS | {"NCCL_IB_HCA": "mlx5_9"}).tick(machines, 0.0)
    for now in (10.0, 11.0):
        ticks(machines, again, now)
    assert running(again) == ["h1", "h2"]
