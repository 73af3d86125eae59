"""Run a Slipstream job from a bench script and read its figures back."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMOOTHING = 0.8


@dataclass(frozen=True)
class Job:
    """Figures of one finished job; `lines` are its metrics lines."""

    run_dir: Path
    lines: list[dict]

    @property
    def began_s(self) -> float:
        """Unix time at which the first group was leased: every role is up, as after a peer's set-up."""
        events = [json.loads(x) for x in (self.run_dir / "events.jsonl").read_text().splitlines()]
        return min(e["time_s"] for e in events if e["kind"] == "first_lease")

    @property
    def wall_s(self) -> float:
        return self.lines[-1]["time_s"] - self.began_s

    def seconds_to_reward(self, level: float) -> float | None:
        """Seconds from `began_s` until the exponentially smoothed reward reaches `level`; None if never."""
        smoothed = None
        for line in self.lines:
            reward = line["reward_mean"]
            smoothed = reward if smoothed is None else SMOOTHING * smoothed + (1 - SMOOTHING) * reward
            if smoothed >= level:
                return line["time_s"] - self.began_s
        return None

    def steps_to_reward(self, level: float) -> int | None:
        """Steps until the smoothed reward reaches `level`; None if never."""
        smoothed = None
        for line in self.lines:
            reward = line["reward_mean"]
            smoothed = reward if smoothed is None else SMOOTHING * smoothed + (1 - SMOOTHING) * reward
            if smoothed >= level:
                return line["step"] + 1
        return None

    def total(self, name: str) -> float:
        return sum(line[name] for line in self.lines)


def run(config: str, run_dir: Path, *overrides: str, timeout_s: float = 1200) -> Job:
    """`slipstream up CONFIG run.dir=... overrides` to its end; raises RuntimeError with the output's tail."""
    command = [sys.executable, "-m", "launch.cli", "up", config, f"run.dir={run_dir}", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, env=dict(os.environ))
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} exited with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return read(run_dir)


def read(run_dir: Path) -> Job:
    """The figures of a finished job."""
    text = (run_dir / "metrics.jsonl").read_text()
    return Job(run_dir, [json.loads(x) for x in text.splitlines()])


def write(name: str, result: dict) -> Path:
    """Write bench/results/NAME.json."""
    path = ROOT / "bench" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
