"""Trackers fed by the real process with their real libraries, and read back with them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.process.run_dir import RunDir
from tests.rigs.sinks import (
    EVALUATION,
    ask,
    end,
    feeding,
    new_run,
    python_with_trackers,
    said,
    state_of,
    until_fed,
    write_steps,
)
from tests.rigs.waiting import LIMIT_S, until

NAMES = {"train/reward_mean", "time/step_s", "tokens/tokens_trained", "broker/groups", "staleness/staleness_mean"}
NAMES |= {
    "train/mismatch_by_age/0",
    "train/mismatch_by_age/1",
    "samples/samples_failed_by_reason/x",
    "train/incarnation",
}

TENSORBOARD = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, STORE_EVERYTHING_SIZE_GUIDANCE
seen = {}
for name in ("", "evaluation"):
    events = EventAccumulator(sys.argv[1] + "/" + name, size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE)
    events.Reload()
    for tag in events.Tags()["scalars"]:
        seen[tag] = [(e.step, round(e.value, 4), e.wall_time) for e in events.Scalars(tag)]
print(json.dumps(seen))
"""
WANDB = """
import glob, struct
from wandb.proto import wandb_internal_pb2 as pb

def records(data):  # the log format of LevelDB, behind seven bytes
    at, parts = 7, b""
    while at + 7 < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield pb.Record.FromString(parts)
            parts = b""

rows, name, config = [], "", {}
for path in sorted(glob.glob(sys.argv[1] + "/wandb/offline-run-*/*.wandb")):
    for record in records(open(path, "rb").read()):
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join([i.key] * bool(i.key) or i.nested_key): json.loads(i.value_json) for i in items})
        if record.HasField("run"):
            name = record.run.display_name
            config = {u.key: json.loads(u.value_json) for u in record.run.config.update} or config
print(json.dumps({"rows": rows, "name": name, "config": config}))
"""
MLFLOW = """
from mlflow import MlflowClient
client = MlflowClient(f"sqlite:///{sys.argv[1]}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("slipstream").experiment_id])
points = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
history = {name: [(metric.step, metric.value) for metric in found] for name, found in points.items()}
print(json.dumps({"history": history, "params": run.data.params, "name": run.info.run_name, "status": run.info.status}))
"""
TRACKIO = """
import trackio
from trackio.sqlite_storage import SQLiteStorage
runs = {run.name: run for run in trackio.Api().runs("slipstream")}
logs = {name: SQLiteStorage.get_logs("slipstream", name, run_id=run.id) for name, run in runs.items()}
print(json.dumps({"logs": logs, "config": {name: run.config for name, run in runs.items()}}))
"""


def finish(run: RunDir, process: subprocess.Popen[bytes]) -> None:
    """The run ends, and the process follows within seconds."""
    end(run)
    assert process.wait(LIMIT_S) == 0, said(run)


def evaluation(version: int) -> bytes:
    return EVALUATION % (version - 1, version, 1e9 + version)


@pytest.mark.slow
def test_tensorboard_has_each_step_once_after_kills_and_a_resumed_learner(tmp_path: Path) -> None:
    python, run = python_with_trackers(), new_run(tmp_path)
    write_steps(run, range(10))
    with run.metrics.open("ab") as file:
        file.write(evaluation(10))
    with feeding(run, "tensorboard", python=python) as process:
        until_fed(run, process, 9, "tensorboard")
        process.kill()
    # The cursor is older than the event file, as after a kill between the two: steps 7 to 9 are fed again.
    state = state_of(run, "tensorboard")
    size = sum(len(line) + 1 for line in run.metrics.read_bytes().split(b"\n")[:7])
    state.step, state.offset, state.evaluated = 6, size, {}
    (run.sinks / "tensorboard.json").write_bytes(msgspec.json.encode(state))
    with feeding(run, "tensorboard", python=python) as process:
        until_fed(run, process, 9, "tensorboard")
        write_steps(run, range(8, 12), incarnation=1)  # replaces the file
        until_fed(run, process, 11, "tensorboard")
        finish(run, process)
    seen = ask(python, TENSORBOARD, run.path / "tensorboard")
    rewards = [[step, step + (0.1 if step >= 8 else 0.0)] for step in range(12)]
    assert [event[:2] for event in seen["train/reward_mean"]] == rewards
    assert seen["train/reward_mean"][9][2] == 1e9 + 109, "the time of the step, not of its arrival"
    assert seen.keys() >= NAMES
    assert {tuple(event[:2]) for event in seen["evaluation/data_held_out.jsonl/pass_at/4"]} <= {(10, 0.75)}


