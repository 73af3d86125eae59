"""The folder of a run that never took place, spans that code under test records, and traces as viewers read them.

The folder has real structs and plausible curves, restarts of the learner, nodes that come and go, and a node that is
stuck. The same arguments give the same bytes.
"""

import json
import math
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_type_hints
from unittest.mock import patch

import msgspec

from broker import contract as c
from common.config.loading import dump_yaml, load_config
from common.metrics import OptFloat, OptInt, StepMetrics
from common.process.run_dir import RunDir, write_atomic, write_json
from common.run_reader import Line, metrics_decoder
from common.segments import SegmentWriter
from common.span_buffer import BATCH_BYTES, SPANS
from common.spans import Span, SpanBatch
from common.transcripts import Transcript, Turn
from common.waits import WaitFor, WaitKind
from common.waste import Waste
from tests.rigs.processes import ROOT

CONFIG = ROOT / "configs" / "quickstart.yaml"
STEP_S, RESTART_S, STARTS = 2.0, 60.0, 4  # seconds of a step and of a restart; starts of the learner
GROUPS, SIZE, EVERY, TOKENS = 4, 8, 25, 768  # groups of a step, samples of a group, steps to a checkpoint, tokens
ENDED_S = 1.76e9  # Unix time at the end of the last step
TRACED = 50  # steps in the trace, the newest ones
FLOATS, INTS = (
    [n for n, hint in get_type_hints(StepMetrics).items() if hint in kinds]
    for kinds in ((float, OptFloat), (int, OptInt))
)
STATES = ("generating", "generating", "flipping", "waiting", "joining")  # the nodes take turns
PROMPT, ENVIRONMENT = "What| is| 4|1|2| +| 3|0|9|?", "\n|Right.| Now| add| 5| <b>|quickly|</b>|."
POLICY = "<think>| 4|12| +| 309| =| 7|2|1|</think>| 7|21"

