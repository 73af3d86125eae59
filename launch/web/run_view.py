"""One run as the page shows it: read from its files, and asked from its broker as an observer."""

import logging
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec

from broker.contract import LedgerEntry
from broker.diagnosis.stalls import Stall
from common.config.schema import Config
from common.errors import SlipstreamError
from common.process.run_dir import RunDir
from launch.observe import stall_text, waste_view
from launch.observe.job_view import figures
from launch.observe.ledger import observe_ledger
from launch.observe.observation import Observation, as_json, observe
from launch.resolve_target import Target, config_of
from launch.web.curves import BoundedTail
from launch.web.files import inside, outside
from launch.web.lanes import Lanes

logger = logging.getLogger(__name__)
LEDGER_EVERY_S, LEDGER_SHARE = 5.0, 0.05  # A long ledger is asked for in this share of the time at most.
TAB_OF = {"straggler": "tasks", "environment": "tasks"}  # kinds of stalls that a task ends; nodes end the others


class Cursor:
    """How much a browser has: the state, and the curves of a generation up to a bucket."""

    def __init__(self) -> None:
        self.state, self.generation, self.bucket, self.seen = b"", -1, 0, -1


class RunView:
    """Threads call `read`, `observe` and `news`; nothing here writes to the run."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.tail, self.lanes = run, BoundedTail(run.metrics), Lanes(run)
        self.config: Config | None = None
        self.nodes: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {"name": run.path.resolve().name, "path": str(run.path)}
        self._encoded = msgspec.json.encode(self.state)
        self._seen: Observation | None = None
        self._why = ""  # there is no observation
        self._caught_up = False  # with the metrics
        self._lock = threading.Lock()
        self._ledger: tuple[float, list[LedgerEntry]] = (0.0, [])
        self._ledger_lock = threading.Lock()

    def read(self) -> bool:
        """Read one part of what is new in the metrics; whether anything was."""
        if not inside(self.run, self.run.metrics):
            self._caught_up = True
            return False
        replaced, lines = self.tail.tail.read()  # takes long at the start, and browsers wait for the lock
        with self._lock:
            self.tail.take(replaced, lines)
        self._caught_up |= not lines
        return replaced or bool(lines)

    def read_lanes(self) -> None:
        """Read what is new in trace and events, once the metrics are read, which a browser shows first."""
        if self._caught_up and inside(self.run, self.run.events) and inside(self.run, self.run.trace):
            self.lanes.update()

    def observe(self) -> None:
        """Ask the broker, or read what it left behind."""
        seen, self._why = None, ""
        leaving = outside(self.run)
        try:
            if leaving:
                raise SlipstreamError(f"{', '.join(leaving)} lead out of the run's folder and are not read")
            if not self.run.path.is_dir():
                raise SlipstreamError("the run's folder does not exist yet")
            self.config = config_of(self.run)
            credentials = self.config.broker.credentials if self.config else None
            seen = observe(Target(self.run, credentials))
        except (SlipstreamError, OSError) as error:
            self._why = str(error)
        now_s = time.time()
        if seen is not None:
            for node in seen.status.nodes if seen.live else ():
                state = node.report.state if node.alive else "dead"
                self.lanes.observed(node.report.node_id, state, node.report.since_s + node.last_seen_s, now_s)
            if seen.live and seen.status.learner is not None:
                self.lanes.observed("learner", seen.learner_state, seen.status.learner.since_s, now_s)
        self._seen = seen

    def describe(self) -> None:
        """Make `state` from what is known by now."""
        seen, config, tail = self._seen, self.config, self.tail
        name = config.run.name if config else self.run.path.resolve().name
        state: dict[str, Any] = {"name": name, "path": str(self.run.path), "note": self._why, "live": False}
        with self._lock:
            lines, state["steps"] = tail.lines, tail.seen
            state["ages"] = {"recent": [sum(c) for c in zip(*tail.ages_of, strict=True)], "all": tail.ages.tolist()}
            state["evaluations"] = list(tail.evaluations)
        state["bound"] = config.staleness.max if config else None
        state["wanted"] = config.run.steps if config else None
        state["failed"] = waste_view.summed(
            {k: v for k, v in found.items() if type(v) is int}
            for found in (line.get("samples_failed_by_reason") for line in lines)
            if isinstance(found, dict)
        )
        with suppress(TypeError, ValueError):  # a line of another release
            state["figures"] = figures(config, seen, tail) if config else {}
        if seen is not None:
            found = as_json(None, seen)
            nodes = found.pop("nodes")
            state |= found | {"name": name, "path": str(self.run.path), "failed": found.pop("samples_failed")}
            state["stalls"] = [self._stall(stall, seen) for stall in stall_text.stalls_of(seen)[: stall_text.SHOWN]]
            state["wasted"] = waste_view.sentence(seen.status)
            state["states"] = Counter(node["state"] for node in nodes)
            versions = Counter(node["policy_version"] for node in nodes)
            state["versions"] = sorted(versions.items(), reverse=True)[:16]
            self.nodes = nodes
        encoded = msgspec.json.encode(state)
        with self._lock:
            self.state, self._encoded = state, encoded

    def news(self, cursor: Cursor) -> dict[str, Any] | None:
        """The part that a browser does not have yet; None for nothing."""
        with self._lock:
            new: dict[str, Any] = {}
            if cursor.state is not self._encoded and cursor.state != self._encoded:
                cursor.state, new["state"] = self._encoded, self.state
            curves, seen = self.tail.curves, self.tail.seen
            if (curves.generation, seen) != (cursor.generation, cursor.seen):
                first = cursor.bucket if curves.generation == cursor.generation else 0
                new["curves"] = curves.since(first)
                cursor.generation, cursor.seen, cursor.bucket = curves.generation, seen, max(0, curves.used - 1)
            return new or None

    def ledger(self) -> list[LedgerEntry]:
        """Every task, at most some seconds old; raises SlipstreamError when there is no ledger."""
        with self._ledger_lock:
            due_s, entries = self._ledger
            if time.monotonic() < due_s:
                return entries
            if not all(inside(self.run, path) for path in self.run.path.glob("ledger*.json")):
                raise SlipstreamError("a ledger leads out of the run's folder and is not read")
            began_s = time.monotonic()
            credentials = self.config.broker.credentials if self.config else None
            entries = observe_ledger(Target(self.run, credentials))
            took_s = time.monotonic() - began_s
            self._ledger = (time.monotonic() + max(LEDGER_EVERY_S, took_s / LEDGER_SHARE), entries)
            return entries

    @staticmethod
    def _stall(stall: Stall, seen: Observation) -> dict[str, Any]:
        """A stall in words, and the place of the page that shows what would end it."""
        text = f"{stall.waits_for} {stall.release} {stall.who}"
        names = {node.report.node_id for node in seen.status.nodes}
        node = next((word for word in re.split(r"[\s,;:()]+", text) if word in names), "")
        task = re.search(r"\btasks? (\d+)", f"{stall.who} {stall.waits_for}")
        tab = TAB_OF.get(stall.kind, "nodes" if node else "timeline")
        found = task[1] if tab == "tasks" and task else node if tab == "nodes" else ""
        return msgspec.to_builtins(stall) | {
            "text": stall_text.sentence(stall),
            "urgent": stall.kind in stall_text.STOPPING,
            "tab": tab,
            "find": found,
        }
