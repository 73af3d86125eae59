"""How long a node takes to join a running job: python bench/join.py [--joins 6].

Starts the quickstart's job (random model, the real `slipstream up`) and lets it train. Then it adds one node after the
other with `slipstream rollout --join`, each after the one before has left. The node measures the figures itself, as
`joined` of `slipstream status --json`. They are seconds from the start of its process to each stage, up to its first
accepted group. Learner and first node keep both cores of a small machine busy meanwhile. Writes
bench/results/join.json.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import harness

from broker.contract import JoinTimes
from common.errors import SlipstreamError
from common.json_lines import read_jsonl
from common.process.run_dir import RunDir
from launch.observe.observation import observe
from launch.quickstart.assets import main as build_assets

T = TypeVar("T")
WAIT_S = 120.0
STAGES = {  # field of JoinTimes: its name in the result
    "registered": "registered",
    "engine": "engine",
    "staged": "staged",
    "active": "active",
    "leased": "lease",
    "delivered": "first_group",
}
WARM_STEPS = 5  # trained before the first node is added


@contextlib.contextmanager
def slipstream(log: Path, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A `slipstream` command in the background, which is told to stop at the end."""
    environment = {**os.environ, "PYTHONPATH": str(harness.ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "launch.cli", *words]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=harness.ROOT, stdout=file, stderr=file, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(WAIT_S)


def until(what: str, found: Callable[[], T | None], process: "subprocess.Popen[bytes]", log: Path) -> T:
    """Wait for something while a command runs; raises RuntimeError with its output when it ends or takes too long."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        value = found()
        if value is not None:
            return value
        time.sleep(0.25)
    raise RuntimeError(f"no {what}; the end of {log}:\n{log.read_text(errors='replace')[-3000:]}")


def times_of(run: RunDir, node_id: str) -> JoinTimes | None:
    """The times of a node that has delivered its first group; None before."""
    try:
        nodes = observe(run).status.nodes
    except SlipstreamError:
        return None
    return next((n.report.joined for n in nodes if n.report.node_id == node_id and n.report.joined.delivered), None)


def stages(times: JoinTimes) -> dict[str, float]:
    """Seconds of each stage, and of the two ways that people ask for."""
    ends = [getattr(times, stage) for stage in STAGES]
    figures = {f"{name}_s": end - begin for name, begin, end in zip(STAGES.values(), [0.0, *ends], ends, strict=False)}
    figures["engine_to_first_group_s"] = times.delivered - times.engine
    figures["process_to_first_group_s"] = times.delivered
    return {name: round(value, 3) for name, value in figures.items()}


def join(run: RunDir, node_id: str) -> dict[str, float]:
    """Add one node, wait for its first group, let it leave."""
    address = observe(run).status.address
    log = run.path / f"{node_id}.out"
    with slipstream(log, "rollout", "--join", address, "--node-id", node_id) as node:
        return stages(until("first group", lambda: times_of(run, node_id), node, log))


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """One job, all its joins."""
    build_assets(["--out", str(folder / "assets"), "--seed", "1"])
    run, log = RunDir(folder / "run"), folder / "up.out"
    settings = {
        "run.dir": run.path,
        "run.steps": 1_000_000,
        "model.path": folder / "assets" / "model",
        "tasks.dataset": folder / "assets" / "addition" / "train.jsonl",
        "tasks.eval_dataset": "null",
    }
    words = [*(f"{key}={value}" for key, value in settings.items()), *arguments.overrides]
    rows: list[dict[str, float]] = []
    with slipstream(log, "up", arguments.config, *words, "--plain") as job:
        until("training", lambda: trained(run) >= WARM_STEPS or None, job, log)
        for i in range(arguments.joins):
            before = trained(run), time.monotonic()
            row = join(run, f"newcomer-{i}")
            row["step_s"] = round((time.monotonic() - before[1]) / max(1, trained(run) - before[0]), 3)
            rows.append(row)
            print(row, flush=True)
    return rows


def trained(run: RunDir) -> int:
    """Steps so far."""
    return sum(1 for _ in read_jsonl(run.metrics))


def main() -> None:
    parser = harness.parser(__doc__, config="configs/quickstart.yaml", joins=6)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        rows = measure(arguments, Path(folder))
    harness.save("join", arguments, {"rounds": len(rows), "joins": rows})


if __name__ == "__main__":
    main()
