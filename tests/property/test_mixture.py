"""Tasks of several sources: shares, orders, and the same tasks whatever is killed between a change and its effect."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.contract import WeightChange, WeightRequest
from broker.delivery.state import Recorder
from common.config.tasks import CurriculumConfig
from common.rollouts import Task
from learner.loop.mixture import BLOCK, Mixture, factor
from learner.loop.tasks import TaskSource, TaskStream
from tests.rigs.brokers import MemoryBroker, learner_report, new_state, run_info

NAMES = ("a", "b", "c")
ROWS = {"a": 5, "b": 7, "c": 3}
NO_RULE = CurriculumConfig()
RULE = CurriculumConfig(rule="success", every=2)

weights = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 1e300]), min_size=3, max_size=3).filter(any)
OPERATIONS = st.one_of(
    st.tuples(st.just("offer"), st.integers(1, 9)),
    st.tuples(st.just("set"), st.dictionaries(st.sampled_from([*NAMES, "x"]), st.sampled_from([0.0, 0.2]), min_size=1)),
    st.tuples(st.just("step"), st.dictionaries(st.sampled_from(NAMES), st.tuples(st.integers(0, 4), st.just(4)))),
    st.tuples(st.sampled_from(["checkpoint", "kill learner", "kill broker"]), st.none()),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rows")
    for name, rows in ROWS.items():
        (made / name).write_text("".join(f'{{"of": "{name}", "n": {i}}}\n' for i in range(rows)))
    return made


def mixture(folder: Path, given: Any, rule: CurriculumConfig = NO_RULE, seed: int = 3) -> Mixture:
    sources = {name: TaskSource(folder / name, i, 2) for i, name in enumerate(NAMES)}
    return Mixture(sources, dict(zip(NAMES, given, strict=True)), seed, rule)


class Moves(Recorder):
    """Every move of a broker, as its journal has them."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def record(self, move: Any) -> None:
        self.made.append(move)


class Job:
    """A learner's stream and its broker; each may be killed, and continues from its checkpoint or its store."""

    def __init__(self, folder: Path, given: Any) -> None:
        self._make = lambda: mixture(folder, given, RULE)
        self.broker = MemoryBroker(run_info())
        self.broker.state.recorder = self.moves = Moves()
        self.incarnation = self.step = self.asked = 0
        self.saved: Any = None
        self.saved_step = 0
        self.steps: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self.incarnation += 1
        self.client = self.broker.learner()
        self.stream = TaskStream(self._make(), self.saved)
        assert self.stream.attach(self.client.attach(learner_report(incarnation=self.incarnation)))

    def do(self, kind: str, value: Any) -> None:
        if kind == "offer":
            self.stream.offer(value, self.client)
        elif kind == "set":
            self.asked += 1
            self.broker.learner().set_weights(WeightRequest(f"request {self.asked}", value))
        elif kind == "step":
            self.stream.observe(len(self.steps), value)
            self.steps.append(value)
        elif kind == "checkpoint":
            self.saved, self.saved_step = self.stream.state(), len(self.steps)
        elif kind == "kill learner":
            self._begin()
            for number in range(self.saved_step, len(self.steps)):  # the same groups again
                self.stream.observe(number, self.steps[number])
        else:
            self._restart_broker()

    def _restart_broker(self) -> None:
        """Its moves are applied again to an empty state."""
        before = self.broker.state
        after = new_state(run_info())
        after.store_id, after.openings = before.store_id, before.openings
        for move in self.moves.made:
            move.apply(after)
        after.recorder = before.recorder
        self.broker.state = after
        self.do("kill learner", None)

    def tasks(self) -> list[Task]:
        return [entry.task for _, entry in sorted(self.broker.state.tasks.living.items())]


@settings(max_examples=150)
@given(given=weights, operations=st.lists(OPERATIONS, min_size=1, max_size=40))
def test_killed_at_any_moment_the_stream_offers_the_tasks_of_one_that_was_not(
    folder: Path, given: Any, operations: Any
) -> None:
    killed, whole = Job(folder, given), Job(folder, given)
    for kind, value in operations:
        killed.do(kind, value)
        if kind in ("offer", "set", "step"):
            whole.do(kind, value)
    assert killed.tasks() == whole.tasks()
    assert killed.stream.shares == whole.stream.shares
    changes = [(c.position, c.weights, c.factors, c.requests, c.step) for c in killed.stream.state().weight_changes]
    assert changes == [
        (c.position, c.weights, c.factors, c.requests, c.step) for c in whole.stream.state().weight_changes
    ]


