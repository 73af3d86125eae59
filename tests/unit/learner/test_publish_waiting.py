"""Who is named as waiting for a version, and how far each of them is."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from learner.publish.undelivered import Undelivered, undelivered


@dataclass
class Member:
    node_id: str
    version: int
    quarantined: str | None = None
    transfer: object | None = None


@dataclass
class Sending:
    version: int
    started: float
    receiving: set[bytes] = field(default_factory=set)
    flipping: set[bytes] = field(default_factory=set)

    @property
    def snapshot(self) -> SimpleNamespace:
        return SimpleNamespace(version=self.version)


def test_receiving_flipping_and_queued_nodes_are_told_apart_the_longest_waiting_first() -> None:
    sending = Sending(5, 10.0, {b"a"}, {b"b"})
    members = {b"a": Member("a", 4, transfer=sending), b"b": Member("b", 4, transfer=sending), b"c": Member("c", 4)}
    current = SimpleNamespace(version=6, started=12.0)
    assert undelivered(members, [sending], current) == (
        Undelivered("a", 5, "receiving", 10.0),
        Undelivered("b", 5, "flipping", 10.0),
        Undelivered("c", 6, "queued", 12.0),
    )


def test_nodes_that_hold_the_version_left_or_may_not_generate_are_waited_for_by_nobody() -> None:
    sending = Sending(5, 10.0, {b"gone"})
    members = {b"a": Member("a", 5), b"b": Member("b", 3, quarantined="its checksum is another one")}
    assert undelivered(members, [sending], SimpleNamespace(version=5, started=12.0)) == ()
    assert undelivered({b"a": Member("a", -1)}, [], None) == ()
