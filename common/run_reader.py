"""Typed readers of a run's files of JSON lines, also while they are written; lines that are cut are left out."""

import math
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, cast, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from common.errors import UsageError
from common.json_lines import decoder_of, lines_of
from common.metrics import EvaluationMetrics, Metrics, OptFloat, OptInt, SftMetrics, StepMetrics
from common.spans import SpanBatch

LATEST = slice(-10, None)  # the steps whose mean stands for the present
RECENT, EVALUATIONS = 64, 1000  # lines that a RecentTail keeps
READ_BYTES = 1 << 24  # at once; a longer line is passed over

T = TypeVar("T")
Line = TypeVar("Line", bound=Metrics)
Step = TypeVar("Step", bound=StepMetrics | SftMetrics)
# By the type of a metric: the type that its JSON may have, and the value of a metric that a line lacks.
ON_A_LINE: dict[Any, tuple[Any, Any]] = {
    int: (int, 0),
    float: (float | None, math.nan),
    str: (str, ""),
    OptInt: (int, UNSET),
    OptFloat: (float | None, UNSET),
    float | None: (float | None, None),
    list[int]: (list[int], []),
    list[float]: (list[float | None], []),
    dict[str, int]: (dict[str, int], {}),
    dict[str, float]: (dict[str, float | None], {}),
}


class LineKey(msgspec.Struct, frozen=True):
    """The fields that every line of RUN/metrics.jsonl has. A line without a kind is a step."""

    step: Annotated[int, Meta(ge=0, lt=1 << 62)]
    kind: str | None = None


def metrics_decoder(kind: type[Line]) -> Callable[[bytes], Line | None]:
    """A function from a line of metrics to the `kind` that it is, None for other lines.

    The writer's null is read as NaN, because JSON has no numbers that are not finite. Other releases may lack a metric
    or write it differently: it is UNSET then, or NaN, 0 or empty where this release always writes it.
    """
    key_of = decoder_of(LineKey)
    whole = decoder_of(kind)
    parts = decoder_of(dict[str, Raw])
    hints = get_type_hints(kind)
    decoders = {name: msgspec.json.Decoder(ON_A_LINE[hint][0]) for name, hint in hints.items()}

    def read(name: str, value: Raw | None) -> Any:
        blank = ON_A_LINE[hints[name]][1]
        try:
            found = blank if value is None else decoders[name].decode(value)
        except (ValueError, RecursionError):
            return blank
        return found if hints[name] == float | None else _without_null(found)

    def decode(line: bytes) -> Line | None:
        key = key_of(line)
        if key is None or key.kind != kind.__struct_config__.tag:
            return None
        if (found := whole(line)) is not None:
            return found
        given = parts(line) or {}
        return kind(**{name: read(name, given.get(name)) for name in hints})

    return decode


def line_decoder(kind: type[Step]) -> Callable[[bytes], Step | EvaluationMetrics | None]:
    """As `metrics_decoder`, for steps of this kind and for evaluations."""
    step, evaluation = metrics_decoder(kind), metrics_decoder(EvaluationMetrics)

    def decode(line: bytes) -> Step | EvaluationMetrics | None:
        return step(line) or evaluation(line)

    return decode


def _without_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null(each) for each in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in cast("dict[str, object]", value).items()}
    return math.nan if value is None else value


def no_file(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path}: expected a file with one JSON line per step, found {error.strerror or error}")


class LineTail(Generic[T]):
    """The whole lines of a file that are a T; only what was added is read again."""

    def __init__(self, path: Path, decode: Callable[[bytes], T | None], offset: int = 0, inode: int = -1) -> None:
        """`decode` returns None for a line that is passed over. `offset`, `inode`: where an earlier reader was."""
        self.path = path
        self.offset = offset
        self.inode = inode
        self._decode = decode

    def read(self, limit: int = READ_BYTES) -> tuple[bool, list[T]]:
        """(whether the file was replaced, so that earlier lines are void; the new lines). Raises OSError.

        At most `limit` bytes are read, and as many again while they have no such line. So there may be more lines when
        some are returned. A file that does not exist has none.
        """
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                replaced = self.inode != -1 and (stat.st_ino != self.inode or stat.st_size < self.offset)
                self.offset = 0 if replaced else self.offset
                self.inode = stat.st_ino
                while True:
                    file.seek(self.offset)
                    data = file.read(limit)
                    whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == limit else b"")
                    self.offset += len(whole)
                    lines = [line for line in map(self._decode, whole.split(b"\n")) if line is not None]
                    if lines or not whole:
                        return replaced, lines
        except FileNotFoundError:
            return False, []

    def all(self) -> Iterator[T]:
        """Every new line, read in parts. Raises OSError."""
        while lines := self.read()[1]:
            yield from lines


