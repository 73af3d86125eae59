"""Files with one JSON object per line: datasets, metrics and events. A killed writer may leave a torn last line."""

import errno
import importlib
import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from datetime import time as clock_time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from common.errors import Problem, UsageError

T = TypeVar("T")
FIRST_ROWS = 1000  # rows of a dataset that a launch looks at
HEAD_BYTES = 512
DATASET = "JSON Lines (one JSON object a line), or parquet in a file .parquet"
MAKE_ROWS = 'python -c "import csv, json; [print(json.dumps(row)) for row in {rows}]" < {file} > {made}'
COLUMNS = "columns of text, numbers, dates, lists and mappings"
DROP = (
    "import sys, pyarrow.parquet as p; p.write_table(p.read_table(sys.argv[1]).drop_columns(sys.argv[3:]), sys.argv[2])"
)
CSV = "csv.DictReader(open(0, encoding='utf-8-sig'){more})"
TABLES = {".csv": ("a CSV file", ""), ".tsv": ("a table with tabs", r", delimiter='\t'")}
OTHERS = {  # how a file begins: what it is, and how a dataset is made of it
    rb"PAR1": ("a parquet file of another name", "mv {file} {file}.parquet"),
    rb"\x1f\x8b": ("a gzip file", "gunzip {file}"),
    rb"\x28\xb5\x2f\xfd": ("a zstd file", "unzstd {file}"),
    rb"PK\x03\x04": ("a zip file", "unzip {file}; save a sheet of Excel as CSV"),
    rb"version https://git-lfs": ("a pointer of git-lfs", "git lfs pull"),
    rb"\xff\xfe|\xfe\xff": ("text in UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > {made}"),
    rb"\xef\xbb\xbf": ("text after a byte order mark", "tail -c +4 {file} > {made}"),
    rb"\s*\[\s*\{": ("one JSON list", MAKE_ROWS.replace("csv, ", "").replace("{rows}", "json.load(open(0))")),
}


class OtherFormat(UsageError):
    """A file of a dataset has no rows that can be used; `problem` says what it is and how to convert it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class LineFile:
    """Appends whole lines, so that several processes can share the file; a line is in it when `write` returns."""

    def __init__(self, path: Path) -> None:
        """Open for appending; raises OSError."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._torn = False

    def write(self, line: msgspec.Struct) -> None:
        """Append `line`; raises OSError, for example on a full disk, which may have cut the line."""
        data = b"\n" * self._torn + msgspec.json.encode(line) + b"\n"
        self._torn = os.write(self._file, data) < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class Event(msgspec.Struct, frozen=True):
    """A line of RUN/events.jsonl; the broker's lines have an index instead of a source."""

    time_s: float
    kind: str
    detail: dict[str, object] = {}
    source: str = ""


class EventFile(LineFile):
    """RUN/events.jsonl, which broker, learner and supervisor share; `source` is the one that writes here."""

    def __init__(self, path: Path, source: str) -> None:
        super().__init__(path)
        self._source = source

    def add(self, kind: str, **detail: object) -> None:
        """Record that `kind` happened now; raises OSError, for example on a full disk."""
        self.write(Event(time.time(), kind, detail, self._source))


def decoder_of(kind: type[T]) -> Callable[[bytes], T | None]:
    """A function from a line to the `kind` that it has; None for other lines, and for lines that are cut."""
    decoder = msgspec.json.Decoder(kind)

    def decode(line: bytes) -> T | None:
        try:
            return decoder.decode(line)
        except (ValueError, RecursionError):  # msgspec's errors, text that is no UTF-8, and too deep nesting
            return None

    return decode


def lines_of(data: bytes, kind: type[T]) -> Iterator[T]:
    """The lines of `data` that are a `kind`; others, and lines that are cut, are passed over."""
    yield from (found for found in map(decoder_of(kind), data.split(b"\n")) if found is not None)


def dataset_files(path: Path) -> list[Path]:
    """The files of a dataset: `path`, or those that its last part, a pattern, matches, sorted by name."""
    return [path] if "*" not in path.name else sorted(path.parent.glob(re.sub(r"\*+", "*", path.name)))


def dataset_exists(path: Path) -> bool:
    """Whether there are files of a dataset. True where this user may not look: `dataset_rows` says why."""
    try:
        return any(map(Path.is_file, dataset_files(path)))
    except PermissionError:
        return True


