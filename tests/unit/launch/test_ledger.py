"""The ledger of a run that was stopped and continued with a new broker."""

import json

import pytest

from broker.contract import LedgerEntry
from common.process.run_dir import RunDir, write_json
from launch.observe.ledger import former_ledgers, observe_ledger, whole_ledger


def entry(serial: int, state: str, step: int | None) -> LedgerEntry:
    return LedgerEntry(serial, state, 1, ["n"], step, 0, 0, 0.5)


STOPPED = [entry(0, "committed", 0), entry(1, "taken", 1), entry(2, "taken", 2), entry(3, "ready", None)]


def test_every_step_stands_once_with_the_groups_that_lasted() -> None:
    newest = [entry(0, "committed", 2), entry(1, "pending", None)]
    found = whole_ledger([STOPPED], newest)
    assert [(e.serial, e.state, e.step) for e in found] == [
        (0, "committed", 0),
        (1, "committed", 1),  # the next learner started behind it, so its checkpoint was durable
        (4, "committed", 2),  # step 2 was trained again: the first try is no part of the record
        (5, "pending", None),
    ]


def test_a_learner_that_goes_further_back_repeats_what_lies_between() -> None:
    found = whole_ledger([STOPPED, [entry(0, "taken", 2)]], [entry(0, "committed", 1), entry(1, "committed", 2)])
    assert [(e.serial, e.step) for e in found] == [(0, 0), (5, 1), (6, 2)]


def test_before_anybody_goes_on_former_steps_stand_as_they_were_left() -> None:
    found = whole_ledger([STOPPED], [entry(0, "leased", None)])
    assert [(e.serial, e.state) for e in found] == [(0, "committed"), (1, "taken"), (2, "taken"), (4, "leased")]


def test_one_broker_alone_is_shown_as_it_is() -> None:
    assert whole_ledger([], STOPPED) == STOPPED


@pytest.fixture
def continued(tmp_path) -> RunDir:
    """A run of two brokers, both gone."""
    write_json(tmp_path / "ledger-1.json", STOPPED)
    write_json(tmp_path / "ledger.json", [entry(0, "committed", 2)])
    return RunDir(tmp_path)


def test_the_ledger_command_shows_the_whole_run(continued: RunDir) -> None:
    assert len(former_ledgers(continued)) == 1
    assert [e.step for e in observe_ledger(continued)] == [0, 1, 2]
    assert len({e.serial for e in observe_ledger(continued)}) == 3
    assert json.loads((continued.path / "ledger-1.json").read_text())[3]["state"] == "ready"
