"""The simulator: cases that a person can compute, rules that it must follow, and the page with its predictions."""

from dataclasses import replace
from typing import Any

import pytest
from simulate import Episode, Lengths, Outcome, Setup, Simulation, pareto, predict, simulate, steady_s
from simulated_engine import Speeds, fit_positive, seconds_at, straight

EVEN = Speeds(step_s=straight(0.01, 0.0), call_s=0.0, train_s=1.0, train_token_s=0.0, deliver_s=0.0)
SETUP = Setup(nodes=1, concurrency=64, groups_per_step=4, group_size=2, staleness=0, steps=5)


def equal(tokens: int, size: int = 2) -> Lengths:
    return lambda serial: [(tokens,)] * size


def test_a_synchronous_step_is_the_sum_of_its_parts_and_an_asynchronous_one_as_long_as_its_slower_side() -> None:
    found = simulate(SETUP, replace(EVEN, deliver_s=0.25), equal(100))
    assert found.wall_s == pytest.approx(4 * (100 * 0.01 + 1.0 + 0.25))
    assert found.learner_idle == pytest.approx(1.25 / 2.25)
    assert found.staleness_max == 0
    found = simulate(replace(SETUP, staleness=2, steps=20), replace(EVEN, train_s=3.0), equal(100))
    assert found.wall_s == pytest.approx(19 * 3.0)
    assert found.learner_idle == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("concurrency", "speeds", "turns", "seconds"),
    [
        # 8 requests: 0.8 s for the calls, then 100 engine steps of 0.01 + 8 * 0.001
        (64, {"step_s": straight(0.01, 0.001), "call_s": 0.1}, [(100,), (100,)], 0.8 + 100 * 0.018),
        (64, {}, [(30, 20), (40,)], 50 * 0.01),
        # 8 requests, each of 100 engine steps over 0 to 99 tokens of every one; the second turn begins at 60
        (64, {"context_s": 1e-5}, [(100,), (100,)], 100 * 0.01 + 1e-5 * 8 * 100**2 / 2),
        (64, {"context_s": 1e-5}, [(60, 40)] * 2, 100 * 0.01 + 1e-5 * 8 * 100**2 / 2),
        (64, {"prefill_s": 0.1}, [(100,), (100,)], 0.1 + 100 * 0.01),
        (1, {"prefill_s": 0.1}, [(100,), (100,)], 8 * (0.1 + 100 * 0.01)),
        (2, {}, [(100,), (100,)], 4 * 100 * 0.01),  # four groups of two, one after another
    ],
    ids=["calls", "turns", "context", "context of turns", "prefill together", "prefill one by one", "concurrency"],
)
def test_the_generation_of_one_step_takes(
    concurrency: int, speeds: dict[str, Any], turns: list[Episode], seconds: float
) -> None:
    setup = replace(SETUP, steps=2, concurrency=concurrency)
    found = simulate(setup, replace(EVEN, train_s=0.0, **speeds), lambda serial: turns)
    assert found.wall_s == pytest.approx(seconds)


def test_training_is_counted_by_tokens_and_by_their_pairs() -> None:
    speeds = replace(EVEN, train_s=0.5, train_token_s=0.001)
    found = simulate(replace(SETUP, steps=3), speeds, equal(100))
    assert found.wall_s == pytest.approx(2 * (1.0 + 0.5 + 0.001 * 800))
    assert found.tokens == 3 * 800
    # long episodes take longer than as many tokens in short ones
    assert replace(speeds, train_pair_s=1e-6).train_seconds([100, 300]) == pytest.approx(0.5 + 0.4 + 0.1)


def test_an_engine_step_follows_its_curve_and_the_steady_pace_leaves_out_start_and_end() -> None:
    curve = ((1, 0.01), (5, 0.03), (6, 0.05))
    assert [seconds_at(curve, n) for n in (1, 3, 5, 6, 8)] == pytest.approx([0.01, 0.02, 0.03, 0.05, 0.09])
    assert steady_s(Outcome(step_ends=[100.0, 101, 102, 104, 106, 108, 110, 150, 190])) == pytest.approx(2.0)


