"""How far a group is, as a heartbeat tells it."""

from rollout_fleet.episode.driver import Progress
from rollout_fleet.episode.group_progress import REPORTED, GroupProgress, oldest_groups
from tests.unit.rollout_fleet.fleet_fakes import addition_task


def working(serial: int, leased_at: float, *episodes: Progress) -> GroupProgress:
    return GroupProgress(addition_task(serial, 3), leased_at, episodes=list(episodes))


def test_the_episode_that_waits_for_longest_is_told_about() -> None:
    one = working(
        7, 100.0, Progress(9, 1, "done", 104.0), Progress(20, 2, "engine", 105.0), Progress(30, 3, "environment", 101.0)
    )
    found = one.report(110.0)
    assert (found.serial, found.samples, found.finished, found.age_s, found.tokens) == (7, 3, 1, 10.0, 59)
    assert (found.turns, found.episode_tokens, found.state, found.state_s) == (3, 30, "environment", 9.0)


def test_a_group_whose_episodes_wait_for_slots_says_so() -> None:
    found = working(7, 100.0, *(Progress(since=100.0) for _ in range(3))).report(110.0)
    assert (found.state, found.state_s, found.finished, found.turns) == ("queued", 10.0, 0, 0)
    assert working(7, 100.0).report(110.0).state == "queued"


def test_the_oldest_groups_are_told_about() -> None:
    many = [working(i, 200.0 - i) for i in range(20)]
    assert [w.serial for w in oldest_groups(many, 300.0)] == [19 - i for i in range(REPORTED)]