@pytest.mark.slow
def test_wandb_offline_mlflow_and_trackio_keep_steps_through_a_kill_and_a_resumed_learner(tmp_path: Path) -> None:
    python, run = python_with_trackers(), new_run(tmp_path)
    sinks, env = ("wandb", "mlflow", "trackio"), {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    write_steps(run, range(4))
    with run.metrics.open("ab") as file:
        file.write(evaluation(4))
    with feeding(run, *sinks, python=python, **env) as process:
        until_fed(run, process, 3, *sinks)
        process.kill()
    for sink in sinks[1:]:  # a crash before the cursor was written; W&B's server does this for offline runs
        (run.sinks / f"{sink}.json").unlink()
    text = run.config.read_text()  # the run is continued with another config
    run.config.write_text(re.sub(r"(?m)^  steps: \d+", "  steps: 777", text))
    assert run.config.read_text() != text
    with feeding(run, *sinks, python=python, **env) as process:
        until_fed(run, process, 3, *sinks)
        write_steps(run, [4, 5], environment=dict.fromkeys(("correct (strict), %", "a//b", "../b", "x" * 300), 0.5))
        until_fed(run, process, 5, *sinks)
        write_steps(run, [3, 4], incarnation=1)
        until(lambda: all(state_of(run, sink).start == 1 for sink in sinks))
        write_steps(run, [5, 6], incarnation=1)
        finish(run, process)
    rewards = [*([step, float(step)] for step in range(6)), [6, 6.1]]
    again = sorted([*rewards, [3, 3.1], [4, 4.1], [5, 5.1]])

    wandb: Any = ask(python, WANDB, run.path)
    rows = [row for row in wandb["rows"] if "train/reward_mean" in row]
    assert [[row["step"], row["train/reward_mean"]] for row in rows] == rewards
    assert rows[0].keys() >= NAMES
    (held_out,) = [row for row in wandb["rows"] if "evaluation/data_held_out.jsonl/mean_reward" in row]
    assert held_out["evaluation/data_held_out.jsonl/policy_version"] == 4
    assert (wandb["name"], wandb["config"]["run"]["name"]) == ("demo", "demo")

    mlflow: Any = ask(python, MLFLOW, run.path)
    assert sorted(mlflow["history"]["train/reward_mean"]) == again
    assert mlflow["history"]["evaluation/data_held_out.jsonl/pass_at/1"] == [[4, 0.25]]
    assert mlflow["history"].keys() >= NAMES
    assert (mlflow["name"], mlflow["params"]["staleness.max"], mlflow["status"]) == ("demo", "2", "FINISHED")
    place, short = "train/environment/", ("correct _strict__ _", "a/_/b", "_/b")  # names that it does not take
    taken = {*(f"{place}{name}" for name in short), f"{place}{'x' * 300}"[:250]}
    assert {name for name in mlflow["history"] if name.startswith(place)} == taken
    assert mlflow["params"]["run.steps"] != "777", "MLflow keeps the first value"

    trackio: Any = ask(python, TRACKIO, **env)
    steps, evaluations = sorted(trackio["logs"])
    assert sorted([line["step"], line["train/reward_mean"]] for line in trackio["logs"][steps]) == rewards
    assert trackio["logs"][steps][0].keys() >= NAMES
    assert {"evaluation/data_held_out.jsonl/mean_reward": 0.5, "step": 4}.items() <= trackio["logs"][evaluations][
        0
    ].items()
    assert steps.startswith("demo-") and trackio["config"][steps]["run"]["name"] == "demo"
