"""One run as the page shows it: read from its files, and asked from its broker as an observer."""

import math
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from broker.contract import LEARNER_ENDED, LedgerEntry
from broker.diagnosis.stalls import Stall
from common.config.schema import Config
from common.errors import SlipstreamError
from common.json_lines import Event, decoder_of
from common.metrics import AGE_CLASSES, EvaluationMetrics, StepMetrics
from common.process.run_dir import RunDir
from common.run_reader import LATEST, LineTail, MetricsTail, RecentTail, known, read_batches
from launch.observe.curves import Curves
from launch.observe.job_view import SHOWN_STALLS, STOPPING, figures, stall_sentence, stalls_of, waste_sentence
from launch.observe.ledger import observe_ledger
from launch.observe.observation import Observation, as_json, observe, outcome_of
from launch.resolve_target import Target, config_of
from learner.loop.run_files import read_record

# ---------------------------------------------------------------- lanes


PIECES = 256  # kept of a process
LANES = 2048  # processes that are kept, those with the newest states
# kind of an event: the field that names a process, and the state that follows
ENDS = {
    "leave": ("node", "left"), "node_lost": ("node", "dead"),
    "role_crashed": ("role", "dead"), "role_gave_up": ("role", "dead"), "role_killed": ("role", "dead"),
}  # fmt: skip
LATE_S = 60.0  # spans of a node may come so much later than those of others


class Piece(NamedTuple):
    start_s: float  # Unix time
    end_s: float
    state: str


class Lanes:
    """The newest states of every process, in bounded memory; threads may call `page`."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.trace
        self._events = LineTail(run.events, decoder_of(Event))
        self._pieces: dict[str, deque[Piece]] = defaultdict(lambda: deque(maxlen=PIECES))
        self._read: dict[str, float] = {}  # start of the newest state, on the clock of the process
        self._ends: dict[str, deque[tuple[float, str]]] = defaultdict(lambda: deque(maxlen=PIECES))
        self._end_s = 0.0
        self._lock = threading.Lock()

    def page(self, text: str, rows: slice, window_s: float) -> dict[str, Any]:
        """The lanes of the processes whose names contain `text`, over the last `window_s` seconds that are known."""
        with self._lock:
            self._update()
            names = sorted((who for who in self._pieces if text in who), key=lambda who: ("learner" not in who, who))
            end_s = max([self._end_s, *(ends[-1][0] for ends in self._ends.values())])
            oldest_s = min((pieces[0].start_s for pieces in self._pieces.values()), default=end_s)
            begin_s = max(end_s - window_s, oldest_s)
            shown = [{"who": who, "pieces": self._lane(who, begin_s, end_s)} for who in names[rows]]
        return {"total": len(names), "begin_s": begin_s, "end_s": end_s, "rows": shown}

    def _lane(self, who: str, begin_s: float, end_s: float) -> list[Piece]:
        """The pieces of a process in this time; it has left or is dead until its next state begins."""
        pieces = list(self._pieces[who])
        for ended_s, how in self._ends.get(who, ()):
            back_s = next((piece.start_s for piece in pieces if piece.start_s > ended_s), end_s)
            pieces.append(Piece(ended_s, back_s, how))
        return sorted(piece for piece in pieces if piece.end_s >= begin_s)

    def _update(self) -> None:
        """Read what is new; a span that was read before starts no later than the newest one of then."""
        read = dict(self._read)
        for batch in read_batches(self._folder, self._end_s - LATE_S if self._pieces else 0.0):
            for span in batch.spans:
                if span.kind == "state" and span.start_s > read.get(batch.who, 0.0):
                    pieces = self._pieces[batch.who]
                    start_s = span.start_s + batch.offset_s
                    end_s = start_s + span.duration_s
                    self._read[batch.who] = span.start_s
                    if pieces and pieces[-1].state == span.name and start_s - pieces[-1].end_s < 0.05:
                        start_s = pieces.pop().start_s  # a long state is recorded in parts
                    pieces.append(Piece(start_s, end_s, span.name))
                    self._end_s = max(self._end_s, end_s)
        for event in self._events.all():
            if event.kind in ENDS:
                field, how = ENDS[event.kind]
                self._ends[str(event.detail.get(field))].append((event.time_s, how))
        if len(self._pieces) > LANES:
            by_age = sorted(self._pieces, key=lambda who: self._pieces[who][-1].end_s)
            for who in by_age[:-LANES]:
                for kept in (self._pieces, self._read, self._ends):
                    kept.pop(who, None)


# ---------------------------------------------------------------- the run

LEDGER_EVERY_S, LEDGER_SHARE = 5.0, 0.05  # A long ledger is asked for in this share of the time at most.
FILES = {"report.html": "report/report.html", "trace.json": "trace.json"}  # below RUN; the page offers them
BEFORE = slice(-20, -10)  # the steps before LATEST


class BrowserCopy:
    """How much a browser has: the state, and the curves of a generation up to a bucket."""

    def __init__(self) -> None:
        self.state = b""
        self.generation = -1
        self.bucket = 0
        self.steps = -1


class BoundedTail(RecentTail):
    """The metrics of a run for the page, with `curves` of all steps."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.curves = Curves()

    def take(self, replaced: bool, lines: Iterable[StepMetrics | EvaluationMetrics]) -> None:
        if replaced:
            self.curves = Curves(generation=self.curves.generation + 1)
        lines = list(lines)
        super().take(replaced, lines)
        self.curves.add(line for line in lines if isinstance(line, StepMetrics))


