"""Points and cursors, feeds that hang or fail, and the process around them, also as a role of `up`."""

import dataclasses
import hashlib
import logging
import shutil
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import yaml

from common.config.observing import TelemetryConfig
from common.metrics import SftMetrics, StepMetrics
from common.process.lifecycle import DrainFlag
from common.process.lock_file import take_lock
from common.process.run_dir import RunDir, write_json
from common.run_reader import line_decoder
from launch.cli import main
from launch.sinks import feed as module
from launch.sinks import process
from launch.sinks.feed import GROUP_OF, Cursor, Feed, Point
from launch.up import roles
from launch.up.up import Job
from tests.rigs.configs import prepared, refusal, run_cli, write_broker
from tests.rigs.redis_servers import free_port
from tests.rigs.waiting import until


def line(step: int, incarnation: int = 0, **values: Any) -> dict[str, Any]:
    return {"step": step, "incarnation": incarnation, "time_s": 100.0 * incarnation + step, "loss": 0.5, **values}


def evaluation(version: int) -> dict[str, Any]:
    known = {"kind": "evaluation", "step": version, "policy_version": version, "dataset": "../a b.jsonl", "time_s": 1.0}
    return known | {"mean_reward": 0.5, "pass_at": {"1": 0.25}}


def take(
    cursor: Cursor, *lines: dict[str, Any], kind: type[StepMetrics] | type[SftMetrics] = StepMetrics
) -> list[Point]:
    found = (line_decoder(kind)(msgspec.json.encode(line)) for line in lines)
    return cursor.take(line for line in found if line is not None)


def steps(points: Sequence[Point]) -> list[tuple[int, bool]]:
    return [(point.step, point.again) for point in points]


def test_names_are_grouped_by_the_declared_unit_and_nested_values_are_flat() -> None:
    (point,) = take(Cursor(), line(0, step_s=2.0, tokens_trained=5, mismatch_by_age=[0.1, 0.2], environment={"a": 1.0}))
    assert point.values.items() >= {
        "train/incarnation": 0.0, "train/loss": 0.5, "time/step_s": 2.0, "tokens/tokens_trained": 5.0,
        "train/mismatch_by_age/0": 0.1, "train/mismatch_by_age/1": 0.2, "train/environment/a": 1.0,
    }.items()  # fmt: skip
    assert "train/reward_mean" not in point.values, "NaN is no value"
    assert GROUP_OF.keys() == set(StepMetrics.__struct_fields__)


def test_lines_that_come_again_in_a_replaced_file_are_fed_once_and_repeated_steps_again() -> None:
    cursor = Cursor()
    old = [line(step) for step in range(5)]
    assert steps(take(cursor, *old)) == [(step, False) for step in range(5)]
    resumed = [*old[:3], line(3, 1), line(4, 1), line(5, 1)]
    assert steps(take(cursor, *resumed)) == [(3, True), (4, False), (5, False)]
    assert take(cursor, *resumed) == []


def test_a_line_without_its_time_is_passed_over() -> None:
    odd = [line(1) | {"time_s": None}, line(2) | {"time_s": "x"}]
    assert steps(take(Cursor(), line(0), *odd, line(4))) == [(0, False), (4, False)]


def test_a_warm_start_that_resumes_is_told_by_the_time_of_its_lines() -> None:
    cursor = Cursor()
    old = [{"step": step, "time_s": 10.0 + step, "loss": 1.0} for step in range(3)]
    take(cursor, *old, kind=SftMetrics)
    again = [*old[:1], {"step": 1, "time_s": 20.0}, {"step": 2, "time_s": 21.0}]
    assert steps(take(cursor, *again, kind=SftMetrics)) == [(1, True), (2, False)]


