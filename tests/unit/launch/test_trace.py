"""`slipstream trace`: RUN/trace as a file that keeps the rules of Chrome's trace format, on one clock."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.process.run_dir import RunDir
from common.run_reader import read_batches
from common.spans import Span, SpanBatch
from launch.cli import main
from launch.results.trace import Trace
from tests.rigs.configs import refusal
from tests.rigs.telemetry import ChromeTrace

T0 = 1.7e9  # the broker's clock
AHEAD = {"learner": 0.0, "node-0": 100.0, "node-1": -50.0}  # seconds, of each process's clock
STEPS = 4
EDGE = 1  # us, that rounding may shift an edge by


def span(
    name: str, kind: str, start: float, end: float, track: str = "", **args: Any
) -> tuple[str, str, float, float, str, dict[str, Any]]:
    return name, kind, start, end, track, args


def batch(
    who: str, *spans: tuple[str, str, float, float, str, dict[str, Any]], error_s: float = 1e-3, dropped: int = 0
) -> SpanBatch:
    """A batch as a process sends it; times are seconds after T0 by the broker's clock."""
    ahead = AHEAD[who]
    made = [Span(n, k, T0 + s + ahead, (T0 + e + ahead) - (T0 + s + ahead), t, a) for n, k, s, e, t, a in spans]
    return SpanBatch(who=who, host="vm", offset_s=-ahead, error_s=error_s, dropped=dropped, spans=made)


def step(number: int) -> list[SpanBatch]:
    """Ten seconds of a run: two groups on two nodes, the step that trains both, a publish and its flips."""
    at, version = 10.0 * number, {"version": number + 1, "incarnation": 0}
    serials = 2 * number, 2 * number + 1
    learner = batch(
        "learner",
        span("waiting", "state", at, at + 4, "state"),
        span("training", "state", at + 4, at + 7, "state"),
        span("train", "phase", at + 4.5, at + 6, "loop"),
        span("microbatch 0", "microbatch", at + 4.5, at + 5, "loop"),
        span(f"step {number}", "step", at + 4, at + 6.5, "loop", step=number, serials=f"{serials[0]} {serials[1]}"),
        span(f"publish {number}", "publish", at + 6, at + 9, "publish", **version),
    )
    nodes = []
    for who, serial in zip(("node-0", "node-1"), serials, strict=True):
        lease = {"serial": serial, "accepted": 1}
        turns = [span("engine", "engine", at + 1.5, at + 2, f"episodes/{serial}.0", turn=1)]
        turns.append(span("environment", "environment", at + 2, at + 3, f"episodes/{serial}.0", turn=1))
        nodes.append(
            batch(
                who,
                *turns,
                span(f"episode {serial}.0", "episode", at + 1, at + 3, f"episodes/{serial}.0", serial=serial),
                span(f"episode {serial}.1", "episode", at + 1.5, at + 3.5, f"episodes/{serial}.1", serial=serial),
                span(f"group {serial}", "lease", at + 1, at + 3.75, f"groups/{serial}", **lease),
                span(f"flip {number + 1}", "flip", at + 8, at + 8.5, "weights", **version),
            )
        )
    return [learner, *nodes]


def write(run: RunDir, batches: list[SpanBatch], more: bytes = b"", number: int = 0) -> None:
    run.trace.mkdir(exist_ok=True)
    for prefix, ours in (("learner", True), ("nodes", False)):
        lines = b"".join(msgspec.json.encode(b) + b"\n" for b in batches if (b.who == "learner") == ours)
        (run.trace / f"{prefix}-{number:08d}.jsonl").write_bytes(lines + more)


@pytest.fixture
def traced(run: RunDir) -> RunDir:
    """A run of STEPS steps with its trace."""
    write(run, [b for number in range(STEPS) for b in step(number)])
    return run


def trace_of(run: RunDir, *words: str) -> ChromeTrace:
    assert main(["trace", str(run.path), *words]) == 0
    return ChromeTrace(run.path / "trace.json")


def names(events: list[dict[str, Any]]) -> list[str]:
    return sorted(event["name"] for event in events)


