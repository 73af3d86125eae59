"""Reports of a node while a version arrives: everything once, and a standstill again."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from common.weights.receive import weight_client
from common.weights.receive.receiver import StagingStatus
from common.weights.receive.weight_client import AGAIN_S, StagingReports
from common.weights.transports.relay import Stall
from common.weights.wire.messages import Stalled, StoreEntries

HERE, THERE = Stall("tcp://a:7", 3, ""), Stall("tcp://b:7", 3, "refused")


class Said:
    """Reports, at times of the test's choice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.messages = 0.0, list[Any]()
        self.reports = StagingReports("n", self.send)
        monkeypatch.setattr(weight_client, "time", SimpleNamespace(monotonic=lambda: self.now))

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    def at(self, now: float, **status: Any) -> list[Any]:
        """Reports about a status at this time."""
        self.now, self.messages = now, []
        asyncio.run(self.reports.tell(StagingStatus("receiving", epoch=5, **status)))
        return self.messages


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    return Said(monkeypatch)


def test_entries_of_the_groups_store_are_told_once(said: Said) -> None:
    assert said.at(0.0) == []
    assert said.at(0.1, entries={"a": b"1"}) == [StoreEntries(5, {"a": b"1"})]
    assert said.at(9.0, entries={"a": b"1", "b": b"2", "c": b"3"}) == [StoreEntries(5, {"b": b"2", "c": b"3"})]
    assert said.at(99.0, entries={"a": b"1", "b": b"2", "c": b"3"}) == []


def test_a_standstill_is_told_at_once_and_again_every_second_and_when_it_is_another_one(said: Said) -> None:
    silence = Stalled("n", 5, 0, "tcp://a:7", 3)
    assert said.at(0.0, stalls={0: HERE}) == [silence]
    assert said.at(AGAIN_S - 0.1, stalls={0: HERE}) == []
    assert said.at(AGAIN_S, stalls={0: HERE}) == [silence]
    assert said.at(AGAIN_S + 0.1, stalls={0: THERE}) == [Stalled("n", 5, 0, "tcp://b:7", 3, "refused")]
    assert said.at(AGAIN_S + 0.2, stalls={}) == []


def test_every_part_has_reports_of_its_own_and_a_long_reason_is_cut(said: Said) -> None:
    said.at(0.0, stalls={1: HERE})
    [report] = said.at(0.1, stalls={0: Stall("tcp://a:7", 0, "x" * 5000), 1: HERE})
    assert (report.part, report.reason) == (0, "x" * 1000)