class RunView:
    """Threads call `read`, `observe` and `news`; nothing here writes to the run."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.tail = BoundedTail(run.metrics)
        self.lanes = Lanes(run)
        self.nodes: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {"name": run.path.resolve().name, "path": str(run.path)}
        self._encoded = msgspec.json.encode(self.state)
        self._credentials: str | None = None
        self._started_s: float | None = None
        self._lock = threading.Lock()
        self._ledger_lock = threading.Lock()
        self._ledger: tuple[float, list[LedgerEntry], str] = (0.0, [], "")  # until when it counts; why there is none

    def read(self) -> bool:
        """Read one part of what is new in the metrics; whether anything was. Raises as `check_inside`."""
        self.check_inside()
        replaced, lines = self.tail.read()  # takes long at the start, and browsers wait for the lock
        with self._lock:
            self.tail.take(replaced, lines)
        return replaced or bool(lines)

    def observe(self) -> None:
        """Ask the broker, or read what it left behind, and make `state` of it."""
        seen = None
        config = None
        note = ""
        try:
            self.check_inside()
            config = config_of(self.run)
            self._credentials = config.broker.credentials if config else None
            seen = observe(Target(self.run, self._credentials))
        except (SlipstreamError, OSError) as error:
            note = str(error)
        state = self._state(config, seen, note)
        encoded = msgspec.json.encode(state)
        with self._lock:
            self.state = state
            self._encoded = encoded

    def _state(self, config: Config | None, seen: Observation | None, note: str) -> dict[str, Any]:
        tail = self.tail
        state: dict[str, Any] = {"note": note, "live": False}
        with self._lock:
            lines = tail.lines
            state |= {"steps": tail.steps, "evaluations": tail.evaluations}
            state["figures"] = figures(config, seen, tail) if config else {}
        ages = [line.tokens_by_age for line in lines if len(line.tokens_by_age) == len(AGE_CLASSES)]
        state["ages"] = [sum(counts) for counts in zip(*ages, strict=True)]
        if seen is not None:
            state |= as_json(None, seen)
            present, left = state.pop("nodes"), state.pop("left")
            self.nodes = [*present, *left]
            state["stalls"] = [_stall(stall, seen) for stall in stalls_of(seen)[:SHOWN_STALLS]]
            state["wasted"] = waste_sentence(seen.status)
            state["states"] = Counter(node["state"] for node in present)
            versions = Counter(node["policy_version"] for node in present)
            state["versions"] = sorted(versions.items(), reverse=True)[:16]
        state |= {"name": config.run.name if config else self.run.path.resolve().name, "path": str(self.run.path)}
        if config is not None and not state["live"]:
            with self._lock:
                reached = outcome_of(self.run, config, tail)
            if reached.finished:
                state["finished"] = {"steps": reached.steps, "of": reached.of, "words": reached.places()}
                state["finished"]["held_out"] = reached.held_out
        state["files"] = [name for name, place in FILES.items() if (self.run.path / place).is_file()]
        state["max_staleness"] = config.staleness.max if config else None
        state["wanted"] = config.run.steps if config else None
        state["model"] = config.model.path if config else ""
        state["phase"] = "finished" if "finished" in state else self._phase(seen)
        state["now"] = newest(tail)
        state |= self._times(state)
        return state

    def _phase(self, seen: Observation | None) -> str:
        """The learner's state in a word, also of a job that has ended."""
        if seen is not None and seen.live:
            return seen.learner_state
        record = read_record(self.run)
        if record is None:
            return "not running" if seen is not None or self.tail.steps else "not started"
        ended = {"drained": "stopped", "running": "stopped" if record.ended else "running"}
        return ended.get(record.state, record.state)

    def _times(self, state: dict[str, Any]) -> dict[str, float | None]:
        """Unix time of the run's start, and seconds that it took and that it still takes."""
        if self._started_s is None:
            with suppress(OSError, ValueError):
                self._started_s = msgspec.json.decode(self.run.run_json.read_bytes(), type=Started).started_s
        last = self.tail.last
        end_s = time.time() if state["live"] else last.time_s if last else None
        elapsed_s = end_s - self._started_s if end_s and self._started_s else math.nan
        left_s, step_s = None, state["now"]["step_s"]
        if state["live"] and last and step_s is not None and state["phase"] not in LEARNER_ENDED:
            left_s = max(0.0, (state["wanted"] or 0) - last.policy_version) * step_s
        elapsed_s = round(elapsed_s) if math.isfinite(elapsed_s) else None
        return {"started_s": self._started_s, "elapsed_s": elapsed_s, "left_s": left_s}

    def news(self, copy: BrowserCopy) -> dict[str, Any] | None:
        """The part that a browser does not have yet; None for nothing."""
        with self._lock:
            new: dict[str, Any] = {}
            if copy.state != self._encoded:
                copy.state, new["state"] = self._encoded, self.state
            curves, steps = self.tail.curves, self.tail.steps
            if (curves.generation, steps) != (copy.generation, copy.steps):
                new["curves"] = curves.since(copy.bucket if curves.generation == copy.generation else 0)
                copy.generation = curves.generation
                copy.steps = steps
                copy.bucket = max(0, curves.used - 1)
            return new or None

    def ledger(self) -> list[LedgerEntry]:
        """Every task, at most some seconds old; raises SlipstreamError when there is no ledger."""
        with self._ledger_lock:
            began_s = time.monotonic()
            if began_s >= self._ledger[0]:
                try:
                    entries = observe_ledger(Target(self.run, self._credentials))
                    now_s = time.monotonic()
                    self._ledger = (now_s + max(LEDGER_EVERY_S, (now_s - began_s) / LEDGER_SHARE), entries, "")
                except SlipstreamError as error:  # others who ask soon do not wait for the same broker one by one
                    self._ledger = (time.monotonic() + LEDGER_EVERY_S, [], str(error))
            if self._ledger[2]:
                raise SlipstreamError(self._ledger[2])
            return self._ledger[1]

    def check_inside(self, *more: Path) -> None:
        """Raise SlipstreamError when a file that the page reads is a link to a place outside of the run."""
        run = self.run
        root = os.path.realpath(self.run.path)
        files = [run.config, run.run_json, run.learner_json, run.metrics, run.events, run.status_json, run.broker_json]
        files += [*run.path.glob("ledger*.json"), *more]
        for folder in (run.trace, run.transcripts):
            files += [folder, *folder.glob("*.jsonl")]
        for path in files:
            if not os.path.realpath(path).startswith(f"{root}/"):
                raise SlipstreamError(f"{path.name} leads out of the run's folder; nothing of this run is read")


