"""Datasets of another kind: what the file is, and a command that makes rows of it, which is run here."""

import gzip
import json
import math
import shutil
import subprocess
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from common.errors import UsageError
from common.json_lines import DATASET, OtherFormat, dataset_rows

ROWS = [{"question": "1, 2 – 3?", "answer": "2"}, {"question": 'a "b"', "answer": "1"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FILES = {  # name: content, what is said of it
    "a train.csv": ('\ufeffquestion,answer\n"1, 2 – 3?",2\n"a ""b""",1\n'.encode(), "a CSV file"),
    "train.tsv": ('question\tanswer\n1, 2 – 3?\t2\n"a ""b"""\t1\n'.encode(), "a table with tabs"),
    "train.json": (json.dumps(ROWS, indent=1).encode(), "one JSON list"),
    "list.jsonl": (json.dumps(ROWS).encode(), "one JSON list"),
    "utf16.jsonl": (LINES.encode("utf-16"), "text in UTF-16"),
    "mark.jsonl": (LINES.encode("utf-8-sig"), "text after a byte order mark"),
    "train.jsonl.gz": (gzip.compress(LINES.encode()), "a gzip file"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named_with_a_command_that_makes_rows_of_it(tmp_path: Path, name: str) -> None:
    content, said = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OtherFormat) as caught:
        list(dataset_rows(tmp_path / name, "tasks.dataset"))
    found = caught.value.problem
    assert (found.key, found.expected, found.found) == ("tasks.dataset", DATASET, f"{tmp_path / name}, {said}")
    _, _, command = str(found.hint).partition("to convert it: ")
    if command.startswith("python "):
        command = command.replace("python", sys.executable, 1)
    elif shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    subprocess.run(command, shell=True, check=True)
    (made,) = set(tmp_path.iterdir()) - {tmp_path / name}
    assert [json.loads(row) for _, row in dataset_rows(made, "tasks.dataset")] == ROWS


@pytest.mark.parametrize("begins", [b"PAR1", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"version https://git-lfs"])
def test_files_that_only_another_program_reads_are_named(tmp_path: Path, begins: bytes) -> None:
    (tmp_path / "rows").write_bytes(begins + b" and more")
    with pytest.raises(OtherFormat, match="to convert it: "):
        list(dataset_rows(tmp_path / "rows", "tasks.dataset"))


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    write_table(Table.from_pylist(rows), path)
    return path


def test_parquet_columns_of_ordinary_types_become_text_and_nan_null(tmp_path: Path) -> None:
    days = {"day": date(2026, 1, 2), "at": datetime(2026, 1, 2, 3, 4, 5), "hour": time(6, 7), "price": Decimal("1.50")}
    path = parquet(tmp_path / "rows.parquet", [{**days, "n": math.nan, "list": [{"n": math.nan}, {"n": 1.0}]}])
    ((_, row),) = dataset_rows(path, "tasks.dataset")
    text = {"day": "2026-01-02", "at": "2026-01-02T03:04:05", "hour": "06:07:00", "price": "1.50"}
    assert json.loads(row) == {**text, "n": None, "list": [{"n": None}, {"n": 1.0}]}


def test_a_parquet_column_that_json_has_not_is_named_with_a_command_that_leaves_it_out(tmp_path: Path) -> None:
    row = {"q": "a", "image": {"bytes": b"\0"}, "far": math.inf, "took": timedelta(1)}
    path = parquet(tmp_path / "a b.parquet", [row])
    with pytest.raises(OtherFormat) as caught:
        list(dataset_rows(path, "tasks.dataset"))
    what = "'image' has bytes and 'far' has infinity and 'took' has timedelta"
    assert caught.value.problem.found == f"{path}, which is whole, but in row 1 column {what}"
    _, _, command = str(caught.value.problem.hint).partition("to leave it out: ")
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True)
    assert [row for _, row in dataset_rows(tmp_path / "rows-a b.parquet", "tasks.dataset")] == [b'{"q": "a"}']


def test_rows_count_and_not_the_name(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(LINES)
    assert len(list(dataset_rows(tmp_path / "rows.csv", "tasks.dataset"))) == 2


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "1"}\n' + '{"question": "é"}\n'.encode("latin-1"))
    with pytest.raises(UsageError, match=r"rows\.jsonl line 2 is not JSON: 'utf-8' codec"):
        list(dataset_rows(tmp_path / "rows.jsonl", "tasks.dataset"))
