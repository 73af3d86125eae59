"""Other sources of a version: when it is whole, what they are asked for, and messages that are lost or not theirs."""

import weakref
from contextlib import closing
from typing import Any

import pytest
import torch
import zmq

from common.config.schema import WeightsConfig
from common.weights.source import sources
from common.weights.source.snapshot import Snapshot, SnapshotMaker
from common.weights.source.sources import LeadEndpoint, OtherSources, RemoteSource
from common.weights.wire import flat_buffer, messages
from common.weights.wire.messages import Keep, Part, PartReady, PartSealed, SealPart
from tests.rigs.waiting import LIMIT_S, until

SHAPES = [[("a", (40,))], [("b", (70,))], [("c", (9,))]]


class Lead:
    """The lead's side, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.sources = OtherSources(3, lambda to, message: self.sent.append((to, message)))
        self.sources.count = 2
        self.maker = SnapshotMaker("float32")
        self.maker.share(SHAPES, 0)

    def add(self, version: int) -> Snapshot:
        made = self.maker.make(version, [("a", torch.ones(40))], None)
        made.add_checksums(64)
        self.sources.add(made)
        return made

    def offer(self, number: int, version: int, incarnation: int = 3, connection: bytes = b"") -> None:
        size = {1: 320, 2: 64}[number]
        message = PartReady(number, incarnation, version, "0" * 32, {-1: size})
        self.sources.hear(connection or b"s%d" % number, message, None)

    def seals(self) -> list[bytes]:
        sent, self.sent = self.sent, []
        return sorted(to for to, message in sent if isinstance(message, SealPart))


@pytest.fixture
def lead() -> Lead:
    return Lead()


def part(size: int) -> Part:
    return Part("p", "tcp://127.0.0.1:7", 0, size, 64, b"")


def test_a_version_is_whole_with_all_parts_and_supersedes_older_ones_whose_offerings_were_lost(lead: Lead) -> None:
    lead.offer(2, 1)
    first, second, third = (lead.add(version) for version in (1, 2, 3))
    assert lead.sources.whole() == [], "part 1 of version 1 never comes"
    lead.offer(1, 2)
    lead.offer(2, 2)
    assert lead.sources.whole() == [first, second]
    assert (first.whole, second.whole) == (False, True)
    assert second.full.size == 192 + 320 + 64 == second.layout.total_bytes
    own = flat_buffer.all_checksums(second.flat, 64)[1]
    assert second.checksum == flat_buffer.combined([own, "0" * 32, "0" * 32])
    lead.offer(2, 3, incarnation=2)
    lead.offer(1, 3)
    assert lead.sources.whole() == [], "a source of an earlier learner does not count"
    lead.offer(2, 3)
    assert lead.sources.whole() == [third]


def test_a_version_that_is_to_be_evaluated_is_not_superseded_before_it_is_whole(lead: Lead) -> None:
    first, second = lead.add(1), lead.add(2)
    lead.offer(1, 2)
    lead.offer(2, 2)
    assert lead.sources.whole({1}) == []
    lead.offer(1, 1)
    lead.offer(2, 1)
    assert lead.sources.whole({1}) == [first, second]
    assert first.whole and second.whole


def test_a_version_that_waits_for_parts_for_long_is_told_once(
    lead: Lead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "PATIENCE_S", -1.0)
    lead.add(1)
    lead.offer(2, 1)
    assert lead.sources.whole() == lead.sources.whole() == []
    assert [record.args for record in caplog.records] == [(1, [1])], "version, and the sources that lack"
    caplog.clear()
    lead.offer(1, 1)
    assert lead.sources.whole() and not caplog.records


def test_a_part_is_asked_for_until_it_comes_also_over_a_new_connection(
    lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lead.add(1)
    lead.offer(1, 1)
    lead.offer(2, 1)
    assert lead.sources.whole() == [made]
    lead.sources.seal(1, made.full, 64)
    made.full.sealing = True
    assert lead.seals() == [b"s1", b"s2"]
    lead.sources.seal(1, made.full, 64)
    assert lead.seals() == [], "a moment ago"
    monkeypatch.setattr(sources, "SEAL_S", 0.0)
    lead.sources.hear(b"s1", PartSealed(1, 3, 1, -1, part(320)), made)
    lead.offer(2, 1, connection=b"again")
    lead.sources.seal(1, made.full, 64)
    assert lead.seals() == [b"again"]
    made.full.add_parts(0, [part(192)])
    assert made.full.parts == []
    lead.sources.hear(b"again", PartSealed(2, 3, 1, -1, part(64)), made)
    assert [p.start for p in made.full.parts] == [0, 192, 512]


@pytest.mark.parametrize("stranger", [(b"other", 3, 1), (b"s1", 2, 1), (b"s7", 3, 7)])
def test_only_a_source_that_is_known_can_end_the_plane(lead: Lead, stranger: tuple[bytes, int, int]) -> None:
    lead.offer(1, 1)
    connection, incarnation, number = stranger
    lead.sources.hear(connection, PartSealed(number, incarnation, -1, -1, None, "no memory"), None)
    with pytest.raises(RuntimeError) as failed:
        lead.sources.hear(b"s1", PartSealed(1, 3, -1, -1, None, "no memory"), None)
    assert "source 1" in str(failed.value) and "no memory" in str(failed.value)


def test_sources_hear_which_versions_are_needed_with_every_offering(lead: Lead) -> None:
    lead.offer(1, 1)
    assert lead.sent == [], "none is needed yet; they keep what they have"
    lead.sources.keep({4, 2})
    lead.offer(1, 5)
    lead.offer(1, 1)
    assert lead.sent == 3 * [(b"s1", Keep([2, 4]))]


def test_a_source_serves_nothing_more_of_a_version_before_its_buffer_may_be_written_again() -> None:
    """Otherwise a piece could be sealed from the next version, under the key and the nonce of this one."""
    events: list[str] = []
    parts = [[("a", (4,))], [("b", (1 << 16,))]]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as control:
        control.setsockopt(zmq.LINGER, 0)
        control.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1000))
        control.bind("tcp://127.0.0.1:*")
        address = control.getsockopt_string(zmq.LAST_ENDPOINT)
        with closing(
            RemoteSource(1, parts, LeadEndpoint(address, 0, ""), dtype="float32", weights=WeightsConfig())
        ) as source:
            withdraw = source._server.withdraw

            def withdrawing(*shipments: Any) -> None:
                withdraw(*shipments)
                events.append("withdrawn")

            source._server.withdraw = withdrawing
            source.publish(1, [("b", torch.ones(1 << 16))])
            until(lambda: 1 in source._snapshots)
            weakref.finalize(source._snapshots[1], events.append, "free")
            control.send_multipart([identity := control.recv_multipart()[0], messages.encode(SealPart(1, -1, 1 << 14))])
            until(lambda: source._served)
            source.publish(2, [("b", torch.ones(1 << 16))])
            until(lambda: 2 in source._snapshots)
            control.send_multipart([identity, messages.encode(Keep([2]))])
            until(lambda: len(events) == 2)
    assert events == ["withdrawn", "free"]