def test_a_warm_start_that_resumes_with_a_clock_behind_is_fed_again() -> None:
    cursor = Cursor()
    old = [{"step": step, "time_s": 1e4 + step, "loss": 1.0, "incarnation": 0} for step in range(3)]
    take(cursor, *old, kind=SftMetrics)
    again = [old[0], *({**line, "time_s": line["time_s"] - 600, "incarnation": 1} for line in old[1:])]
    assert steps(take(cursor, *again, kind=SftMetrics)) == [(1, True), (2, False)]


def test_a_warm_start_that_resumes_after_an_upgrade_is_fed_again_once() -> None:
    cursor = Cursor()
    old = [{"step": step, "time_s": 1.7e9 + step, "loss": 1.0} for step in range(10)]
    take(cursor, *old, kind=SftMetrics)
    again = [*old[:5], *({"step": step, "time_s": 1.7e9 + 20 + step, "incarnation": 1} for step in range(5, 13))]
    assert steps(take(cursor, *again, kind=SftMetrics)) == [(5, True), *((step, False) for step in range(6, 13))]
    assert take(cursor, *again, kind=SftMetrics) == []


def test_evaluations_are_points_at_their_version_once_per_dataset() -> None:
    cursor = Cursor()
    point, other = take(cursor, evaluation(2), line(2), evaluation(2), {"kind": "other", "step": 3})
    assert (point.step, point.dataset) == (2, "a_b.jsonl")
    assert point.values["evaluation/a_b.jsonl/pass_at/1"] == 0.25
    assert other.step == 2 and not other.dataset
    take(cursor, line(3), evaluation(4), line(1, 1))  # a learner that resumes at step 1 voids later versions
    assert [p.step for p in take(cursor, evaluation(2), evaluation(3))] == [2, 3]


# ---------------------------------------------------------------- feeds


class Recording:
    """A sink that keeps what it gets."""

    def __init__(self, cursor: Cursor) -> None:
        self.steps: list[int] = []

    def write(self, points: Sequence[Point]) -> None:
        self.steps += [point.step for point in points]

    def close(self) -> None:
        pass


