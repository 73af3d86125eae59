"""Tasks: a function of (dataset, seed, serial), refusals of bad files, and which are offered, also after restarts."""

import errno
import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from broker.contract import Attached
from common.errors import UsageError
from common.json_lines import dataset_rows
from learner.checkpoint.folder import StreamState
from learner.loop.tasks import TaskSource, TaskStream
from tests.rigs.refusals import refused

ROWS_1_4 = [(1, b'{"a": 1}'), (4, b'{"a": 2}')]


def dataset(folder: Path, rows: int = 10) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(f'{{"n": {i}}}\n' for i in range(rows)))
    return path


def test_an_epoch_visits_every_row_once_and_epochs_differ(tmp_path: Path) -> None:
    source = TaskSource(dataset(tmp_path, 50), seed=3, group_size=4)
    first = [source.task(n) for n in range(50)]
    second = [source.task(n) for n in range(50, 100)]
    assert len({t.problem for t in first}) == len({t.problem for t in second}) == 50
    assert [t.problem for t in first] != [t.problem for t in second]
    assert {t.epoch for t in first} == {0} and {t.epoch for t in second} == {1}


def test_tasks_follow_from_the_seed_not_from_the_order_of_asking_and_the_digest_from_the_rows(tmp_path: Path) -> None:
    path = dataset(tmp_path, 50)
    sources = [TaskSource(path, seed, 4) for seed in (1, 2)]
    one, two = ([source.task(n) for n in range(120)] for source in sources)
    backwards = TaskSource(path, 1, 4)
    assert [backwards.task(n) for n in reversed(range(120))] == one[::-1]
    assert [t.problem for t in one] != [t.problem for t in two]
    assert not {t.seed for t in one} & {t.seed for t in two}
    assert sources[0].digest == sources[1].digest != TaskSource(dataset(tmp_path, 51), 1, 4).digest


def test_without_shuffling_rows_come_as_they_stand_with_another_seed_in_each_epoch(tmp_path: Path) -> None:
    source = TaskSource(dataset(tmp_path, 3), 0, 4, shuffle=False)
    assert [source.task(n).problem for n in range(4)] == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}', b'{"n": 0}']
    assert len({source.task(n).seed for n in range(200)}) == 200
    assert all(0 <= source.task(n).seed < 2**31 for n in range(200)), "room for the samples of a group"


def test_blank_lines_are_skipped_and_line_numbers_still_right(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n   \n{"a": 2}\n')
    assert list(dataset_rows(path, "tasks.dataset")) == [(f"{path} line {n}", row) for n, row in ROWS_1_4]


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    write_table(Table.from_pylist(rows), path)
    return path


def test_parquet_files_give_the_tasks_and_the_digest_of_the_jsonl_file_with_their_rows(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "question": f"{n} – 1?",
            "answer": f"#### {n}",
            "score": n / 3,
            "chat": [{"role": "user", "n": n}],
            "none": None,
        }
        for n in range(3000)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet(tmp_path / "train-00000-of-00002.parquet", rows[:1700])
    parquet(tmp_path / "train-00001-of-00002.parquet", rows[1700:])
    parquet(tmp_path / "test.parquet", rows[:1])
    one, two = (TaskSource(tmp_path / name, 1, 4) for name in ("a.jsonl", "train-*.parquet"))
    assert one.digest == two.digest != TaskSource(tmp_path / "test.parquet", 1, 4).digest
    assert [one.task(n) for n in range(3000)] == [two.task(n) for n in range(3000)]


def test_a_parquet_file_that_cannot_be_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(path: Path) -> str:
        with pytest.raises(UsageError) as error:
            TaskSource(path, 0, 4)
        return str(error.value)

    (tmp_path / "text.parquet").write_text('{"a": 1}')
    assert said(tmp_path / "text.parquet").startswith(f"tasks.dataset: {tmp_path}/text.parquet ")
    data = parquet(tmp_path / "data.parquet", [{"image": b"1"}])
    told = said(data)
    assert "row 1 " in told and "'image' has bytes" in told
    assert "row 1 " in said(parquet(tmp_path / "far.parquet", [{"a": float("inf")}]))
    assert "no rows" in said(parquet(tmp_path / "none.parquet", []))
    assert "no rows" in said(tmp_path / "no-*.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert str(data) in (told := said(data)) and "pyarrow" in told


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ('{"a": 1}\n{"a": \n', ["line 2", "not JSON"]),
        ('{"a": 1}\n[1, 2]\n', ["line 2", "JSON object", "list"]),
        ("\n\n", ["no rows"]),
    ],
)
def test_a_bad_file_is_refused_with_key_file_and_line(tmp_path: Path, content: str, facts: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with refused(UsageError, "tasks.dataset", path, *facts):
        TaskSource(path, 0, 4)
    path.unlink()
    with refused(UsageError, "tasks.dataset", path, os.strerror(errno.ENOENT)):
        TaskSource(path, 0, 4)


# ---------------------------------------------------------------- the stream


@pytest.fixture
def source(tmp_path: Path) -> TaskSource:
    return TaskSource(dataset(tmp_path, 100), seed=0, group_size=2, shuffle=False)


def stored(stream: TaskStream) -> StreamState:
    """The state as it comes back from a checkpoint."""
    return msgspec.json.decode(msgspec.json.encode(stream.state()), type=StreamState)


def numbers(stream: TaskStream, count: int) -> list[tuple[int, bytes]]:
    return [(t.serial, t.problem) for t in stream.next(count)]


def test_a_resumed_learner_continues_after_what_the_broker_has_seen(source: TaskSource) -> None:
    stream = TaskStream(source)
    assert numbers(stream, 4) == [(n, b'{"n": %d}' % n) for n in range(4)], "serials equal the positions"
    stream.consume([0, 1])
    assert stream.outstanding == 2
    state = stored(stream)
    stream.next(3)  # offered after the checkpoint, then the learner dies
    again = TaskStream(source, state)
    assert again.attach(Attached(7))
    assert again.outstanding == 5
    assert numbers(again, 1) == [(7, b'{"n": 7}')]


def test_renumbering_survives_a_further_restart_of_the_learner(source: TaskSource) -> None:
    stream = TaskStream(source)
    stream.next(6)
    stream.consume([0, 1, 2, 4])
    stream = TaskStream(source, stored(stream))
    assert not stream.attach(Attached(0))
    assert stream.renumbered
    assert numbers(stream, 1) == [(0, b'{"n": 3}')], "what no step consumed comes first"
    again = TaskStream(source, stored(stream))
    assert numbers(stream, 3) == [(1, b'{"n": 5}'), (2, b'{"n": 6}'), (3, b'{"n": 7}')]
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