def test_each_side_of_a_shared_machine_is_slower_while_the_other_works() -> None:
    setup = replace(SETUP, staleness=2, steps=20, concurrency=8)
    # the engine is never idle for long: it makes 4 groups in 1 s, and the learner takes three times as long
    learner = simulate(setup, replace(EVEN, train_s=1.5, learner_shared=2.0), equal(100))
    assert 19 * 1.5 < learner.wall_s < 19 * 3.0
    # the engine is the slow one here, and the learner trains for half of the time
    alone = simulate(setup, replace(EVEN, train_s=0.5), equal(100)).wall_s
    engine = simulate(setup, replace(EVEN, train_s=0.5, engine_shared=3.0), equal(100)).wall_s
    assert alone == pytest.approx(19 * 1.0, rel=0.1)
    # 0.5 s at a third of the pace make a sixth of the groups, and the rest takes 5/6 s
    assert engine == pytest.approx(19 * (0.5 + 5 / 6), rel=0.1)
    alone = simulate(SETUP, EVEN, equal(100)).wall_s  # a synchronous job shares nothing
    assert simulate(SETUP, replace(EVEN, learner_shared=3.0, engine_shared=3.0), equal(100)).wall_s == alone


def test_factors_are_found_again_and_none_is_negative() -> None:
    rows: list[list[float]] = [[1, tokens, tokens**2] for tokens in (100, 300, 1000, 4000)]
    exact = [0.5 + 0.002 * tokens + 1e-6 * square for _, tokens, square in rows]
    assert fit_positive(rows, exact) == pytest.approx([0.5, 0.002, 1e-6])
    bent = [0.002 * tokens - 1e-7 * square for _, tokens, square in rows]
    found = fit_positive(rows, bent)
    assert min(found) >= 0 and found[1] > 0


def test_a_long_episode_holds_up_a_synchronous_step_and_no_asynchronous_one() -> None:
    def one_long(serial: int) -> list[Episode]:
        return [(1000,), (10,)] if serial % 8 == 0 else [(10,), (10,)]

    setup = replace(SETUP, staleness=4, steps=40)
    synchronous = simulate(replace(setup, staleness=0), replace(EVEN, train_s=0.1), one_long)
    asynchronous = simulate(setup, replace(EVEN, train_s=0.1), one_long)
    # every other step has one: 10 s of generation, the others 0.1 s; training adds 0.1 s to each
    assert synchronous.wall_s == pytest.approx(19 * 10.0 + 20 * 0.1 + 39 * 0.1, rel=0.06)
    assert synchronous.wall_s > 3 * asynchronous.wall_s
    assert asynchronous.staleness_max > 4  # the long ones were overtaken


def test_nodes_share_the_window() -> None:
    speeds = replace(EVEN, step_s=straight(0.0, 0.01), train_s=0.0)
    alone = simulate(replace(SETUP, steps=6, groups_per_step=16), speeds, equal(50)).wall_s
    four = simulate(replace(SETUP, steps=6, groups_per_step=16, nodes=4), speeds, equal(50)).wall_s
    assert alone / four == pytest.approx(4.0)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_task_is_trained_on_once_and_the_window_holds(staleness: int) -> None:
    class Watching(Simulation):
        trained: list[int] = []
        most = 0

        def _trained(self) -> None:
            self.trained.extend(self._training)
            super()._trained()

        def _begin_group(self, node: object) -> None:
            super()._begin_group(node)  # type: ignore[arg-type]
            size = self._setup.groups_per_step
            assert self._next_serial <= size * (self._version + staleness + 1)

    setup = replace(SETUP, nodes=3, staleness=staleness, steps=30, concurrency=8)
    watching = Watching(setup, replace(EVEN, step_s=straight(0.01, 0.002)), pareto(2, 1.2, 20, 2000))
    watching.trained = []
    watching.run()
    assert len(watching.trained) == len(set(watching.trained)) == 4 * 30


def test_lengths_are_heavy_tailed_bounded_and_the_same_each_time() -> None:
    lengths = pareto(8, 1.2, 100.0, 5000)
    drawn = [episode[0] for serial in range(300) for episode in lengths(serial)]
    assert drawn == [episode[0] for serial in range(300) for episode in lengths(serial)]
    assert min(drawn) >= 100 and max(drawn) == 5000
    assert sum(drawn) / len(drawn) > 2 * sorted(drawn)[len(drawn) // 2]


def test_a_prediction_names_its_assumptions() -> None:
    narrow, wide = predict(2, [1, 4], 9)
    assert narrow["setup"]["nodes"] == 2 and narrow["speeds"]["step_s"]  # type: ignore[index]
    assert 1 < narrow["gain"] < wide["gain"]  # type: ignore[operator]
