"""The task stream: which tasks are offered, also after restarts of the learner and of a broker without memory."""

from pathlib import Path

import msgspec
import pytest

from broker.contract import Attached
from learner.checkpoint.folder import StreamState
from learner.loop.task_source import TaskSource
from learner.loop.task_stream import TaskStream


@pytest.fixture
def source(tmp_path: Path) -> TaskSource:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f'{{"n": {i}}}\n' for i in range(100)))
    return TaskSource(path, seed=0, group_size=2, shuffle=False)


def stored(stream: TaskStream) -> StreamState:
    """The state as it comes back from a checkpoint."""
    return msgspec.json.decode(msgspec.json.encode(stream.state()), type=StreamState)


def numbers(stream: TaskStream, count: int) -> list[tuple[int, bytes]]:
    return [(t.serial, t.problem) for t in stream.next(count)]


def test_serials_count_up_and_equal_the_positions(source: TaskSource) -> None:
    stream = TaskStream(source)
    assert numbers(stream, 2) == [(0, b'{"n": 0}'), (1, b'{"n": 1}')]
    assert stream.outstanding == 2
    stream.consume([1])
    assert stream.outstanding == 1


def test_a_resumed_learner_continues_after_what_the_broker_has_seen(source: TaskSource) -> None:
    stream = TaskStream(source)
    stream.next(4)
    stream.consume([0, 1])
    state = stored(stream)
    stream.next(3)  # offered after the checkpoint, then the learner dies
    again = TaskStream(source, state)
    assert again.attach(Attached(7))
    assert again.outstanding == 5
    assert numbers(again, 1) == [(7, b'{"n": 7}')]


def test_a_broker_without_memory_gets_what_no_step_consumed_first(source: TaskSource) -> None:
    stream = TaskStream(source)
    stream.next(6)
    stream.consume([0, 1, 2, 4])
    again = TaskStream(source, stored(stream))
    assert not again.attach(Attached(0))
    assert again.renumbered
    assert numbers(again, 3) == [(0, b'{"n": 3}'), (1, b'{"n": 5}'), (2, b'{"n": 6}')]


def test_renumbering_survives_a_further_restart_of_the_learner(source: TaskSource) -> None:
    stream = TaskStream(source)
    stream.next(6)
    stream.consume([0, 1, 2, 4])
    stream = TaskStream(source, stored(stream))
    stream.attach(Attached(0))
    stream.next(1)
    again = TaskStream(source, stored(stream))
    stream.next(3)
    assert again.attach(Attached(4))
    assert numbers(again, 1) == numbers(stream, 1) == [(4, b'{"n": 8}')]


def test_a_new_store_is_recognised_by_its_id_even_when_it_knows_more_serials(source: TaskSource) -> None:
    stream = TaskStream(source)
    stream.attach(Attached(0, "old"))
    stream.next(4)
    stream.consume([0, 2])
    state = stored(stream)
    assert state.store_id == "old"
    first = TaskStream(source, state)
    assert not first.attach(Attached(0, "new"))
    offered = numbers(first, 6)  # and then this learner is killed before its first checkpoint
    second = TaskStream(source, state)
    assert not second.attach(Attached(6, "new"))
    assert second.renumbered
    assert [problem for _, problem in offered] == [b'{"n": %d}' % n for n in (1, 3, 4, 5, 6, 7)]
    assert sorted(second.state().outstanding.values()) == [1, 3, 4, 5, 6, 7]
    assert numbers(second, 1) == [(6, b'{"n": 8}')]
    assert TaskStream(source, stored(second)).attach(Attached(7, "new"))


def test_a_store_that_lost_its_newest_second_gets_only_that_again(source: TaskSource) -> None:
    stream = TaskStream(source)
    stream.attach(Attached(0, "one"))
    stream.next(6)
    stream.consume([0, 5])
    again = TaskStream(source, stored(stream))
    assert not again.attach(Attached(4, "one"))
    assert numbers(again, 2) == [(4, b'{"n": 4}'), (5, b'{"n": 6}')]


def test_a_checkpoint_from_before_stores_had_ids_is_recognised_by_serials(source: TaskSource) -> None:
    stream = TaskStream(source)
    stream.next(4)
    old = stored(stream)
    assert old.store_id == ""
    assert TaskStream(source, old).attach(Attached(4, "any"))
    assert not TaskStream(source, old).attach(Attached(3, "any"))