@settings(max_examples=60)
@given(given=weights, seed=st.integers(0, 1 << 30), start=st.integers(0, 5000), count=st.integers(1, 400))
def test_every_stretch_of_positions_has_the_shares_of_the_weights(
    folder: Path, given: Any, seed: int, start: int, count: int
) -> None:
    made = mixture(folder, given, seed=seed)
    changes = [WeightChange(0, made.weights)]
    found = Counter(made.where(n, changes)[0] for n in range(start, start + count))
    total = math.fsum(value / max(given) for value in given)
    for name, weight in made.weights.items():
        expected = count * (weight / max(given)) / total
        assert abs(found[name] - expected) <= 2 + math.log2(count + 1), (name, found, expected)
        assert weight or not found[name]


def test_every_source_has_epochs_and_an_order_of_its_own_across_changes(folder: Path) -> None:
    made = mixture(folder, [1, 2, 1])
    changes = [WeightChange(0, made.weights), WeightChange(40, {"a": 5, "b": 0, "c": 1})]
    tasks = [made.task(n, changes) for n in range(300)]
    assert [made.task(n, changes) for n in reversed(range(300))] == tasks[::-1], "in whatever order they are asked for"
    for name, rows in ROWS.items():
        own = [task for task in tasks if task.source == name]
        assert [task.epoch for task in own] == [i // rows for i in range(len(own))]
        for epoch in range(len(own) // rows):
            assert len({t.problem for t in own[epoch * rows : (epoch + 1) * rows]}) == rows
        assert len({task.seed for task in own}) == len(own)
    assert not [task for task in tasks[40:] if task.source == "b"]
    assert tasks[:40] == [made.task(n, changes[:1]) for n in range(40)], "what came before a change stays"


def test_the_order_of_sources_in_the_file_changes_nothing(folder: Path) -> None:
    sources = {name: TaskSource(folder / name, 1, 2) for name in NAMES}
    one = Mixture(sources, {name: 1.0 for name in NAMES}, 3, NO_RULE)
    other = Mixture({name: sources[name] for name in reversed(NAMES)}, one.weights, 3, NO_RULE)
    changes = [WeightChange(0, one.weights)]
    assert one.digest == other.digest
    assert [one.where(n, changes) for n in range(50)] == [other.where(n, changes) for n in range(50)]


def test_a_broker_that_lost_its_memory_gets_the_same_positions_with_their_old_sources(folder: Path) -> None:
    job = Job(folder, [1, 1, 1])
    job.do("offer", 6)
    job.do("set", {"a": 0.0})
    job.do("offer", 4)
    before = {(t.source, t.problem, t.seed) for t in job.tasks()}
    state = job.stream.state()
    job.broker = MemoryBroker(run_info())
    stream = TaskStream(mixture(folder, [1, 1, 1]), state)
    client = job.broker.learner()
    assert not stream.attach(client.attach(learner_report()))
    stream.offer(10, client)
    assert {(t.source, t.problem, t.seed) for t in job.tasks()} == before
    told = client.status().weights
    assert told is not None and (told.position, told.weights["a"]) == (6, 0.0), "the new store has the history, too"


def test_however_many_changes_there_were_a_position_is_drawn_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = list[int]()
    search = np.searchsorted
    monkeypatch.setattr(np, "searchsorted", lambda *args, **kw: (drawn.append(len(args[1])), search(*args, **kw))[1])
    weights = [{"a": 1.0, "b": i % 3 * 1.0, "c": i % 5 * 1.0} for i in range(500)]
    changes = [WeightChange(8 * i, found) for i, found in enumerate(weights)]
    made = mixture(folder, [1, 0, 0])
    found = [made.where(n, changes)[0] for n in range(8 * len(changes))]
    assert sum(drawn) == BLOCK
    assert {weights[n // 8][name] > 0 for n, name in enumerate(found)} == {True}
    drawn.clear()
    more = [*changes, WeightChange(8 * len(changes), weights[1])]
    made.where(8 * len(changes), more)
    assert len(drawn) == 1, "only the change that is new"


@pytest.mark.parametrize("least", [1e-300, 5e-324])
def test_weights_and_factors_too_small_for_a_product_still_have_shares(folder: Path, least: float) -> None:
    change = WeightChange(0, {"a": least, "b": 0.0, "c": least}, factors={"a": least, "c": least})
    assert change.shares == {"a": 0.5, "b": 0.0, "c": 0.5}
    made = mixture(folder, [1, 1, 1])
    assert Counter(made.where(n, [change])[0] for n in range(100)).keys() == {"a", "c"}


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
def test_the_factor_is_largest_at_the_target_and_never_below_the_floor(target: float) -> None:
    rule = CurriculumConfig(rule="success", target=target, floor=0.05)
    found = {p / 100: factor(p / 100, rule) for p in range(101)}
    assert max(found, key=found.__getitem__) == target and found[target] == 1
    assert min(found.values()) == 0.05
    if target == 0.5:
        assert all(found[p] == pytest.approx(max(0.05, 4 * p * (1 - p))) for p in found)
