"""Which way a version takes to which node."""

import pytest

from learner.publish.receiver_state import Receiver
from learner.publish.routes import RETURN_AFTER, Route, Split, split
from tests.unit.learner.receivers import attempt_at, newcomer, settled, snapshot_of

SENDING = attempt_at(snapshot_of(5), "a", "b")


def names(receivers: list[Receiver]) -> str:
    return " ".join(r.node_id for r in receivers)


def ways(ready: list[Receiver], *others: Receiver, transport: str = "gloo", published: int = 1) -> Split:
    return split(ready, [*ready, *others], transport, published, 4)


def test_a_fleet_in_which_nobody_has_anything_begins_together() -> None:
    found = ways([newcomer("a"), newcomer("b")])
    assert (names(found.together), names(found.relayed)) == ("a b", "")


@pytest.mark.parametrize("other", [settled("x", 3), newcomer("x", attempt=SENDING)])
def test_newcomers_go_by_relay_once_others_have_weights_or_receive_them(other: Receiver) -> None:
    found = ways([newcomer("new"), newcomer("back", version=2)], other)
    assert (names(found.together), names(found.relayed)) == ("", "new back")


def test_members_stay_together_and_those_without_the_transport_get_the_relay() -> None:
    ready = [settled("a"), settled("b"), settled("far", transports=("relay",)), settled("old", transports=("nccl",))]
    assert names(ways(ready).together) == "a b"
    assert names(ways(ready).relayed) == "far old"
    assert names(ways(ready, transport="relay").together) == ""


def test_relayed_nodes_come_back_one_at_a_time_on_probation_and_not_after_a_failure() -> None:
    relayed = Route().to_relay(published=10)
    ready = [settled("a"), settled("b", route=relayed), settled("c", route=relayed)]
    early = ways(ready, published=10 + RETURN_AFTER - 1)
    assert (names(early.together), names(early.relayed)) == ("a", "b c")
    due = ways(ready, published=10 + RETURN_AFTER)
    assert (names(due.together), names(due.relayed), due.probation) == ("a b", "c", ready[1])
    tried = settled("b", route=relayed.failed(4))
    assert names(ways([settled("a"), tried], published=10 + RETURN_AFTER).together) == "a"
