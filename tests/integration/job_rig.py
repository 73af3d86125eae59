"""Whole jobs as a person starts them: `slipstream` commands in subprocesses, watched from the outside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from launch.quickstart.assets import main as build_assets
from tests import waiting
from tests.waiting import LIMIT_S

COMMAND = [sys.executable, "-m", "launch.cli"]
REPOSITORY = Path(__file__).resolve().parents[2]
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
            "environment": "tests.integration.letters:EvenDigits",
            "dataset": str(assets / "addition" / "train.jsonl"),
        },
        "learner": {
            "groups_per_step": GROUPS,
            "optimizer": {"lr": 3e-3},
            "checkpoint": {"every": 2, "keep": 2},
        },
        "rollout": {
            "group_size": 4,
            "max_tokens": 16,
            "concurrency": 16,
            "engine": {"max_model_len": 64, "max_num_seqs": 16, "kv_cache_mib": 16, "eager": True},
        },
        "broker": {"lease_s": 6.0, "heartbeat_s": 0.5},
        "staleness": {"max": STALENESS},
    }
    for name, section in sections.items():
        document.setdefault(name, {}).update(section)
    path.write_text(yaml.safe_dump(document))
    return path


class Command:
    """A running `slipstream` command; killed with everything that it started when the test leaves the block."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.name, self.log = name, folder / f"{name}.out"
        self._words = words

    def __enter__(self) -> "Command":
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *self._words], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, process_group=0
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

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def slipstream(*words: str) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(run_dir: Path) -> dict[str, Any]:
    return json.loads(slipstream("status", str(run_dir), "--json"))


def ledger(run_dir: Path) -> list[dict[str, Any]]:
    return json.loads(slipstream("ledger", str(run_dir), "--json"))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def until(what: str, condition: Callable[[], Any], *commands: Command) -> Any:
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
        if (
            entry["step"] - entry["version_min"] > STALENESS
        ):  # overtaken: its old tokens left the loss, and were counted
            assert lines[entry["step"]]["tokens_expired"] > 0
