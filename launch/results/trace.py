"""slipstream trace RUN: RUN/trace as Chrome-trace JSON, which ui.perfetto.dev shows."""

import argparse
import heapq
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from common.errors import UsageError
from common.run_reader import read_batches
from common.span_buffer import DRIFT
from common.spans import Span, SpanBatch
from launch.resolve_target import find_run

KNOT_S = 1.0  # between two offsets of a clock that are used
JOIN_S = 1e-3  # pieces of one state that are closer than this are one slice
Slice = tuple[float, float, Span]  # its begin and end on the broker's clock, Unix seconds
Event = dict[str, Any]
Place = tuple[float, float, Event]  # begin and end of a slice, Unix seconds; its pid and tid


def command(args: argparse.Namespace) -> int:
    run = find_run(args.run)
    found = dict[tuple[bool, bool, str, str], Process]()
    for batch in read_batches(run.trace):
        key = (batch.who != "learner", batch.who != "broker", batch.who, batch.host)  # these two come first
        found.setdefault(key, Process(batch.who, batch.host)).read(batch)
    if not found:
        raise UsageError(f"{run.trace} has no spans: telemetry.trace_mib is 0, or the run has just begun")
    processes = [found[key] for key in sorted(found)]
    error_s = max(process.settle() for process in processes)
    trace = Trace(processes, args.first, args.last)
    path = Path(args.out) if args.out else run.path / "trace.json"
    facts = [
        {"name": process.name, "host": process.host, "clock_error_s": process.error_s, "spans_dropped": process.dropped}
        for process in processes
    ]
    about = {"run": run.path.name, "steps": trace.steps, "zero_unix_s": trace.zero_s, "clock_error_s": error_s}
    try:
        with path.open("wb") as file:
            try:
                file.write(b'{"traceEvents":[\n')
                for number, event in enumerate(trace.events()):
                    file.write(b",\n" * (number > 0) + msgspec.json.encode(event))
                rest = {"displayTimeUnit": "ms", "otherData": about | {"processes": facts}}
                file.write(b"],\n" + msgspec.json.encode(rest)[1:])
                file.flush()
            except BaseException:
                if path.is_file():  # no device
                    path.unlink()
                raise
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be written: {error.strerror or error}") from None
    steps = f"steps {trace.steps[0]} to {trace.steps[1]}" if trace.steps else "no step yet"
    print(f"{path}: {steps}, {trace.count} spans of {len(processes)} processes, {trace.arrows} arrows")
    print(f"Every clock is within {1e3 * error_s:.3g} ms of the broker's. Open the file in https://ui.perfetto.dev")
    if dropped := sum(process.dropped for process in processes):
        print(f"{dropped} spans were dropped during the run, those of episodes and their turns first")
    return 0


class Process:
    """A process of the trace; `name` is learner, broker or a node id."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.dropped = 0
        self._spans: list[tuple[float, float, bytes]] = []  # begin and end on its own clock; JSON takes less memory
        self._clock: list[tuple[float, float, float]] = []  # own time, offset and its error
        self._state: tuple[int, Span] | None = None  # the newest one, and where it is in `_spans`

    def read(self, batch: SpanBatch) -> None:
        self.dropped = max(self.dropped, batch.dropped)
        for span in batch.spans:
            place = len(self._spans)
            begin = span.start_s
            end = span.start_s + span.duration_s
            if span.kind == "state":
                if self._state is not None and self._state[1].name == span.name:
                    before = self._state[1].start_s + self._state[1].duration_s
                    if abs(begin - before) < JOIN_S:
                        place = self._state[0]
                        begin = self._state[1].start_s
                        span = msgspec.structs.replace(span, start_s=begin, duration_s=end - begin)
                self._state = place, span
            self._spans[place : place + 1] = [(begin, end, msgspec.json.encode(span))]
            if not self._clock or end > self._clock[-1][0] + KNOT_S:
                self._clock.append((end, batch.offset_s, batch.error_s))

    def settle(self) -> float:
        """All batches are read. Returns the largest error of this clock in seconds: later round trips help, too."""
        for i in range(len(self._clock) - 2, -1, -1):
            (own, _, error), (later, offset, smaller) = self._clock[i : i + 2]
            if smaller + DRIFT * (later - own) < error:
                self._clock[i] = own, offset, smaller + DRIFT * (later - own)
        self.error_s = max((error for *_, error in self._clock), default=0.0)
        return self.error_s

    def at(self, own_s: np.ndarray) -> np.ndarray:
        """[n] own times on the broker's clock. Offsets are interpolated, so that slices which nest still nest."""
        return own_s + (np.interp(own_s, *np.array(self._clock).T[:2]) if self._clock else 0.0)

    def slices(self) -> Iterator[Slice]:
        """In the order of their beginning, outer ones before those inside."""
        begins, ends = (self.at(np.array([span[i] for span in self._spans])) for i in (0, 1))
        for i in np.lexsort((-ends, begins)):
            yield float(begins[i]), float(ends[i]), msgspec.json.decode(self._spans[i][2], type=Span)


