"""Groups that are decoded and prepared while the step before trains: the run is the one without, bit for bit."""

import shutil
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from broker.client.look_ahead import LookAhead
from common.metrics import StepMetrics
from common.rollouts import Group, encode_group
from common.run_reader import read_tail
from learner.loop import rollout_source
from tests.rigs.waiting import until
from tests.unit.learner.loop_fakes import Killed, MakeWorld, World

STEPS = 6
SECTIONS: dict[str, Any] = {"run": {"steps": STEPS}, "staleness": {"max": 2}}


def meanwhile(world: World, act: Callable[[int], None] = lambda step: None) -> dict[int, int]:
    """Every step trains until all that is ready has been looked at; the groups that were ready then, by step."""
    found, train = dict[int, int](), world.backend.train_step

    def training(*arguments: Any) -> Any:
        ahead, ready = world.lead._gathering._ahead, len(world.memory.state.tasks.ready)
        until(lambda: len(ahead.made) >= ready or not ahead._thread.is_alive(), "the groups that are ready")
        found[world.backend.steps] = len(ahead.made)
        act(world.backend.steps)
        return train(*arguments)

    world.backend.train_step = training
    return found


@pytest.fixture
def by_thread(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The serials of the groups that each thread decoded."""
    found: dict[str, list[int]] = {}
    decode = rollout_source.decode

    def noting(stored: Any, **how: Any) -> Group:
        found.setdefault(threading.current_thread().name, []).append(stored.serial)
        return decode(stored, **how)

    monkeypatch.setattr(rollout_source, "decode", noting)
    return found


def figures(world: World) -> list[dict[str, Any]]:
    """The metrics lines without times."""
    lines = [msgspec.to_builtins(line) for line in read_tail(world.run_dir.metrics, StepMetrics).lines]
    return [{name: value for name, value in line.items() if not name.endswith("_s")} for line in lines]


@pytest.mark.parametrize("dynamic", [False, True], ids=["all groups", "dynamic sampling"])
@pytest.mark.parametrize("expired", ["mask", "wait", "regenerate"])
def test_the_run_is_the_one_without(
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    by_thread: dict[str, list[int]],
    dynamic: bool,
    expired: str,
) -> None:
    def play() -> tuple[np.ndarray, list[Any], list[dict[str, Any]], int]:
        sections = SECTIONS | {"learner": {"dynamic_sampling": dynamic}}
        world = make_world(**sections | {"staleness": {"max": 2, "expired": expired}}, lag=1)
        world.fleet.hold_back = lambda serial, turn: serial in (3, 4) and turn < 4  # stragglers
        seen = meanwhile(world)
        world.run()
        lines, table = figures(world), world.final_table()
        shutil.rmtree(world.run_dir.path)
        return table, world.broker.ledger(), lines, sum(seen.values())

    table, ledger, lines, seen = play()
    assert seen >= STEPS // 2, "there was something to look at"
    assert len(by_thread["look-ahead"]) >= STEPS // 2
    own = by_thread["MainThread"]
    assert len(own) == len(set(own)) or expired == "regenerate", "a step that is taken again decodes nothing again"
    with monkeypatch.context() as without:
        without.setattr(LookAhead, "_look", lambda self, step, most: None)
        by_thread.clear()
        expected, ledger_without, lines_without, seen = play()
    assert (seen, list(by_thread)) == (0, ["MainThread"])
    np.testing.assert_array_equal(table, expected)
    assert ledger == ledger_without
    assert lines == lines_without


def test_a_bad_group_that_was_found_ahead_is_generated_again_when_it_is_taken(
    make_world: MakeWorld, by_thread: dict[str, list[int]]
) -> None:
    world = make_world(**SECTIONS)
    spoilt: list[int] = []

    def spoil(group: Group) -> bytes:
        if group.serial == 5 and not spoilt:
            spoilt.append(5)
            return b"\xc1 garbage"
        return encode_group(group)

    world.fleet.spoil = spoil
    seen = meanwhile(world)
    assert world.run() == "done"
    assert by_thread["look-ahead"].count(5) >= 1, "the bad one, and perhaps the other"
    assert world.event_kinds().count("bad_group") == world.event_kinds().count("groups_regenerated") == 1
    (kept,) = world.run_dir.quarantine.glob("*")
    assert (kept.name, kept.read_bytes()) == ("group-5.bin", b"\xc1 garbage")
    assert len(seen) == STEPS
    assert {entry.state for entry in world.broker.ledger()} == {"committed"}


@pytest.mark.parametrize("step", [1, 3])
def test_a_learner_killed_while_it_has_groups_ahead_resumes_with_the_same_weights(
    make_world: MakeWorld, step: int
) -> None:
    expected = make_world(**SECTIONS).unbroken()
    world = make_world(**SECTIONS)

    def kill(now: int) -> None:
        if now == step:
            raise Killed

    seen = meanwhile(world, kill)
    world.run_killed()
    assert seen[step] > 0, "it had groups that no step had taken"
    again = world.restart()
    meanwhile(again)
    assert again.run() == "done"
    np.testing.assert_array_equal(again.final_table(), expected)
    serials = [entry.serial for entry in again.broker.ledger() if entry.state == "committed"]
    assert serials == list(range(STEPS * 2)), "every group is in one step"


def test_a_drain_waits_for_no_look(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(**SECTIONS)
    look, asked, answers = world.broker.look, threading.Event(), threading.Event()

    def slow(step: int, count: int, held: Any) -> Any:
        asked.set()
        answers.wait()
        return look(step, count, held)

    world.broker.look = slow
    train = world.backend.train_step

    def training(*arguments: Any) -> Any:
        assert asked.wait(60)
        world.stop.append("the test")
        return train(*arguments)

    world.backend.train_step = training
    assert world.run() == "drained"
    assert world.trainer.version == 1
    assert not answers.is_set()
    answers.set()
