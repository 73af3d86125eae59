"""What the engine's steps say: time lost to preemptions, and the counters of a real vLLM stat logger."""

import pytest

from rollout_fleet.engine.scheduler_stats import StepClock


class Steps:
    """Steps of chosen duration."""

    def __init__(self) -> None:
        self.now, self.half_flips = 0.0, 0
        self.clock = StepClock(lambda: self.now, batch=1000, flips=lambda: self.half_flips)

    def step(self, took_s: float, recomputed: int = 0, running: int = 8) -> float:
        self.now += took_s
        return self.clock.step(running, recomputed)


def test_what_a_step_takes_longer_for_preempted_requests_is_lost() -> None:
    steps = Steps()
    assert [steps.step(0.01) for _ in range(5)] == [0.0] * 5
    assert steps.step(0.05, recomputed=400) == pytest.approx(0.04)
    assert steps.step(0.01) == pytest.approx(0.0)


def test_with_batches_in_flight_the_time_lies_in_the_step_after() -> None:
    steps = Steps()
    for _ in range(5):
        steps.step(0.01)
    assert steps.step(0.01, recomputed=400) + steps.step(0.05) == pytest.approx(0.04)
    assert steps.step(0.02) == 0.0  # an ordinary one again


def test_a_larger_batch_is_no_loss_and_a_pause_is_no_step() -> None:
    steps = Steps()
    for _ in range(5):
        steps.step(0.01)
    for _ in range(200):
        steps.step(0.02)
    assert steps.step(0.06, recomputed=400) == pytest.approx(0.04, rel=0.01)
    steps.step(0.02)
    steps.step(5.0)  # a pause
    assert steps.step(0.06, recomputed=400) == pytest.approx(0.04, rel=0.1)


def test_more_tokens_than_a_step_takes_are_computed_again_in_the_steps_after() -> None:
    steps = Steps()
    for _ in range(5):
        steps.step(0.01)
    lost = steps.step(0.05, recomputed=3500) + sum(steps.step(0.05) for _ in range(3))
    assert lost == pytest.approx(0.16)
    assert steps.step(0.01) == pytest.approx(0.0)  # the one after, in case that batches are in flight
    assert steps.step(0.05) == 0.0  # an ordinary one again


@pytest.mark.parametrize("marks", [(2, 2), (1, 2), (1, 1)])
def test_a_step_with_a_flip_in_it_is_no_loss(marks: tuple[int, int]) -> None:
    """`marks`: half flips when this step is heard of and when the next one is: a flip may lie in either or in both."""
    steps = Steps()
    for _ in range(5):
        steps.step(0.01)
    steps.half_flips = marks[0]
    assert steps.step(5.0, recomputed=400) == 0.0
    steps.half_flips = marks[1]
    assert steps.step(0.01 if marks == (2, 2) else 5.0) == pytest.approx(0.0)
    steps.half_flips = 2
    steps.step(0.01)
    assert steps.step(0.05, recomputed=400) == pytest.approx(0.04), "it is not taken for the usual either"


def test_an_idle_engine_loses_nothing() -> None:
    steps = Steps()
    for _ in range(5):
        steps.step(0.01)
    steps.step(0.01, running=0)
    assert steps.step(60.0, recomputed=400) == 0.0
    assert steps.step(0.01) == pytest.approx(0.0)