def test_a_trace_has_all_spans_on_the_brokers_clock_and_arrows_from_groups_to_steps_and_from_publishes_to_flips(
    traced: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_of(traced)
    assert sorted(trace.processes.values()) == ["learner on vm", "node-0 on vm", "node-1 on vm"]
    assert len(trace.slices("engine")) == len(trace.slices("flip")) == 2 * STEPS
    zero = trace.document["otherData"]["zero_unix_s"]
    for kind, after in (("lease", 1.0), ("step", 4.0), ("flip", 8.0)):
        for event in trace.slices(kind):
            number = next(int(w) for w in event["name"].split() if w.isdecimal())
            number = number // 2 if kind == "lease" else number - (kind == "flip")
            assert event["ts"] == pytest.approx(1e6 * (T0 + 10 * number + after - zero), abs=EDGE)
    arrows = sorted((source["name"], target["name"]) for source, target in trace.arrows)
    assert arrows == sorted(
        [(f"group {serial}", f"step {serial // 2}") for serial in range(2 * STEPS)]
        + [(f"publish {n}", f"flip {n + 1}") for n in range(STEPS) for _ in range(2)]
    )
    assert all(target["pid"] == 1 for source, target in trace.arrows if source["cat"] == "lease")
    about = trace.document["otherData"]
    assert (about["steps"], about["clock_error_s"]) == ([0, STEPS - 1], 1e-3)
    assert {p["name"]: p["clock_error_s"] for p in about["processes"]}.keys() == AHEAD.keys()
    assert {e["args"]["labels"] for e in trace.of("M", name="process_labels")} == {"clock within 1 ms"}
    out = capsys.readouterr().out
    assert f"steps 0 to {STEPS - 1}, " in out and "16 arrows" in out
    assert "Every clock is within 1 ms of the broker's." in out and "dropped" not in out


def test_what_happens_at_once_is_spread_over_threads_and_what_is_inside_stays_in_its_thread(traced: RunDir) -> None:
    trace = trace_of(traced)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace.of("M", name="thread_name")}
    assert sorted(threads.values()) == sorted(
        ["state", "loop", "publish"] + 2 * ["groups", "episodes", "episodes 2", "weights"]
    )
    thread = {e["name"]: threads[e["pid"], e["tid"]] for e in trace.of("X")}
    assert (thread["episode 0.0"], thread["episode 0.1"]) == ("episodes", "episodes 2")
    assert {thread["train"], thread["microbatch 0"], thread["step 0"]} == {"loop"}
    for inner in trace.slices("environment"):
        assert any(
            outer["ts"] < inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
            for outer in trace.slices("episode")
            if (outer["pid"], outer["tid"]) == (inner["pid"], inner["tid"])
        )


def test_pieces_of_one_state_are_one_slice_and_another_state_in_between_separates_them(run: RunDir) -> None:
    pieces = [span("waiting", "state", 10.0 * i, 10.0 * (i + 1), "state") for i in range(3)]
    rest = [span("training", "state", 30.0, 31.0, "state"), span("waiting", "state", 31.0, 32.0, "state")]
    write(run, [batch("learner", piece) for piece in pieces] + [batch("learner", *rest)])
    found = [(e["name"], e["dur"]) for e in trace_of(run).slices("state")]
    assert [name for name, _ in found] == ["waiting", "training", "waiting"]
    assert [dur for _, dur in found] == [pytest.approx(1e6 * s, abs=EDGE) for s in (30, 1, 1)]


