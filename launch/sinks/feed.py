"""Points of metrics for a tracker, its place in metrics.jsonl, and the thread that feeds it; docs/sinks.md."""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET

from common.config.schema import BaseConfig
from common.metrics import EvaluationMetrics, Metrics, SftMetrics, StepMetrics, declarations
from common.process.run_dir import RunDir, write_json
from common.run_reader import LineTail, line_decoder

logger = logging.getLogger(__name__)

POLL_S = 1.0
FEED_BYTES = 1 << 20  # read between two flushes, and by Prometheus at its start
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 60.0
UNIX_TIMES = 1e9  # a `Cursor.start` from here on is a time, of a line that an earlier version wrote
# The group of a metric follows from its declared unit.
GROUPS = {"s": "time", "tokens": "tokens", "bytes": "weights", "steps": "staleness", "versions": "staleness"}
GROUPS |= {"groups": "broker", "samples": "samples", "nodes": "broker", "episodes": "fleet", "requests": "fleet"}
GROUP_OF = {known.name: GROUPS.get(known.unit, "train") for known in declarations(StepMetrics)}


class FedRun(NamedTuple):
    """The run that is fed; `id` is unique, and the same after a restart."""

    run: RunDir
    config: BaseConfig
    id: str


class Point(msgspec.Struct, frozen=True):
    """Values of one step, or of an evaluation: then `step` is the policy version."""

    step: int
    time_s: float
    values: dict[str, float]
    dataset: str = ""  # set for an evaluation
    again: bool = False  # a resumed learner does this step again: all points from it on are void


class Cursor(msgspec.Struct):
    """RUN/sinks/NAME.json: up to where a tracker has the metrics, moved when it has flushed."""

    state: str = "starting"  # starting, feeding, ended, or the error after which it tries again
    offset: int = 0
    inode: int = -1
    step: int = -1  # the newest one that was fed
    start: float = -1.0  # which start of the learner wrote it; without one, the Unix time of the line
    evaluated: dict[str, int] = {}  # newest policy version by dataset

    def take(self, lines: Iterable[Metrics]) -> list[Point]:
        """The points of lines that were not fed before; the same lines may come again in a replaced file."""
        points: list[Point] = []
        for line in lines:
            if not math.isnan(line.time_s):  # a learner writes it
                points += self._evaluation(line) if isinstance(line, EvaluationMetrics) else self._step(line)
        return points

    def _step(self, line: StepMetrics | SftMetrics) -> Iterator[Point]:
        start = line.time_s if line.incarnation is UNSET else float(line.incarnation)
        again = line.step <= self.step
        # Lines that tell their start are newer than all that do not: a run may continue with a later version.
        newer = (start < UNIX_TIMES, start) > (self.start < UNIX_TIMES, self.start)
        if again and newer:
            self.evaluated = {name: min(version, line.step) for name, version in self.evaluated.items()}
        if not again or newer:
            self.step = line.step
            self.start = start
            yield Point(line.step, line.time_s, flat(line), again=again)

    def _evaluation(self, line: EvaluationMetrics) -> Iterator[Point]:
        if line.policy_version > self.evaluated.get(line.dataset, -1):
            self.evaluated = self.evaluated | {line.dataset: line.policy_version}
            name = re.sub(r"[^\w.-]+", "_", line.dataset).strip("._")
            yield Point(line.policy_version, line.time_s, flat(line, f"evaluation/{name}"), dataset=name)


def leaves(values: dict[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """('a/b/0', value) of every value in nested lists and mappings."""
    for name, value in values.items():
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from leaves({f"{name}{separator}{key}": inner for key, inner in items}, separator)
        else:
            yield name, value


def flat(line: Metrics, group: str = "") -> dict[str, float]:
    """The numbers of a line, by group and name; the group is that of the metric unless it is given."""
    kept = {key: value for key, value in msgspec.to_builtins(line).items() if key not in ("step", "time_s")}
    named = leaves({f"{group or GROUP_OF.get(key, 'train')}/{key}": value for key, value in kept.items()}, "/")
    return {name: float(value) for name, value in named if type(value) in (int, float) and math.isfinite(value)}


class Sink(Protocol):
    """A connected tracker. Every call may raise anything, and may hang."""

    def write(self, points: Sequence[Point]) -> None: ...  # returns when the tracker has them
    def close(self) -> None: ...


class Feed(threading.Thread):
    """Feeds one sink until `closing` is set and everything was fed."""

    def __init__(self, name: str, make: Callable[[Cursor], Sink], job: FedRun) -> None:
        """`make` connects the sink, for lines behind the cursor."""
        super().__init__(name=name, daemon=True)
        run = job.run
        self.closing = threading.Event()
        self.cursor = Cursor()
        self._make = make
        self._metrics = run.metrics
        self._decode = line_decoder(job.config.step_metrics)
        self._file = run.sinks / f"{name}.json"
        self._wait_s = FIRST_BACKOFF_S
        with suppress(OSError, ValueError):
            if name == "prometheus":  # it shows the newest state only
                self.cursor.offset = max(0, run.metrics.stat().st_size - FEED_BYTES)
            else:
                kept = msgspec.json.decode(self._file.read_bytes(), type=Cursor)
                self.cursor = msgspec.structs.replace(kept, state="starting")

    def run(self) -> None:
        while self.cursor.state != "ended":
            try:
                with closing(self._make(self.cursor)) as sink:
                    self._feed(sink)
                self._keep(self.cursor, "ended")
            except Exception as error:  # a tracker's library may raise anything
                with suppress(OSError):
                    self._keep(self.cursor, f"{type(error).__name__}: {error}"[:500])
                time.sleep(self._wait_s)
                self._wait_s = min(2 * self._wait_s, LONGEST_BACKOFF_S)

    def lag_bytes(self) -> int:
        """Bytes of metrics.jsonl that the tracker does not have."""
        with suppress(FileNotFoundError):
            stat = self._metrics.stat()
            return stat.st_size - (self.cursor.offset if self.cursor.inode in (-1, stat.st_ino) else 0)
        return 0

    def _feed(self, sink: Sink) -> None:
        tail = LineTail(self._metrics, self._decode, self.cursor.offset, self.cursor.inode)
        while True:
            last = self.closing.is_set()
            _, lines = tail.read(FEED_BYTES)
            cursor = msgspec.structs.replace(self.cursor)
            if points := cursor.take(lines):
                sink.write(points)
            moved = (tail.offset, tail.inode) != (cursor.offset, cursor.inode)
            cursor.offset, cursor.inode = tail.offset, tail.inode
            self._keep(cursor, "feeding")
            self._wait_s = FIRST_BACKOFF_S
            if not moved:
                if last:
                    return
                self.closing.wait(POLL_S)

    def _keep(self, cursor: Cursor, state: str) -> None:
        """Write where the tracker is, and log a change of its state once."""
        if (cursor := msgspec.structs.replace(cursor, state=state)) == self.cursor:
            return
        if state != self.cursor.state:
            level = logging.INFO if state in ("feeding", "ended") else logging.WARNING
            logger.log(level, "%s: %s, %d bytes behind", self.name, state, self.lag_bytes())
        self.cursor = cursor
        write_json(self._file, cursor)