class Started(msgspec.Struct, frozen=True):
    """The part of RUN/run.json that the page shows."""

    started_s: float


def newest(tail: MetricsTail[StepMetrics]) -> dict[str, float | None]:
    """Means of the last ten steps, and the reward's of the ten before; tokens per second. None: not known."""
    found = {
        "reward": tail.mean(lambda line: line.reward_mean, LATEST),
        "reward_before": tail.mean(lambda line: line.reward_mean, BEFORE),
        "step_s": tail.mean(lambda line: line.step_s, LATEST),
        "idle_s": tail.mean(lambda line: line.learner_idle_s, LATEST),
    }
    tokens, step_s = tail.mean(lambda line: line.tokens_trained, LATEST), found["step_s"]
    found["trained_per_s"] = tokens / step_s if tokens is not None and step_s else None
    found["generated_per_s"] = None
    if ends := tail.lines[BEFORE.stop - 1 :]:
        generated = ends[-1].tokens_generated_total - ends[0].tokens_generated_total
        seconds = sum(known(line.step_s for line in ends[1:]))
        found["generated_per_s"] = generated / seconds if generated >= 0 and seconds > 0 else None
    return found


def _stall(stall: Stall, seen: Observation) -> dict[str, Any]:
    """A stall in words, and the place of the page that shows what would end it."""
    present = {node.report.node_id for node in seen.status.nodes}
    found = next((name for name in stall.nodes if name in present), "")
    tab = "nodes" if found else "timeline"
    if stall.task is not None:
        tab = "tasks"
        found = str(stall.task)
    urgent = stall.kind in STOPPING
    return {"kind": stall.kind, "text": stall_sentence(stall), "urgent": urgent, "tab": tab, "find": found}
