"""Runs for tests of the sinks: metrics as a learner writes them, and the process that feeds trackers."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.metrics import StepMetrics, numbers
from common.process.run_dir import MetricsWriter, RunDir, write_json
from launch.sinks.feed import Cursor
from tests.rigs.configs import config_of, prepared
from tests.rigs.processes import ROOT
from tests.rigs.waiting import until

EVALUATION = b'{"kind":"evaluation","step":%d,"policy_version":%d,"dataset":"data/held out.jsonl","time_s":%f,'
EVALUATION += b'"mean_reward":0.5,"pass_at":{"1":0.25,"4":0.75}}\n'


def python_with_trackers() -> str:
    found = os.environ.get("SLIPSTREAM_SINKS_PYTHON")
    if not found:
        pytest.skip("SLIPSTREAM_SINKS_PYTHON names no interpreter; `bash launch/setup.sh adapters` builds one")
    return found


def step_line(step: int, incarnation: int = 0, **values: Any) -> StepMetrics:
    """A line whose reward tells its step and the start of its learner."""
    known: dict[str, Any] = {
        **dict.fromkeys(numbers(StepMetrics), 0),
        "step": step,
        "policy_version": step + 1,
        "incarnation": incarnation,
        "time_s": 1e9 + 100.0 * incarnation + step,
        "step_s": 2.0,
        "reward_mean": step + incarnation / 10,
        "mismatch_by_age": [0.5, 0.25],
        "samples_failed_by_reason": {"x": 2},
    }
    return StepMetrics(**known | values)


def write_steps(run: RunDir, steps: Sequence[int], incarnation: int = 0, **values: Any) -> None:
    """As a learner that resumes at the first of the steps: lines of later steps are removed."""
    writer = MetricsWriter(run.metrics, keep_before_step=steps[0])
    for step in steps:
        writer.write(step_line(step, incarnation, **values))
    writer.close()


def end(run: RunDir, state: str = "done") -> None:
    record = {"pid": os.getpid(), "incarnation": 0, "state": state, "policy_version": 1, "time_s": 0.0}
    write_json(run.learner_json, record)


def new_run(folder: Path, **sections: Any) -> RunDir:
    return prepared(config_of(folder / "run", **sections))


def command(run: RunDir, *sinks: str, python: str = sys.executable) -> list[str]:
    words = [word for sink in sinks for word in ("--sink", sink)]
    return [python, "-m", "launch.cli", "sinks", str(run.path), *words]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@contextmanager
def feeding(run: RunDir, *sinks: str, python: str = sys.executable, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process `slipstream sinks`, killed at the end of the block."""
    with (run.path / "sinks.out").open("ab") as out:
        process = subprocess.Popen(
            command(run, *sinks, python=python), env=environment(env), stdout=out, stderr=out, cwd=run.path
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def state_of(run: RunDir, sink: str) -> Cursor:
    try:
        return msgspec.json.decode((run.sinks / f"{sink}.json").read_bytes(), type=Cursor)
    except FileNotFoundError:
        return Cursor()


def until_fed(run: RunDir, process: subprocess.Popen[bytes], step: int, *sinks: str) -> None:
    """Until each sink has this step, or later ones."""

    def living() -> None:
        assert process.poll() is None, said(run)
        assert all(state_of(run, sink).state in ("starting", "feeding", "ended") for sink in sinks), said(run)

    def fed() -> bool:
        return all(state_of(run, sink).step >= step for sink in sinks)

    until(fed, f"{sinks} at {step}", check=living, told=lambda: said(run))


def said(run: RunDir) -> str:
    return (run.path / "sinks.out").read_text()


def ask(python: str, code: str, *words: object, **env: str) -> Any:
    """The JSON that `code` prints under the interpreter that has the trackers."""
    run = [python, "-W", "ignore", "-c", f"import json, sys\n{code}", *map(str, words)]
    done = subprocess.run(run, env=environment(env), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout.splitlines()[-1])