class MetricsTail(Generic[Step]):
    """Steps and evaluations seen so far, one entry per step; a resumed learner's rewritten file is read again."""

    def __init__(self, path: Path | None, kind: type[Step]) -> None:
        """`path` is None for a run without a folder, which has no lines."""
        self.lines: list[Step] = []
        self.evaluations: list[EvaluationMetrics] = []
        self._tail = LineTail(path, line_decoder(kind)) if path else None

    def read(self) -> tuple[bool, list[Step | EvaluationMetrics]]:
        """As LineTail.read. Raises UsageError when it is no file, or may not be read."""
        if self._tail is None:
            return False, []
        try:
            return self._tail.read()
        except OSError as error:
            raise no_file(self._tail.path, error) from None

    def take(self, replaced: bool, lines: Iterable[Step | EvaluationMetrics]) -> None:
        if replaced:
            self.lines = []
            self.evaluations = []
        for line in lines:
            if isinstance(line, EvaluationMetrics):
                self.evaluations.append(line)
            else:
                self.lines.append(line)

    def update(self) -> None:
        """Read everything that is new; raises as `read`."""
        replaced, lines = self.read()
        while replaced or lines:
            self.take(replaced, lines)
            replaced, lines = self.read()

    @property
    def last(self) -> Step | None:
        return self.lines[-1] if self.lines else None

    def series(self, metric: Callable[[Step], float | UnsetType]) -> list[float]:
        """The values of a metric over the steps that have one; NaN is none."""
        return known(map(metric, self.lines))

    def mean(self, metric: Callable[[Step], float | UnsetType], steps: slice = slice(None)) -> float | None:
        """The mean of a metric over those `steps` that have it; None when there is none."""
        return mean(self.series(metric)[steps])


class RecentTail(MetricsTail[StepMetrics]):
    """`lines` and `evaluations` have only the newest ones; the other attributes are of all steps."""

    def __init__(self, path: Path | None) -> None:
        """As MetricsTail."""
        super().__init__(path, StepMetrics)
        self._forget()

    def _forget(self) -> None:
        self.steps = 0
        self.rewards = array("d")  # the mean of each step that has one
        self.expired = 0  # tokens
        self.failed = Counter[str]()  # samples, by stop reason

    def take(self, replaced: bool, lines: Iterable[StepMetrics | EvaluationMetrics]) -> None:
        if replaced:
            self._forget()
        lines = list(lines)
        for line in lines:
            if isinstance(line, StepMetrics):
                self.steps += 1
                self.rewards.extend(known([line.reward_mean]))
                self.expired += line.tokens_expired
                self.failed.update(line.samples_failed_by_reason)
        super().take(replaced, lines)
        del self.lines[:-RECENT], self.evaluations[:-EVALUATIONS]


def read_recent(path: Path | None) -> RecentTail:
    """As `read_tail`, in bounded memory."""
    tail = RecentTail(path)
    tail.update()
    return tail


def read_tail(path: Path | None, kind: type[Step]) -> MetricsTail[Step]:
    """The metrics that a run has by now; raises UsageError as MetricsTail.update."""
    tail = MetricsTail(path, kind)
    tail.update()
    return tail


def known(values: Iterable[float | UnsetType | None]) -> list[float]:
    return [value for value in values if isinstance(value, int | float) and not math.isnan(value)]


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def ends(values: Sequence[float]) -> dict[str, float | None]:
    """The means of the first and of the last steps, as reports name them."""
    return {"first_5_steps": mean(values[:5]), "last_10_steps": mean(values[LATEST])}


def read_batches(folder: Path, since_s: float = 0.0) -> Iterator[SpanBatch]:
    """The batches of every process in RUN/trace, in their order; files that are removed meanwhile are left out.

    Files that were last written before `since_s`, Unix time, are left out, too.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with suppress(OSError):
            if path.stat().st_mtime >= since_s:
                yield from lines_of(path.read_bytes(), SpanBatch)
