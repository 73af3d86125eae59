"""slipstream trace RUN: RUN/trace as Chrome-trace JSON, which ui.perfetto.dev shows."""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from common.errors import UsageError
from launch.observe.trace_files import read_batches
from launch.resolve_target import find_run
from launch.results.trace_slices import Process, Slice, Threads

Event = dict[str, Any]
Place = tuple[float, float, Event]  # begin and end of a slice, Unix seconds; its pid and tid


@dataclass(frozen=True)
class Window:
    """Slices of this time, Unix seconds, are written, and whatever was done for the tasks `serials`."""

    steps: tuple[int, ...]  # the first and the last; () when the trace has none
    begin_s: float
    end_s: float
    serials: frozenset[Any]

    def has(self, found: Slice) -> bool:
        begin, end, span = found
        return (begin < self.end_s and end > self.begin_s) or span.args.get("serial") in self.serials


def command(args: argparse.Namespace) -> int:
    """Write the trace, and print how well its clocks agree."""
    run, found = find_run(args.run), dict[tuple[str, str], Process]()
    for batch in read_batches(run):
        found.setdefault((batch.who, batch.host), Process(batch.who, batch.host)).read(batch)
    if not found:
        raise UsageError(f"{run.trace} has no spans: telemetry.trace_mib is 0, or the run has just begun")
    error_s = max(process.settle() for process in found.values())
    ours = ("learner", "broker")  # come first, then the nodes
    processes = [found[key] for key in sorted(found, key=lambda key: (*(key[0] != name for name in ours), key))]
    window = window_of(processes, args.first, args.last)
    trace = Trace(processes, window)
    path = Path(args.out) if args.out else run.path / "trace.json"
    try:
        with path.open("wb") as file:
            file.write(b'{"traceEvents":[\n')
            for number, event in enumerate(trace.events()):
                file.write(b",\n" * (number > 0) + msgspec.json.encode(event))
            about = {"run": run.path.name, **trace.about()}
            file.write(b"],\n" + msgspec.json.encode({"displayTimeUnit": "ms", "otherData": about})[1:])
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be written: {error.strerror or error}") from None
    steps = f"steps {window.steps[0]} to {window.steps[1]}" if window.steps else "no step yet"
    print(f"{path}: {steps}, {trace.count} spans of {len(processes)} processes, {trace.arrows} arrows")
    print(f"Every clock is within {1e3 * error_s:.3g} ms of the broker's. Open the file in https://ui.perfetto.dev")
    if dropped := sum(process.dropped for process in processes):
        print(f"{dropped} spans were dropped during the run")
    return 0


def window_of(processes: list[Process], first: int | None, last: int | None) -> Window:
    """The time of the steps from `first` to `last`, None for no bound. Raises UsageError."""
    learners = [process for process in processes if process.name == "learner"]
    found = [one for process in learners for one in process.slices() if one[2].kind == "step"]
    steps = [one for one in found if isinstance(one[2].args.get("step"), int)]
    numbers: list[Any] = [span.args["step"] for _, _, span in steps]
    there = f"the trace has steps {min(numbers)} to {max(numbers)}" if numbers else "the trace has no step yet"
    low, high = (min(numbers), max(numbers)) if numbers else (0, -1)
    low, high = low if first is None else first, high if last is None else last
    if (first, last) != (None, None) and not (numbers and min(numbers) <= low <= high <= max(numbers)):
        raise UsageError(f"--from {low} --to {high}: {there}")
    inside = [found for found, number in zip(steps, numbers, strict=True) if low <= number <= high]
    return Window(
        (low, high) if numbers else (),
        min((begin for begin, _, _ in inside), default=0.0) if first is not None else float("-inf"),
        max((end for _, end, _ in inside), default=0.0) if last is not None else float("inf"),
        frozenset(serial for *_, span in inside for serial in serials(span.args)),
    )


def serials(step: dict[str, Any]) -> list[int]:
    """The tasks whose groups a step took."""
    return [int(word) for word in str(step.get("serials", "")).split() if word.isdecimal()]


class Trace:
    """The events of the file: process by process, then arrows."""

    def __init__(self, processes: list[Process], window: Window) -> None:
        self._processes, self._window = processes, window
        self._zero_s = min((begin for process in processes for begin, *_ in islice(process.slices(), 1)), default=0.0)
        self.count = self.arrows = 0
        self._ends = defaultdict[str, list[tuple[dict[str, Any], Place]]](list)  # where arrows end, by the kind of span

    def events(self) -> Iterator[Event]:
        for pid, process in enumerate(self._processes, start=1):
            yield from self._of(pid, process)
        for name, (begin, _, source), (reached, _, target) in self._arrows():
            self.arrows += 1
            about = {"name": name, "cat": "arrow", "id": self.arrows}
            yield {"ph": "s", **about, **source, "ts": self._us(begin)}
            yield {"ph": "f", "bp": "e", **about, **target, "ts": self._us(max(begin, reached))}

    def about(self) -> dict[str, Any]:
        """Facts about the file, for its reader."""
        facts = [
            {"pid": pid, "name": p.name, "host": p.host, "clock_error_s": p.error_s, "spans_dropped": p.dropped}
            for pid, p in enumerate(self._processes, start=1)
        ]
        error_s = max(process.error_s for process in self._processes)
        return {"steps": self._window.steps, "zero_unix_s": self._zero_s, "clock_error_s": error_s, "processes": facts}

    def _us(self, at_s: float) -> int:
        """Microseconds since the beginning; whole ones, so that no reader rounds a slice out of the one around it."""
        return round(1e6 * (at_s - self._zero_s))

    def _of(self, pid: int, process: Process) -> Iterator[Event]:
        threads = Threads()
        for begin, end, span in filter(self._window.has, process.slices()):
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
        groups, versions = defaultdict[Any, list[Place]](list), dict[Any, Place]()
        for told, place in self._ends["lease"]:
            if told.get("accepted"):
                groups[told.get("serial")].append(place)
        slack_s = 2 * max(process.error_s for process in self._processes)
        for told, step in self._ends["step"]:
            for serial in serials(told):  # a task may be sampled again: the last lease that began before the step
                before = [place for place in groups[serial] if place[0] <= step[0] + slack_s]
                yield from [("trained", lease, step) for lease in sorted(before, key=lambda lease: lease[0])[-1:]]
        for told, place in self._ends["publish"]:
            versions[told.get("version"), told.get("incarnation")] = place
        for told, flip in self._ends["flip"]:
            if (publish := versions.get((told.get("version"), told.get("incarnation")))) is not None:
                yield "published", publish, flip


def named(pid: int, tid: int, what: str, **args: object) -> Event:
    """A fact about a process, or about a thread."""
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}
