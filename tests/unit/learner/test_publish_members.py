"""Which way a version takes to whom, and what failures change about it."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from learner.publish.receivers import MAX_ATTEMPTS, RETURN_AFTER, Member, after_failure, split


def member(name: str, version: int = 3, settled: bool = True, **changes: Any) -> Member:
    made = Member(name.encode(), name, 0.0, ("gloo", "relay"), version, settled=settled)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def names(members: list[Member]) -> str:
    return " ".join(m.node_id for m in members)


def test_a_fleet_in_which_nobody_has_anything_begins_together() -> None:
    fresh = [member("a", -1, False), member("b", -1, False)]
    ways = split(fresh, fresh, "gloo", 1)
    assert (names(ways.together), names(ways.relayed)) == ("a b", "")


@pytest.mark.parametrize("other", [member("x", 3), member("x", -1, False, transfer=cast(Any, object()))])
def test_newcomers_go_by_relay_once_others_have_weights_or_receive_them(other: Member) -> None:
    new, back = member("new", -1, False), member("back", 2, False)
    ways = split([new, back], [new, back, other], "gloo", 1)
    assert (names(ways.together), names(ways.relayed)) == ("", "new back")


def test_members_stay_together_and_those_without_the_transport_get_the_relay() -> None:
    idle = [member("a"), member("b"), member("far", transports=("relay",)), member("old", transports=("nccl",))]
    assert names(split(idle, idle, "gloo", 1).together) == "a b"
    assert names(split(idle, idle, "gloo", 1).relayed) == "far old"
    assert names(split(idle, idle, "relay", 1).together) == ""


@dataclass
class Failed:
    relayed: bool = False
    probation: bytes | None = None

    @property
    def snapshot(self) -> Any:
        return type("Snapshot", (), {"version": 4})


def fails(who: Member, how: Failed, published: int = 10) -> str:
    return after_failure(who, cast(Any, how), published)


def test_a_node_with_which_collectives_keep_failing_gets_the_relay_and_only_then_is_ejected() -> None:
    node = member("a")
    assert [fails(node, Failed()) for _ in range(MAX_ATTEMPTS)] == ["", "", ""]
    assert node.relayed and node.attempts == 0
    ends = [fails(node, Failed(relayed=True)) for _ in range(MAX_ATTEMPTS)]
    assert ends == ["", "", "version 4 failed 3 times"]


def test_a_node_without_the_relay_is_ejected_as_before() -> None:
    node = member("old", transports=("gloo",))
    assert [fails(node, Failed()) for _ in range(MAX_ATTEMPTS)][-1] == "version 4 failed 3 times"


def test_relayed_nodes_come_back_one_at_a_time_on_probation_and_wait_longer_each_time() -> None:
    a, b, c = member("a"), member("b"), member("c")
    for node in (b, c):
        node.to_relay(published=10)
    early = split([a, b, c], [a, b, c], "gloo", 10 + RETURN_AFTER - 1)
    assert (names(early.together), names(early.relayed)) == ("a", "b c")
    due = split([a, b, c], [a, b, c], "gloo", 10 + RETURN_AFTER)
    assert (names(due.together), names(due.relayed)) == ("a b", "c") and due.probation is b
    on_trial = Failed(probation=b.identity)
    for node in (a, b):
        assert fails(node, on_trial, published=14) == ""
    assert a.attempts == 0, "whoever did well without it is not blamed"
    assert (b.relayed, b.returns_at) == (True, 14 + 2 * RETURN_AFTER)


def test_attempts_are_counted_for_each_version_anew() -> None:
    node = member("a")
    node.begins(4)
    fails(node, Failed())
    node.begins(4)
    assert node.attempts == 1
    node.begins(5)
    assert node.attempts == 0
    assert node.needs(5) and not node.needs(3)
    node.quarantined = "proof"
    assert not node.needs(5)