@pytest.fixture
def feeds(run: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that starts a feed of a sink; all are ended with the test."""
    monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.02)
    started: list[Feed] = []

    def start(name: str, make: Any) -> Feed:
        feed = Feed(name, make, module.FedRun(run, config, "id"))
        feed.start()
        started.append(feed)
        return feed

    run.sinks.mkdir()
    yield start
    for feed in started:
        feed.closing.set()
    for feed in started:
        feed.join(60)


def append(run: Any, *lines: dict[str, Any]) -> None:
    with run.metrics.open("ab") as file:
        file.writelines(msgspec.json.encode(one) + b"\n" for one in lines)


def kept(run: Any, name: str) -> Cursor:
    return msgspec.json.decode((run.sinks / f"{name}.json").read_bytes(), type=Cursor)


def test_a_sink_that_hangs_shows_its_lag_and_holds_up_no_other(run, feeds) -> None:
    free, made = threading.Event(), list[Recording]()

    class Hanging(Recording):
        def write(self, points: Sequence[Point]) -> None:
            free.wait()

    def recording(cursor: Cursor) -> Recording:
        made.append(Recording(cursor))
        return made[-1]

    append(run, line(0))
    slow, quick = feeds("slow", Hanging), feeds("quick", recording)
    until(lambda: made and made[0].steps == [0])
    append(run, line(1), line(2))
    until(lambda: made[0].steps == [0, 1, 2] and quick.lag_bytes() == 0)
    assert (slow.cursor.step, slow.lag_bytes()) == (-1, run.metrics.stat().st_size)
    free.set()
    until(lambda: slow.lag_bytes() == 0 and kept(run, "slow").step == 2)


def test_a_sink_that_fails_is_tried_again_from_its_cursor_and_logged_once(run, feeds, caplog) -> None:
    made, refusing = list[Recording](), threading.Event()
    refusing.set()

    class Refusing(Recording):
        def __init__(self, cursor: Cursor) -> None:
            super().__init__(cursor)
            made.append(self)

        def write(self, points: Sequence[Point]) -> None:
            if refusing.is_set():
                raise ConnectionError("no")
            super().write(points)

    append(run, line(0))
    feeds("shy", Refusing)
    until(lambda: len(made) > 3)
    assert kept(run, "shy").state == "ConnectionError: no" and kept(run, "shy").offset == 0
    refusing.clear()
    until(lambda: kept(run, "shy").state == "feeding")
    assert [sink.steps for sink in made if sink.steps] == [[0]]
    size = run.metrics.stat().st_size
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert told == [f"shy: ConnectionError: no, {size} bytes behind"]


def test_a_feed_continues_behind_its_cursor_and_a_torn_state_begins_anew(run, feeds) -> None:
    append(run, line(0), line(1))
    first = feeds("tracker", Recording)
    first.closing.set()
    first.join(60)
    made: list[Recording] = []

    def make(cursor: Cursor) -> Recording:
        made.append(Recording(cursor))
        return made[-1]

    append(run, line(2))
    feeds("tracker", make)
    until(lambda: made and made[0].steps == [2])
    (run.sinks / "other.json").write_text("{")
    feeds("other", make)
    until(lambda: len(made) == 2 and made[1].steps == [0, 1, 2])


def test_a_sink_of_the_newest_state_reads_the_end_of_a_long_file(run, feeds, monkeypatch) -> None:
    monkeypatch.setattr(module, "FEED_BYTES", 300)
    append(run, *(line(step) for step in range(100)))
    made: list[Recording] = []

    def make(cursor: Cursor) -> Recording:
        made.append(Recording(cursor))
        return made[-1]

    feed = feeds("prometheus", make)
    until(lambda: made and made[0].steps and made[0].steps[-1] == 99)
    assert len(made[0].steps) < 6
    until(lambda: feed.lag_bytes() == 0)


# ---------------------------------------------------------------- the process


def test_bad_usage_is_refused_with_the_next_step(run, capsys, monkeypatch) -> None:
    said = refusal(capsys, "sinks", str(run.path))
    assert "telemetry.sinks is" in said and "--sink NAME" in said
    assert "'tensorbord', expected" in refusal(capsys, "sinks", str(run.path), "--sink=tensorbord")
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    said = refusal(capsys, "sinks", str(run.path), "--sink", "mlflow")
    assert "telemetry.sinks: mlflow" in said and "slipstream-rl[sinks]" in said


def test_up_refuses_a_tracker_whose_package_is_missing_before_anything_starts(job, capsys, monkeypatch) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    assert "telemetry.sinks: wandb" in refusal(capsys, "up", str(job), "telemetry.sinks=[wandb]")
    assert not (job.parent / "run").exists()


def test_commands_that_start_no_process_say_how_and_the_learner_of_up_does_not(
    job, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(roles, "need_packages", lambda *names: None)
    monkeypatch.setattr(roles, "become_torchrun", lambda config, run, address: run.prepare(config) or 0)
    document = yaml.safe_load(job.read_text())
    tasks = {"dataset": document["tasks"]["dataset"]}
    warm = {"run": {**document["run"], "dir": str(tmp_path / "warm")}, "model": document["model"], "tasks": tasks}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(warm))

    def says(command: str, config: str, *words: str) -> bool:
        assert main([command, config, "telemetry.sinks=[prometheus]", *words]) == 0
        return "slipstream sinks" in capsys.readouterr().out

    assert says("sft", str(tmp_path / "sft.yaml")) and says("sft", str(tmp_path / "warm" / "config.yaml"))
    assert says("learner", str(job)) and not says("learner", str(tmp_path / "run" / "config.yaml"))
    assert says("slurm", str(job), "--dry-run", "weights.transport=relay", f"run.dir={tmp_path / 'slurm'}")


def test_a_second_process_is_refused(run, capsys) -> None:
    run.sinks.mkdir()
    lock = take_lock(run.sinks / "lock")
    with lock:
        assert "feeds its" in refusal(capsys, "sinks", str(run.path), "--sink", "prometheus")


def test_a_copy_of_a_run_gets_another_id_in_its_trackers_and_a_moved_run_keeps_it(run, tmp_path, caplog) -> None:
    first = process.tracked_id(run)
    for name in ("wandb", "tensorboard"):
        write_json(run.sinks / f"{name}.json", Cursor(step=9))
    copy, moved = RunDir(tmp_path / "copy"), RunDir(tmp_path / "moved")
    shutil.copytree(run.path, copy.path)
    run.path.rename(moved.path)
    assert {process.tracked_id(moved) for _ in range(2)} == {first}
    assert kept(moved, "wandb").step == 9
    assert not caplog.records
    (other,) = {process.tracked_id(copy) for _ in range(2)}
    assert other != first
    assert not (copy.sinks / "wandb.json").exists(), "it gets the whole run"
    assert kept(copy, "tensorboard").step == 9, "its files are in RUN, and were copied"
    (said,) = caplog.messages
    assert str(run.path) in said and str(copy.path) in said


def test_the_id_of_a_run_that_an_earlier_release_fed_stays(run) -> None:
    write_json(run.sinks / "mlflow.json", Cursor(step=9))
    assert process.tracked_id(run) == hashlib.sha256(run.run_json.read_bytes()).hexdigest()[:12]


@pytest.mark.slow
def test_a_port_in_use_is_shown_and_an_ended_run_ends_the_process(tmp_path, config) -> None:
    with free_server() as port:
        config = msgspec.structs.replace(config, telemetry=TelemetryConfig(prometheus_port=port, sinks=["prometheus"]))
        run = prepared(config)
        write_json(run.learner_json, {"pid": 1, "incarnation": 0, "time_s": 0.0, "state": "done", "policy_version": 10})
        thread = threading.Thread(target=run_cli, args=("sinks", str(run.path)))
        thread.start()
        until(lambda: (run.sinks / "prometheus.json").exists() and "in use" in kept(run, "prometheus").state)
    thread.join()
    assert kept(run, "prometheus").state == "ended"
    assert (run.logs / "sinks-0.log").read_text().count("in use") == 1


@contextmanager
def free_server() -> Iterator[int]:
    """A port on which a server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@pytest.mark.parametrize("sinks", [[sys.executable, "-c", "raise SystemExit(1)"], [sys.executable, "-c", DEAF], []])
@pytest.mark.slow
def test_sinks_that_die_or_hang_neither_fail_nor_hold_up_the_job(config, monkeypatch, capsys, sinks) -> None:
    """The last case is the real process."""
    telemetry = TelemetryConfig(prometheus_port=free_port(), sinks=["prometheus"])
    limits = msgspec.structs.replace(config.run, max_restarts=0)
    config = msgspec.structs.replace(config, telemetry=telemetry, run=limits)
    run = prepared(config)
    write_broker(run)
    write_json(run.learner_json, {"pid": 1, "incarnation": 0, "time_s": 0.0, "state": "done", "policy_version": 10})
    monkeypatch.setattr("launch.up.up.BESIDE_LEAVE_S", 0.0 if sinks else 60.0)
    monkeypatch.setattr("launch.up.up.TOLD_S", 0.1)
    job = Job(config, run, {})
    learner = [
        "sh",
        "-c",
        f"until grep -q {'feeding' if not sinks else ''} {run.logs}/sinks-0.log; do sleep 0.05; done",
    ]
    words = {"broker": ["sleep", "600"], "learner": ["true"] if sinks else learner, "node-0": ["true"], "sinks": sinks}
    job._specs = [dataclasses.replace(s, argv=words[s.name] or s.argv) for s in job._specs]
    monkeypatch.setattr(DrainFlag, "install", lambda on_second: DrainFlag())
    assert job.run(plain=True) == 0
    assert "done: 10" in capsys.readouterr().out
    if not sinks:
        assert job.supervisor.roles["sinks"].exit_code == 0
        assert kept(run, "prometheus").state == "ended"
