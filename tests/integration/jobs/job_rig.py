"""Whole jobs as a person starts them: `slipstream` commands in subprocesses, watched from the outside."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from common.json_lines import read_jsonl
from launch.cli import main
from launch.quickstart.assets import main as build_assets
from tests import waiting
from tests.launch_rig import ROOT, run_cli
from tests.waiting import LIMIT_S

SLIPSTREAM = [sys.executable, "-m", "launch.cli"]
JOB_S = 4 * LIMIT_S  # for a whole job
STALENESS = 1
GROUPS = 4  # per step


def make_assets(folder: Path) -> Path:
    """The quickstart's random model, tokenizer and problems; returns their folder."""
    assert build_assets(["--out", str(folder), "--seed", "1"]) == 0
    return folder


def write_config(path: Path, assets: Path, run_dir: Path, steps: int, **sections: dict[str, Any]) -> Path:
    """A job of a few small steps on the real engine and the real learner."""
    document: dict[str, dict[str, Any]] = {
        "run": {"name": "end-to-end", "dir": str(run_dir), "seed": 1, "steps": steps},
        "model": {"path": str(assets / "model"), "dtype": "float32"},
        "tasks": {
            "environment": "tests.integration.jobs.letters:EvenDigits",
            "dataset": str(assets / "addition" / "train.jsonl"),
        },
        "learner": {"groups_per_step": GROUPS, "optimizer": {"lr": 3e-3}, "checkpoint": {"every": 2, "keep": 2}},
        "rollout": {
            "group_size": 4, "max_tokens": 16, "concurrency": 16,
            "engine": {"max_model_len": 64, "max_num_seqs": 16, "kv_cache_mib": 16, "eager": True},
        },
        "broker": {"lease_s": 6.0, "heartbeat_s": 0.5},
        "staleness": {"max": STALENESS},
    }  # fmt: skip
    for name, section in sections.items():
        document.setdefault(name, {}).update(section)
    path.write_text(yaml.safe_dump(document))
    return path


class Process:
    """A child that writes to a log; killed with everything that it started when the test leaves the block."""

    def __init__(self, log: Path, command: list[str], **environment: str) -> None:
        self.name, self.log, self._command = log.stem, log, command
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment, process_group=0
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for child in descendants(self.process.pid):
                kill(child.pid)
            self.process.kill()
            self.process.wait(timeout=LIMIT_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = JOB_S) -> int:
        """Exit code; fails with the output when it takes longer."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {timeout_s:g} s:\n{self.output()}") from None

    def drain(self) -> None:
        """SIGTERM, which it must obey."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 0, self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


class Command(Process):
    """A running `slipstream` command."""

    def __init__(self, folder: Path, name: str, *words: str, **environment: str) -> None:
        super().__init__(folder / f"{name}.out", [*SLIPSTREAM, *words], **environment)


def slipstream(*words: str) -> str:
    """Output of a command that must succeed."""
    done = run_cli(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def told(*words: str) -> Any:
    """The JSON of a command, run in this process: a process of its own would keep a core busy while it is polled."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*words, "--json"]) == 0
    return json.loads(out.getvalue())


def status(run_dir: Path) -> dict[str, Any]:
    return told("status", str(run_dir))


def ledger(run_dir: Path) -> list[dict[str, Any]]:
    return told("ledger", str(run_dir))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_jsonl(run_dir / "metrics.jsonl") if "kind" not in line]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(run_dir / "events.jsonl"))


def until(what: str, condition: Callable[[], Any], *commands: Process) -> Any:
    """Wait for something; fails at once when a command that should run has ended."""

    def check() -> None:
        for command in commands:
            code = command.process.poll()
            assert code is None, f"{command.name} ended with {code} while waiting for {what}:\n{command.output()}"

    def told() -> str:
        return "\n".join(command.output()[-3000:] for command in commands)

    return waiting.until(condition, what, 2 * LIMIT_S, check=check, told=told, every_s=0.1)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def survivors(processes: list[psutil.Process], wait_s: float = LIMIT_S) -> list[psutil.Process]:
    """Which of these processes never end."""
    return psutil.wait_procs(processes, timeout=wait_s)[1]


def assert_trained_exactly_once(run_dir: Path, steps: int) -> None:
    """Every step is there once, within the staleness bound, and every group is in exactly one of them."""
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(steps))
    assert all(line["staleness_max"] <= STALENESS for line in lines)
    assert all(line["groups"] == GROUPS for line in lines)
    committed = [entry for entry in ledger(run_dir) if entry["state"] == "committed"]
    serials = [entry["serial"] for entry in committed]
    assert len(serials) == len(set(serials)) == steps * GROUPS
    per_step = {step: sum(entry["step"] == step for entry in committed) for step in range(steps)}
    assert set(per_step.values()) == {GROUPS}
    for entry in committed:
        assert entry["version_min"] <= entry["version_max"] <= entry["step"]
        if entry["step"] - entry["version_min"] > STALENESS:  # its old tokens left the loss, and were counted
            assert lines[entry["step"]]["tokens_expired"] > 0