def test_a_window_of_steps_has_their_time_and_the_sampling_of_their_groups(traced: RunDir) -> None:
    trace = trace_of(traced, "--from", "1", "--to", "2")
    assert names(trace.slices("step")) == ["step 1", "step 2"]
    assert names(trace.slices("lease")) == [f"group {serial}" for serial in (2, 3, 4, 5)]
    assert names(trace.slices("publish")) == ["publish 1", "publish 2"], "that of step 2 begins inside"
    assert names(trace.slices("flip")) == ["flip 2", "flip 2"], "those of step 2 come later"
    assert sorted({target["name"] for _, target in trace.arrows}) == ["flip 2", "step 1", "step 2"]
    assert trace.document["otherData"]["steps"] == [1, 2]
    out = traced.path / "x.json"
    assert main(["trace", str(traced.path), "--to", "0", "--out", str(out)]) == 0
    assert names(ChromeTrace(out).slices("step")) == ["step 0"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--from", "9"], "--from 9 --to 3: the trace has steps 0 to 3"),
        (["--to", "4"], "--from 0 --to 4: the trace has steps 0 to 3"),
        (["--from", "-1"], "--from -1 --to 3: the trace has steps 0 to 3"),
        (["--from", "2", "--to", "1"], "--from 2 --to 1: the trace has steps 0 to 3"),
        (["--out", "/dev/null/x"], "--out: /dev/null/x cannot be written: Not a directory"),
    ],
)
def test_steps_that_the_trace_lacks_and_a_file_that_cannot_be_written_are_refused(
    traced: RunDir, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert why in refusal(capsys, "trace", str(traced.path), *words)


@pytest.mark.parametrize(
    ("error", "said"), [(OSError(28, "No space left on device"), "No space"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_trace_that_was_not_written_to_its_end_leaves_no_file(
    traced: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    def fail(self: Trace) -> Iterator[Any]:
        yield {"ph": "X", "name": "x" * 100_000}
        raise error

    monkeypatch.setattr(Trace, "events", fail)
    assert main(["trace", str(traced.path)]) != 0
    assert said in capsys.readouterr().err
    assert not (traced.path / "trace.json").exists()
    assert main(["trace", str(traced.path), "--out", "/dev/null"]) != 0 and Path("/dev/null").exists()


def test_a_run_without_spans_is_refused_and_one_without_steps_is_shown_as_a_whole(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "telemetry.trace_mib" in refusal(capsys, "trace", str(run.path))
    write(run, [batch("node-0", span("starting", "state", 0.0, 5.0, "state"))])
    assert names(trace_of(run).of("X")) == ["starting"]
    assert "no step yet, 1 spans of 1 processes" in capsys.readouterr().out
    assert "no step" in refusal(capsys, "trace", str(run.path), "--from", "0")


def test_torn_lines_unknown_kinds_and_strange_arguments_are_tolerated_and_lost_spans_are_counted(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = [
        span("quantum leap", "teleport", 1.0, 2.0),
        span("step x", "step", 3.0, 4.0, "loop", step="x", serials="1 two"),
        span("group", "lease", 1.0, 2.0, "groups/a", serial="1", accepted=1),
    ]
    torn = msgspec.json.encode(batch("learner", *strange))[:-9]
    whole = b'{"who": "n9", "host": "vm", "a later field": 1, "spans": []}\n\xff\n[1]\nnull\n'
    write(
        run,
        [batch("learner", *strange, dropped=5), batch("node-0", span("x", "lease", 1.0, 2.0), dropped=2)],
        whole + torn,
    )
    trace = trace_of(run)
    assert "quantum leap" in names(trace.of("X")) and trace.arrows == []
    assert "7 spans" in capsys.readouterr().out


def test_a_group_that_was_sampled_twice_has_its_arrow_from_the_last_one_before_the_step(run: RunDir) -> None:
    def lease(at: float, name: str, **told: Any) -> tuple[str, str, float, float, str, dict[str, Any]]:
        return span(name, "lease", at, at + 1, f"groups/{name}", serial=7, **told)

    nodes = [
        lease(0, "lost", accepted=0),
        lease(2, "old", accepted=1),
        lease(4, "new", accepted=1),
        lease(9, "later", accepted=1),
    ]
    steps = [span("step 3", "step", at, at + 1, "loop", step=3, serials="7") for at in (3.5, 6.0, 8.0)]
    write(run, [batch("node-0", *nodes), batch("learner", *steps)])
    arrows = [(source["name"], target["ts"]) for source, target in trace_of(run).arrows]
    assert [name for name, _ in sorted(arrows, key=lambda a: a[1])] == ["old", "new", "new"], "a step may be repeated"


def test_clocks_that_drift_and_restart_keep_slices_nested_and_later_round_trips_bound_earlier_errors(
    run: RunDir,
) -> None:
    batches: list[SpanBatch] = []
    for second in range(0, 600, 2):
        off = 1e-4 * second + (3e-4 if second % 4 else 0.0) + (20.0 if second > 300 else 0.0)
        error = 0.25 if second == 0 else 1e-3
        times = [(T0 + second + a, b) for a, b in ((0.0, 1.9), (0.1, 0.8), (0.9, 0.9))]
        spans = [Span(f"s{i}", "phase", start, lasted, "loop") for i, (start, lasted) in enumerate(times)]
        batches.append(SpanBatch(who="learner", host="vm", offset_s=off, error_s=error, spans=spans[1:]))
        batches.append(SpanBatch(who="learner", host="vm", offset_s=off, error_s=error, spans=spans[:1]))
    write(run, batches)
    trace = trace_of(run)
    assert {e["args"]["name"] for e in trace.of("M", name="thread_name")} == {"loop"}, "nothing had to move"
    assert trace.document["otherData"]["clock_error_s"] < 2e-3
    last = max(trace.slices("phase"), key=lambda e: e["ts"])
    assert last["ts"] - min(e["ts"] for e in trace.slices("phase")) == pytest.approx(1e6 * (598.9 + 20.06), rel=1e-3)


# ---------------------------------------------------------------- the reader


def test_the_reader_gives_batches_in_order_and_survives_pruning(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(read_batches(run.trace)) == []
    for number in range(3):
        write(run, step(number), number=number)
    everything = list(read_batches(run.trace))
    assert [b.spans[0].name for b in everything if b.who == "learner"] == ["waiting"] * 3
    assert len(everything) == 9
    reader = read_batches(run.trace)
    next(reader)
    for path in run.trace.iterdir():
        path.unlink()
    assert len(list(reader)) == 0


@pytest.mark.slow
def test_a_long_trace_takes_little_memory(run: RunDir) -> None:
    many = [step(number) for number in range(500)]
    write(run, [b for batches in many for b in batches])
    size = sum(path.stat().st_size for path in run.trace.iterdir())
    del many
    tracemalloc.start()
    trace_of_it = main(["trace", str(run.path)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert trace_of_it == 0 and peak < 6 * size, "64 MiB of spans take less than 400 MB"