lines = msgspec.json.Encoder().encode_lines
Event = dict[str, Any]
NEEDS = {"X": {"ts", "dur", "name"}, "M": {"name", "args"}, "i": {"ts", "name", "s"}, "C": {"ts", "name", "args"}}
NEEDS |= {"s": {"ts", "id", "name", "cat"}, "f": {"ts", "id", "name", "cat", "bp"}}


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that all users of the machine may read; those of pytest are closed."""
    with TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


class Fixture:
    """Writes the folder. Everything about a step follows from its number and the seed."""

    def __init__(self, folder: Path, steps: int, nodes: int = 4, seed: int = 0) -> None:
        """Raises FileExistsError."""
        self.run, self.steps, self.seed, self.began_s = RunDir(folder), steps, seed, 0.0
        self.nodes = [f"node-{number:04d}" for number in range(nodes)]
        self.between = max(1, math.ceil(steps / STARTS))  # steps of one start of the learner
        self.began_s = ENDED_S - self.end_of(steps - 1)
        self.transcripts = SegmentWriter(self.run.transcripts, "steps", 256 << 20)
        self.spans = SegmentWriter(self.run.trace, "fixture", 256 << 20)
        folder.mkdir(parents=True)
        changed = [f"run.dir={folder}", f"run.steps={steps}", f"learner.groups_per_step={GROUPS}", "run.name=fixture"]
        write_atomic(self.run.config, dump_yaml(load_config(CONFIG, changed)).encode())
        write_json(self.run.run_json, {"name": "fixture", "started_s": self.began_s, "host": "host-0"})

    def write(self, first: int, transcripts: int) -> None:
        """Append the steps from `first` on; ledger and status are those after the last step."""
        new, last = range(first, self.steps), 4 * self.steps
        told = [self.transcript(*divmod(number, 4)) for number in range(max(4 * first, last - transcripts), last)]
        with self.run.metrics.open("ab") as metrics, self.run.events.open("ab") as events:
            metrics.write(lines(map(self.metrics, new)))
            events.write(lines(event for step in new for event in self.events(step)))
        self.transcripts.write(lines(told))
        self.spans.write(lines(batch for step in new[-TRACED:] for batch in self.trace(step)))
        write_atomic(self.run.status_json, msgspec.json.encode(self.status()), sync=False)
        if first == 0 or self.steps % EVERY == 0:  # a long ledger is not written after every step
            entries = [self.entry(serial) for serial in range((self.steps + 2) * GROUPS)]
            write_atomic(self.run.ledger_json, msgspec.json.encode(entries), sync=False)

    def start(self, step: int) -> int:
        """Which start of the learner trained it."""
        return min(step // self.between, STARTS - 1)

    def end_of(self, step: int) -> float:
        """Unix time at the end of a step."""
        return self.began_s + RESTART_S * (1 + self.start(step)) + STEP_S * (step + 1) + 0.2 * math.sin(1.7 * step)

    def metrics(self, step: int) -> StepMetrics:
        """Curves for what the pages show first; noise from 0 to 1 for the other metrics."""
        noise = random.Random(self.seed * 1_000_003 + step).random
        done, failed, fleet = step / self.between, int(noise() > 0.98), len(self.nodes)
        reward = 0.9 - 0.8 * math.exp(-done) + 0.1 * (noise() - 0.5)
        step_s = self.end_of(step) - (self.end_of(step - 1) if step else self.began_s)
        values: dict[str, Any] = dict.fromkeys(INTS, 0) | {name: noise() for name in FLOATS} | {
            "step": step, "policy_version": step + 1, "time_s": self.end_of(step), "incarnation": self.start(step),
            "reward_mean": reward, "reward_std": math.sqrt(reward * (1 - reward)),
            "environment": {"correct": reward}, "step_s": step_s, "learner_idle_s": 0.3 * step_s,
            "staleness_mean": min(step, 1.0), "staleness_max": min(step, 2), "tokens_by_age": [200, 384, 184, 0, 0, 0],
            "mismatch_by_age": [1e-3, 2e-3, 4e-3, 0.0, 0.0, 0.0], "nodes_live": fleet - (0 < step % 40 < 10),
            "groups": GROUPS, "samples": GROUPS * SIZE, "samples_failed": failed, "tokens_trained": TOKENS,
            "tokens_generated_total": (step + 3) * TOKENS * 11 // 10, "tokens_trained_total": (step + 1) * TOKENS,
            "tokens_wasted_total": step * TOKENS // 20, "tokens_wasted_lost": step * TOKENS // 20,
            "samples_failed_by_reason": {"timeout": failed} if failed else {}, "train_s": 0.6 * step_s,
            "concurrency": 64 * fleet, "episodes_running": 48 * fleet, "kv_cache_usage": 0.6, "length_mean": 24.0,
        }  # fmt: skip
        return StepMetrics(**values)

    def events(self, step: int) -> Iterator[dict[str, Any]]:
        """Lines of RUN/events.jsonl: those of the broker have an index, others a source."""
        node, starts = self.nodes[step // 40 % len(self.nodes)], step == self.start(step) * self.between
        start = {"incarnation": self.start(step), "step": step}
        joins = self.nodes if step == 0 else [node] * (step % 40 == 10)
        found: list[tuple[bool, str, str, dict[str, Any]]] = [
            (True, "learner", "publish", {"version": step + 1, "bytes": 1 << 22}),
            (starts and step > 0, "supervisor", "role_crashed", {"role": "learner", "exit_code": -9}),
            (starts, "learner", "learner_started", start),
            (starts, "", "learner_attached", start),
            (step % 40 == 1, "", "leave" if step % 80 == 1 else "node_lost", {"node": node}),
            (step % 40 == 1, "learner", "ejection", {"step": step, "node": "node-1", "reason": "it was silent"}),
            ((step + 1) % EVERY == 0, "", "commit", {"step": step, "groups": GROUPS * EVERY}),
            *((True, "", "join", {"node": name, "host": "host-0", "pid": 100 + step}) for name in joins),
        ]
        for index, (happened, source, kind, detail) in enumerate(found, step << 16):
            if happened:
                by = {"source": source} if source else {"index": index}
                yield {"time_s": self.end_of(step), "kind": kind, "detail": detail, **by}

    def entry(self, serial: int) -> c.LedgerEntry:
        """A line of the ledger; the tasks of the two steps after the last one are leased and pending."""
        step, nodes = serial // GROUPS, [self.nodes[serial % len(self.nodes)]] * (1 + (serial % 97 == 5))
        nothing = {"step": None, "version_min": None, "version_max": None, "reward_mean": None}
        if step >= self.steps:
            return c.LedgerEntry(serial, "leased" if step == self.steps else "pending", 1, nodes, **nothing)
        if serial % 503 == 11:
            return c.LedgerEntry(serial, "dead", 3, nodes * 3, **nothing, reason="environment: timeout after 60 s")
        state, reward = "committed" if step < self.steps // EVERY * EVERY else "taken", serial * 7919 % 9 / SIZE
        oldest = max(0, step - serial % 3)
        return c.LedgerEntry(serial, state, len(nodes), nodes, step, oldest, step, reward, filtered=serial % 211 == 3)

    def status(self) -> c.BrokerStatus:
        """The learner waits for the first node, which is stuck in an environment. The last node is gone."""
        nodes, steps, wasted = list[c.NodeStatus](), self.steps, Waste(self.steps * TOKENS // 20, 9.0)
        stuck = c.GroupWork(steps * GROUPS, SIZE, 7, 400.0, 900, 3, 120, "environment", 380.0)
        for number, name in enumerate(self.nodes):
            state = STATES[number % 5]
            report = c.NodeReport(
                name, 100 + number, f"host-{number // 8}", state, -1 if state == "joining" else steps - number % 2,
                since_s=3.0 + number % 7, tokens_per_s=400.0 + number % 50, episodes_running=48, flips=steps,
                groups=[] if number else [stuck], concurrency=64, kv_cache_usage=0.6,
            )  # fmt: skip
            alive = number == 0 or number < len(self.nodes) - 1
            nodes.append(c.NodeStatus(report, int(not number), alive, 0.4 if alive else 45.0))
        late = [c.Delivery(n.report.node_id, steps, "flipping", 12.0) for n in nodes if n.report.state == "flipping"]
        learner = c.LearnerReport(
            10, STARTS - 1, "waiting", steps, WaitFor(WaitKind.GROUPS, version=steps, count=3, of=GROUPS), 350.0,
            step=steps, groups_missing=GROUPS, deliveries=late[:64], deliveries_waiting=len(late), host="host-0",
        )  # fmt: skip
        run = c.RunInfo("fixture", str(self.run.path), GROUPS, 2, 3, 30.0, 1 << 30)
        return c.BrokerStatus(
            9, "tcp://127.0.0.1:1", run, GROUPS, 3, GROUPS, steps % EVERY * GROUPS, steps // EVERY * EVERY * GROUPS,
            steps * GROUPS // 503, 1 << 20, steps // 40, 2, steps * TOKENS, wasted.tokens, learner, 0.3, nodes,
            400.0, waste={"lost": wasted},
        )  # fmt: skip

    def trace(self, step: int) -> Iterator[SpanBatch]:
        """The learner's step and publish; every node's episode and flip, on machines whose clocks differ."""
        at, version, serial = self.end_of(step) - STEP_S, {"version": step + 1}, {"serial": step * GROUPS}
        yield SpanBatch(who="learner", host="host-0", spans=[
            Span("waiting", "state", at, 0.6), Span("training", "state", at + 0.6, 1.4),
            Span(f"step {step}", "step", at, STEP_S, "", {"step": step}),
            Span(f"version {step + 1}", "publish", at + 1.8, 0.4, "weights", version),
        ])  # fmt: skip
        spans = [
            Span("generating", "state", at, 1.9), Span("flipping", "state", at + 1.9, 0.1),
            Span(f"episode {step * GROUPS}", "episode", at + 0.1, 1.5, "slot 0", serial),
            Span(f"flip {step + 1}", "flip", at + 1.9, 0.1, "weights", version),
        ]  # fmt: skip
        for number, name in enumerate(self.nodes):
            yield SpanBatch(who=name, host=f"host-{number // 8}", offset_s=0.01 * (number // 8), spans=spans)

    def transcript(self, step: int, sample: int) -> Transcript:
        """The best, worst, longest or any episode of a step: a turn of the environment between two of the policy."""
        noise, turns, reward = random.Random(f"{self.seed} {step} {sample}"), list[Turn](), float(sample == 0)
        for index, text in enumerate((PROMPT, POLICY, ENVIRONMENT, POLICY)):
            pieces, author = text.split("|"), ("prompt", "policy", "environment", "policy")[index]
            policy = {
                "logprobs": [-noise.random() for _ in pieces], "ratios": [noise.lognormvariate(0, 0.2) for _ in pieces],
                "trained": [int(index == 1 or i > 2) for i in range(len(pieces))],
                "version_runs": [(0, max(0, step - 1)), (5, step)] if index == 1 else [(0, step)], "reward": reward,
            } if author == "policy" else {}  # fmt: skip
            tokens = [noise.randrange(32000) for _ in pieces]
            turns.append(Turn(author=author, text="".join(pieces), tokens=tokens, pieces=pieces, **policy))
        return Transcript(
            serial=step * GROUPS + sample, sample=sample, node_id=self.nodes[step % len(self.nodes)], turns=turns,
            time_s=self.end_of(step), why=[("best", "worst", "longest", "share")[sample]], reward=reward, step=step,
            stop_reason="stop", advantage=reward - 0.25, metrics={"correct": reward}, sampled_tokens=24,
        )  # fmt: skip


def read_line(step: int = 0, kind: type[Line] = StepMetrics, **values: Any) -> Line:
    """A line of metrics with these values, as it is read from the file: JSON has no word for NaN."""
    tag = kind.__struct_config__.tag
    document = {"step": step, **({"kind": tag} if tag else {}), **values}
    found = metrics_decoder(kind)(json.dumps(document).replace("NaN", "null").replace("Infinity", "null").encode())
    assert found is not None
    return found


@contextmanager
def recorded() -> Iterator[Callable[[], list[Span]]]:
    """Record while the context is active; yields a function that returns the spans so far.

    They include what the code under test has taken meanwhile, for instance a heartbeat.
    """
    spans: list[Span] = []
    lock = threading.Lock()
    take = SPANS.batch

    def batch(who: str, limit_bytes: int | None = None) -> SpanBatch | None:
        with lock:
            found = take(who, limit_bytes)
            spans.extend(found.spans if found is not None else ())
            return found

    def so_far() -> list[Span]:
        while batch("test", BATCH_BYTES) is not None:
            pass
        return spans

    SPANS.open(reference=True)
    so_far()
    spans.clear()
    try:
        with patch.object(SPANS, "batch", batch):
            yield so_far
    finally:
        SPANS.close()
        so_far()


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
