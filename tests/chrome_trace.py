"""The rules of Chrome's trace format for a whole file, checked without the code that writes it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
NEEDS = {"X": {"ts", "dur", "name"}, "M": {"name", "args"}, "i": {"ts", "name", "s"}, "C": {"ts", "name", "args"}}
NEEDS |= {"s": {"ts", "id", "name", "cat"}, "f": {"ts", "id", "name", "cat", "bp"}}


class ChromeTrace:
    """A trace file that keeps the rules; raises AssertionError for one that does not."""

    def __init__(self, path: Path) -> None:
        self.document = json.loads(path.read_text())
        self.events: list[Event] = self.document["traceEvents"]
        for event in self.events:
            assert event.keys() >= NEEDS[event["ph"]] | {"pid", "tid"}, event
        self.processes = {e["pid"]: e["args"]["name"] for e in self.of("M") if e["name"] == "process_name"}
        threads = [(e["pid"], e["tid"]) for e in self.of("M") if e["name"] == "thread_name"]
        assert len(threads) == len(set(threads))
        assert {e["pid"] for e in self.events} <= self.processes.keys(), "every process has a name"
        assert {(e["pid"], e["tid"]) for e in self.of("X")} == set(threads), "every thread has a name"
        assert all(e["ts"] >= 0 for e in self.events if "ts" in e)
        self._check_slices()
        self.arrows = self._checked_arrows()

    def of(self, phase: str, **wanted: Any) -> list[Event]:
        return [e for e in self.events if e["ph"] == phase and all(e.get(k) == v for k, v in wanted.items())]

    def slices(self, kind: str, process: str = "") -> list[Event]:
        """The slices of a kind, in processes whose name begins so."""
        return [e for e in self.of("X", cat=kind) if self.processes[e["pid"]].startswith(process)]

    def _check_slices(self) -> None:
        """In every thread slices nest; in every process they are in the order of their beginning."""
        ends: dict[tuple[int, int], list[float]] = defaultdict(list)
        newest: dict[int, float] = defaultdict(float)
        for event in self.of("X"):
            assert (
                type(event["ts"]) is type(event["dur"]) is int
                and event["dur"] >= 0
                and event["ts"] >= newest[event["pid"]]
            ), event
            newest[event["pid"]] = event["ts"]
            open_ends = ends[event["pid"], event["tid"]]
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1], f"{event} ends after the slice around it"
            open_ends.append(end)

    def _checked_arrows(self) -> list[tuple[Event, Event]]:
        """(slice, slice) of every arrow: it has two ends, both inside of a slice, and goes forward."""
        starts, finishes = self.of("s"), {e["id"]: e for e in self.of("f")}
        assert len({e["id"] for e in starts}) == len(starts) == len(self.of("f"))
        for start in starts:
            finish = finishes[start["id"]]
            assert (start["name"], start["cat"]) == (finish["name"], finish["cat"]) and start["ts"] <= finish["ts"]
        return [(self._around(start), self._around(finishes[start["id"]])) for start in starts]

    def _around(self, end: Event) -> Event:
        """The innermost slice of the thread at this time, to which a viewer ties the end of an arrow."""
        around = [e for e in self.of("X", pid=end["pid"], tid=end["tid"]) if e["ts"] <= end["ts"] <= e["ts"] + e["dur"]]
        return min(around, key=lambda e: e["dur"])
