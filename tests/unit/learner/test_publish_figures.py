"""The figures of the weight plane, and which nodes still wait for a version."""

from types import SimpleNamespace
from typing import cast

import pytest

from common.weights.messages import Canary
from learner.publish.figures import Figures, Undelivered, undelivered
from learner.publish.receiver_state import Receiver, State
from learner.publish.snapshot import Snapshot
from tests.unit.learner.receivers import attempt_at, newcomer, settled, snapshot_of

EXCLUDED = settled("bad", 3, state=State.EXCLUDED, reason="the proof failed")


def test_receiving_flipping_and_queued_nodes_are_told_apart_the_longest_waiting_first() -> None:
    current = cast(Snapshot, SimpleNamespace(version=6, started=12.0))
    sending = attempt_at(snapshot_of(5), "a", "b")
    receivers = [
        settled("c", 4),
        settled("b", 4, state=State.FLIPPING, attempt=sending),
        settled("a", 4, state=State.STAGING, attempt=sending),
        settled("new", 6),
        EXCLUDED,
    ]
    assert undelivered(receivers, current) == (
        Undelivered("b", 5, "flipping", 0.0),
        Undelivered("a", 5, "receiving", 0.0),
        Undelivered("c", 6, "queued", 12.0),
    )
    assert undelivered([newcomer("a")], None) == ()


@pytest.mark.parametrize(
    ("receivers", "owed"),
    [
        ([], False),
        ([settled("old", 2)], False),
        ([settled("compared", 4, canary_version=3)], False),
        ([settled("compared", 3, canary_version=3), settled("late", 4)], True),
    ],
)
def test_a_node_that_runs_a_canarys_version_or_a_later_one_without_comparing_it_is_owed_one(
    receivers: list[Receiver], owed: bool
) -> None:
    figures, offered = Figures(), snapshot_of(3)
    offered.canary = Canary([1, 2], [-0.5], tolerance=0.1)
    figures.offered(offered)
    figures.offered(snapshot_of(4))
    figures.describe(receivers, None)
    assert (figures.now.canary_owed, figures.now.published) == (owed, 2)


def test_the_versions_of_the_live_nodes_count_and_excluded_ones_tell_why_none_generates() -> None:
    figures = Figures()
    figures.describe([settled("a", 5), settled("b", 4), EXCLUDED], None)
    stats = figures.now
    assert (stats.nodes, stats.version_active, stats.version_sent, stats.fatal) == (2, 4, 4, None)
    for last in ([EXCLUDED], []):  # the reason stays when the excluded node has left
        figures.describe(last, None)
        assert (figures.now.fatal, figures.now.version_active, figures.now.version_sent) == ("the proof failed", -1, 4)
    figures.describe([newcomer("c")], None)
    assert figures.now.fatal is None