class Threads:
    """Gives each slice of a process a thread where it nests. Slices come in the order of their beginning."""

    def __init__(self) -> None:
        self.names: list[str] = []  # the thread's number is one more than the place
        self._open: dict[str, tuple[int, list[float]]] = {}  # per track its thread, and the ends of its open slices
        self._free: dict[str, list[tuple[float, int]]] = defaultdict(list)  # heaps: when which thread of a row is free
        self._counts: dict[str, int] = defaultdict(int)

    def place(self, track: str, begin: float, end: float) -> int:
        thread, ends = self._open.get(track, (0, []))
        while ends and ends[-1] <= begin:
            ends.pop()
        if ends and end <= ends[-1]:
            ends.append(end)
            return thread
        row = track.partition("/")[0]
        free = self._free[row]
        if free and free[0][0] <= begin:
            _, thread = heapq.heappop(free)
        else:
            self._counts[row] += 1
            self.names.append(f"{row} {self._counts[row]}" if self._counts[row] > 1 else row)
            thread = len(self.names)
        heapq.heappush(free, (end, thread))
        self._open[track] = thread, [end]
        return thread


def serials(step: dict[str, Any]) -> list[int]:
    """The tasks whose groups a step took."""
    return [int(word) for word in str(step.get("serials", "")).split() if word.isdecimal()]


class Trace:
    def __init__(self, processes: list[Process], first: int | None, last: int | None) -> None:
        """Take the steps from `first` to `last`, None for no bound. Raises UsageError for steps that are not there."""
        self._processes = processes
        self.count = 0
        self.arrows = 0
        self.zero_s = min((begin for process in processes for begin, *_ in islice(process.slices(), 1)), default=0.0)
        self._ends = defaultdict[str, list[tuple[dict[str, Any], Place]]](list)  # where arrows end, by the kind of span
        learners = (one for process in processes if process.name == "learner" for one in process.slices())
        found = [(one[2].args.get("step"), one) for one in learners if one[2].kind == "step"]
        steps = [(number, one) for number, one in found if isinstance(number, int)]
        numbers = [number for number, _ in steps]
        there = f"the trace has steps {min(numbers)} to {max(numbers)}" if numbers else "the trace has no step yet"
        low = min(numbers, default=0) if first is None else first
        high = max(numbers, default=-1) if last is None else last
        if (first, last) != (None, None) and not (numbers and min(numbers) <= low <= high <= max(numbers)):
            raise UsageError(f"--from {low} --to {high}: {there}")
        self.steps = (low, high) if numbers else ()
        inside = [one for number, one in steps if low <= number <= high]
        self._begin_s = float("-inf") if first is None else min((begin for begin, *_ in inside), default=0.0)
        self._end_s = float("inf") if last is None else max((end for _, end, _ in inside), default=0.0)
        self._serials = {serial for *_, span in inside for serial in serials(span.args)}

    def events(self) -> Iterator[Event]:
        for pid, process in enumerate(self._processes, start=1):
            yield from self._of(pid, process)
        for name, (begin, _, source), (reached, _, target) in self._arrows():
            self.arrows += 1
            about = {"name": name, "cat": "arrow", "id": self.arrows}
            yield {"ph": "s", **about, **source, "ts": self._us(begin)}
            yield {"ph": "f", "bp": "e", **about, **target, "ts": self._us(max(begin, reached))}

    def _us(self, at_s: float) -> int:
        """Microseconds since the beginning; whole ones, so that no reader rounds a slice out of the one around it."""
        return round(1e6 * (at_s - self.zero_s))

    def _of(self, pid: int, process: Process) -> Iterator[Event]:
        threads = Threads()
        for begin, end, span in process.slices():
            if not (begin < self._end_s and end > self._begin_s) and span.args.get("serial") not in self._serials:
                continue
            tid = threads.place(span.track or span.kind, begin, end)
            self.count += 1
            where = {"pid": pid, "tid": tid}
            if span.kind in ("lease", "step", "publish", "flip"):
                self._ends[span.kind].append((span.args, (begin, end, where)))
            about = {"name": span.name, "cat": span.kind, "args": span.args}
            yield {"ph": "X", **where, "ts": self._us(begin), "dur": self._us(end) - self._us(begin), **about}
        yield named(pid, 0, "process_name", name=f"{process.name} on {process.host}")
        yield named(pid, 0, "process_labels", labels=f"clock within {1e3 * process.error_s:.3g} ms")
        yield named(pid, 0, "process_sort_index", sort_index=pid)
        for tid, name in enumerate(threads.names, start=1):
            yield named(pid, tid, "thread_name", name=name)

    def _arrows(self) -> Iterator[tuple[str, Place, Place]]:
        """From an accepted group to each step that trained it, and from a publish to its flips."""
        groups = defaultdict[Any, list[Place]](list)
        for told, place in self._ends["lease"]:
            if told.get("accepted"):
                groups[told.get("serial")].append(place)
        slack_s = 2 * max(process.error_s for process in self._processes)
        for told, step in self._ends["step"]:
            for serial in serials(told):  # a task may be sampled again: the last lease that began before the step
                before = [place for place in groups[serial] if place[0] <= step[0] + slack_s]
                yield from [("trained", lease, step) for lease in sorted(before, key=lambda lease: lease[0])[-1:]]
        versions = {(told.get("version"), told.get("incarnation")): place for told, place in self._ends["publish"]}
        for told, flip in self._ends["flip"]:
            if (publish := versions.get((told.get("version"), told.get("incarnation")))) is not None:
                yield "published", publish, flip


def named(pid: int, tid: int, what: str, **args: object) -> Event:
    """A fact about a process, or about a thread."""
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}
