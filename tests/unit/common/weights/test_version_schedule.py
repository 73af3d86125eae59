"""Which version is meant for the nodes while newer ones have to wait."""

from common.weights.source.snapshot import VersionSchedule
from tests.unit.common.weights.node_views import snapshot_of


def current(targets: VersionSchedule) -> int | None:
    return targets.current.version if targets.current is not None else None


def add(targets: VersionSchedule, *versions: int) -> None:
    for version in versions:
        targets.add(snapshot_of(version))


def test_without_a_hold_the_newest_version_goes_out() -> None:
    targets = VersionSchedule()
    assert (current(targets), set(targets.snapshots), tuple(targets.holds)) == (None, set(), ())
    add(targets, 1, 2)
    assert (current(targets), set(targets.snapshots)) == (2, {2})


def test_a_hold_keeps_newer_versions_back_and_the_newest_of_them_goes_out_at_its_end() -> None:
    targets = VersionSchedule()
    add(targets, 1)
    targets.hold("watch", 2)
    add(targets, 2, 3, 4)
    assert (current(targets), set(targets.snapshots), tuple(targets.holds)) == (2, {2, 4}, ("watch",))
    targets.release("another")
    assert current(targets) == 2
    targets.release("watch")
    assert (current(targets), set(targets.snapshots), tuple(targets.holds)) == (4, {4}, ())


def test_several_holds_last_until_the_last_one_ends() -> None:
    targets = VersionSchedule()
    add(targets, 5)
    targets.hold("watch", 5)
    targets.hold("evaluation", 6)
    add(targets, 6)
    assert current(targets) == 5
    targets.release("watch")
    assert (current(targets), tuple(targets.holds)) == (6, ("evaluation",))
    add(targets, 7)
    targets.hold("evaluation", 7)
    assert current(targets) == 6, "the hold that was there counts"
    targets.release("evaluation")
    assert current(targets) == 7


def test_before_the_first_version_a_hold_keeps_every_version_back() -> None:
    targets = VersionSchedule()
    targets.hold("watch", -1)
    add(targets, 0)
    assert current(targets) is None
    targets.release("watch")
    assert current(targets) == 0


def test_an_evaluated_version_is_kept_until_its_turn_is_over_whenever_it_comes() -> None:
    targets = VersionSchedule()
    add(targets, 4)
    targets.evaluate((4, 6))
    add(targets, 5, 6, 7)
    assert targets.evaluated is not None and targets.evaluated.version == 4
    assert (current(targets), set(targets.snapshots)) == (7, {4, 6, 7})
    assert targets.snapshots.get(5) is None and targets.snapshots.get(6) is not None
    targets.evaluate((6,))
    assert (targets.evaluated, set(targets.snapshots)) == (targets.snapshots.get(6), {6, 7})
    targets.evaluate((9,))
    assert (targets.evaluated, set(targets.snapshots)) == (None, {7}), "it comes later"
    add(targets, 9)
    assert targets.evaluated is targets.current
    targets.evaluate(())
    assert targets.evaluated is None


def test_the_pool_gets_a_version_that_the_fleet_has_to_wait_for() -> None:
    targets = VersionSchedule()
    add(targets, 1)
    targets.hold("watch", 1)
    targets.evaluate((2,))
    add(targets, 2)
    assert (current(targets), targets.evaluated) == (1, targets.snapshots.get(2))
