"""The task source: a function of (dataset, seed, serial), and clear refusals of bad files."""

from pathlib import Path

import pytest

from common.errors import UsageError
from common.json_lines import dataset_rows
from learner.loop.task_source import TaskSource


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


def test_tasks_do_not_depend_on_the_order_in_which_they_are_asked_for(tmp_path: Path) -> None:
    path = dataset(tmp_path)
    forwards = TaskSource(path, 3, 4)
    expected = [forwards.task(n) for n in range(35)]
    backwards = TaskSource(path, 3, 4)
    assert [backwards.task(n) for n in reversed(range(35))] == expected[::-1]


def test_another_seed_gives_another_order_and_other_sampling_seeds(tmp_path: Path) -> None:
    path = dataset(tmp_path, 50)
    one, two = ([TaskSource(path, seed, 4).task(n) for n in range(50)] for seed in (1, 2))
    assert [t.problem for t in one] != [t.problem for t in two]
    assert not {t.seed for t in one} & {t.seed for t in two}


def test_without_shuffling_rows_come_as_they_stand(tmp_path: Path) -> None:
    source = TaskSource(dataset(tmp_path, 3), 0, 4, shuffle=False)
    assert [source.task(n).problem for n in range(4)] == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}', b'{"n": 0}']


def test_a_row_met_again_in_a_later_epoch_has_another_seed(tmp_path: Path) -> None:
    source = TaskSource(dataset(tmp_path, 1), 0, 4)
    assert source.task(0).problem == source.task(1).problem
    assert source.task(0).seed != source.task(1).seed


def test_seeds_leave_room_for_the_samples_of_a_group(tmp_path: Path) -> None:
    source = TaskSource(dataset(tmp_path), 0, 4)
    assert all(0 <= source.task(n).seed < 2**31 for n in range(200))


def test_blank_lines_are_skipped_and_line_numbers_still_right(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n   \n{"a": 2}\n')
    assert list(dataset_rows(path, "tasks.dataset")) == [(1, b'{"a": 1}'), (4, b'{"a": 2}')]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ('{"a": 1}\n[1, 2]\n', "line 2: expected a JSON object, found list"),
        ("\n\n", "has no rows"),
    ],
)
def test_a_bad_file_is_refused_with_key_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=rf"tasks\.dataset: .*rows\.jsonl.*{message}"):
        TaskSource(path, 0, 4)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tasks\.dataset: cannot read .*nowhere\.jsonl: No such file"):
        TaskSource(tmp_path / "nowhere.jsonl", 0, 4)


def test_the_digest_follows_the_rows(tmp_path: Path) -> None:
    before = TaskSource(dataset(tmp_path), 0, 4).digest
    assert TaskSource(dataset(tmp_path), 1, 8).digest == before
    assert TaskSource(dataset(tmp_path, 11), 0, 4).digest != before