def dataset_rows(path: Path, key: str) -> Iterator[tuple[str, bytes]]:
    """('PATH line N', JSON object in one line) of every row of a dataset; blank lines are passed over.

    A row of a parquet file is written as Python's json.dumps writes it, so a JSONL file that json.dumps wrote has the
    same bytes. Dates and decimals become text there, and NaN null. Raises UsageError, naming `key`, the file and the
    line; also when there is no row at all. It is OtherFormat for a file of another kind, and for columns of bytes.
    """
    found = False
    for file in dataset_files(path):
        try:
            for number, line in _parquet_lines(file, key) if file.suffix == ".parquet" else _lines(file, key):
                where = f"{file} line {number}"
                _check_object(line, f"{key}: {where}")
                found = True
                yield where, line
        except OSError as error:
            raise UsageError(f"{key}: cannot read {file}: {error.strerror or error}") from None
    if not found:
        raise UsageError(f"{key}: {path} has no rows")


def first_rows(dataset: str, most: int = FIRST_ROWS) -> Iterator[tuple[str, bytes]]:
    """The first rows, as `dataset_rows` has them, up to one that cannot be read; none of a file that is not here."""
    with suppress(UsageError):
        yield from islice(dataset_rows(Path(dataset), "tasks.dataset"), most)


def first_row(dataset: str) -> tuple[str, bytes] | None:
    """The first row, as `dataset_rows` has it; None where it cannot be read, as on another machine."""
    return next(first_rows(dataset, 1), None)


def _lines(file: Path, key: str) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        _check_format(file, lines.peek(HEAD_BYTES), key)
        for number, line in enumerate(lines, start=1):
            if text := line.strip():
                yield number, text


def _check_format(file: Path, head: bytes, key: str) -> None:
    """Raise OtherFormat for a file that begins as another kind does, or whose name says that it is a table."""
    found, how = next((what for begins, what in OTHERS.items() if re.match(begins, head)), ("", ""))
    if (table := TABLES.get(file.suffix.lower())) and not head.lstrip().startswith(b"{"):
        found, how = table[0], MAKE_ROWS.replace("{rows}", CSV.format(more=table[1]))
    if found:
        made = file.with_suffix(".jsonl")
        made = file.with_name(f"rows-{file.name}") if made == file else made
        how = how.format(file=shlex.quote(str(file)), made=shlex.quote(str(made)))
        raise OtherFormat(Problem(key, DATASET, f"{file}, {found}", f"to convert it: {how}"))


def _parquet_lines(file: Path, key: str) -> Iterator[tuple[int, bytes]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise UsageError(f"{key}: {file} needs pyarrow, which is not installed here; pip install pyarrow") from None
    number = 0
    try:
        batches = parquet.ParquetFile(file).iter_batches(batch_size=1024)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield number, _row_line(row, file, number, key)
    except (ValueError, TypeError, NotImplementedError) as error:  # pyarrow's
        raise UsageError(f"{key}: {file} cannot be read after row {number}: {error}") from None


def _row_line(row: dict[str, Any], file: Path, number: int, key: str) -> bytes:
    """A row of a parquet file as JSON; raises OtherFormat for values that JSON has not."""
    try:
        return _json_of(row)
    except (TypeError, ValueError):
        found: dict[str, str] = {}
        for name, value in row.items():
            try:
                _json_of(value)
            except TypeError as error:
                found[name] = str(error)
            except ValueError:
                found[name] = "infinity"
        what = " and ".join(f"'{name}' has {kind}" for name, kind in found.items())
        made = file.with_name(f"rows-{file.name}")
        how = shlex.join(["python", "-c", DROP, str(file), str(made), *found])
        said = f"{file}, which is whole, but in row {number} column {what}"
        raise OtherFormat(Problem(key, COLUMNS, said, f"to leave it out: {how}")) from None


def _json_of(value: object) -> bytes:
    """Raises TypeError with the name of a type that JSON has not, and ValueError for infinity."""
    try:
        return json.dumps(value, allow_nan=False, default=_as_text).encode()
    except ValueError:  # pandas writes a missing number as NaN
        return json.dumps(_without_nan(value), allow_nan=False, default=_as_text).encode()


def _as_text(value: object) -> str:
    if isinstance(value, date | clock_time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in cast("dict[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in cast("list[object]", value)]
    return None if isinstance(value, float) and math.isnan(value) else value


def _check_object(text: bytes, where: str) -> None:
    try:
        value = msgspec.json.decode(text)
    except ValueError as error:  # msgspec's errors, and text that is not UTF-8
        raise UsageError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply to be read") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected a JSON object, found {type(value).__name__}")
