"""The learner's machines at exact moments: fresh, silent, delayed by a restart; and which of them may join a round."""

from typing import Any

import pytest

from broker.contract import MachineReport, Member, RendezvousOrder
from broker.delivery.learner_machines import FRESH_S, LOST_S, LearnerMachines

LATER = 1 / 1024  # exact in a float


def report(host: str, **fields: Any) -> MachineReport:
    fields = {"facts": {}, "wanted": 2, "max_restarts": 5} | fields
    return MachineReport(host, host, "a", f"{host}:1", fields.pop("facts"), **fields)


def members(told: RendezvousOrder) -> list[str]:
    return [member.host for member in told.members]


@pytest.mark.parametrize(("age", "round"), [(FRESH_S, 1), (FRESH_S + LATER, 0)])
def test_a_machine_joins_a_round_as_long_as_its_report_is_fresh(age: float, round: int) -> None:
    machines = LearnerMachines()
    machines.gather(report("a"), "", 8.0)
    told = machines.gather(report("b"), "", 8.0 + age)
    assert (told.round, members(told), told.machines) == (round, ["a", "b"] * round, 1 + round)


@pytest.mark.parametrize(("age", "known"), [(LOST_S, ["a", "b"]), (LOST_S + LATER, ["b"])])
def test_a_machine_is_forgotten_after_a_longer_silence_than_its_ranks_can_live(age: float, known: list[str]) -> None:
    machines = LearnerMachines()
    machines.gather(report("a"), "", 8.0)
    machines.gather(report("b"), "", 8.0 + age)
    assert [status.host for status in machines.status(8.0 + age)] == known


@pytest.mark.parametrize(("age", "over"), [(LOST_S, False), (LOST_S + LATER, True)])
def test_a_round_ends_after_the_same_silence_counted_from_its_beginning(age: float, over: bool) -> None:
    machines = LearnerMachines()
    ranks = [Member(host, host, "a", "e") for host in ("a", "b")]
    running = report("b", running=True, round=4, members=ranks)
    assert machines.gather(running, "", 8.0).active, "a broker that restarted hears of it from its members"
    told = machines.gather(running, "", 8.0 + age)
    assert (not told.active, machines.restarts) == (over, int(over))
    assert machines.last_number == 4


def test_no_round_begins_before_the_ranks_of_an_earlier_broker_must_have_ended() -> None:
    machines = LearnerMachines(hold_until=20.0)
    for now in (18.0, 20.0 - LATER):
        told = [machines.gather(report(host), "", now) for host in ("a", "b")]
        assert [one.round for one in told] == [0, 0]
        assert machines.waits(now) != ""
    before = machines.waits(20.0 - LATER)
    machines.gather(report("c"), "", 30.0)
    assert machines.waits(30.0) != before, "it waits for a second machine only"
    assert machines.waits(30.0) == LearnerMachines(30.0, reports=machines.reports, seen_at=machines.seen_at).waits(30.0)
    machines.gather(report("a"), "", 30.0)
    assert (machines.round is not None, machines.waits(30.0)) == (True, "")


def test_a_round_begins_at_the_very_moment_at_which_the_earlier_ranks_must_have_ended() -> None:
    machines = LearnerMachines(hold_until=20.0)
    machines.gather(report("a"), "", 20.0)
    assert machines.round is None
    machines.gather(report("b"), "", 20.0)
    assert machines.round is not None


def test_machines_that_leave_or_already_run_ranks_join_no_round() -> None:
    machines = LearnerMachines()
    assert machines.gather(report("running", running=True, round=3), "", 8.0).round == 0
    machines.gather(report("leaving", leaving=True), "", 8.0)
    assert machines.gather(report("a"), "", 8.0).round == 0
    told = machines.gather(report("b"), "", 8.0)
    assert (told.round, members(told)) == (4, ["a", "b"]), "its number is above every one that was reported"


@pytest.mark.parametrize(("most", "exit_code"), [((0, 1), None), ((1, 0), None), ((0, 0), 1)])
def test_the_most_generous_limit_of_restarts_counts(most: tuple[int, int], exit_code: int | None) -> None:
    machines = LearnerMachines()
    reports = [report(host, max_restarts=limit) for host, limit in zip("ab", most, strict=True)]
    for one in reports:
        told = machines.gather(one, "", 8.0)
    assert told.round == 1
    failed = report("a", max_restarts=most[0], round=1, exit_code=1)
    told = machines.gather(failed, "training", 9.0)
    assert (told.exit_code, told.active) == (exit_code, False)


def test_a_machine_that_left_a_running_round_is_remembered_until_the_round_is_over() -> None:
    machines = LearnerMachines()
    for host in ("a", "b"):
        machines.gather(report(host), "", 8.0)
    machines.gather(report("a", round=1, running=True), "", 9.0)
    machines.gather(report("b", round=1, running=True), "", 9.0)
    machines.gather(report("b", round=1, leaving=True), "training", 10.0)
    assert [status.host for status in machines.status(10.0)] == ["a", "b"]
    machines.gather(report("c", leaving=True), "training", 10.0)
    assert [status.host for status in machines.status(10.0)] == ["a", "b"], "it was in no round"
    machines.gather(report("a", round=1, exit_code=0), "training", 11.0)
    assert machines.round is not None and machines.round.over
    assert machines.restarts == 0, "a machine was told to leave"
    machines.gather(report("a", round=1, exit_code=0), "training", 11.0)
    assert [status.host for status in machines.status(11.0)] == ["a"]
