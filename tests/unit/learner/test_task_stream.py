"""The task stream: which tasks are offered, also after restarts of the learner and of a broker without memory."""

from pathlib import Path

import msgspec
import pytest

from learner.task_stream import StreamState, TaskStream
from learner.tasks import TaskSource


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
    assert again.attach(7)
    assert again.outstanding == 5
    assert numbers(again, 1) == [(7, b'{"n": 7}')]


def test_a_broker_without_memory_gets_what_no_step_consumed_first(source: TaskSource) -> None:
    stream = TaskStream(source)
    stream.next(6)
    stream.consume([0, 1, 2, 4])
    again = TaskStream(source, stored(stream))
    assert not again.attach(0)
    assert again.renumbered
    assert numbers(again, 3) == [(0, b'{"n": 3}'), (1, b'{"n": 5}'), (2, b'{"n": 6}')]


def test_renumbering_survives_a_further_restart_of_the_learner(source: TaskSource) -> None:
    stream = TaskStream(source)
    stream.next(6)
    stream.consume([0, 1, 2, 4])
    stream = TaskStream(source, stored(stream))
    stream.attach(0)
    stream.next(1)
    again = TaskStream(source, stored(stream))
    stream.next(3)
    assert again.attach(4)
    assert numbers(again, 1) == numbers(stream, 1) == [(4, b'{"n": 8}')]
