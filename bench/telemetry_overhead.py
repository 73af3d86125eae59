"""CPU time of learner and node with all that observes a job, against nothing: python bench/telemetry_overhead.py.

- on: transcripts and trace as by default, TensorBoard and Prometheus fed, and with `--page 1` the live page
- off: no transcripts, no trace, no sinks, no page

A pair is two synchronous jobs with the assets of the quickstart, in turns. The learning rate is almost zero, so no run
learns to write less than the other. CPU is user and system time of the learner's rank and of the node, children
included, over `--steps` steps after line WARM of metrics.jsonl. The broker's stands beside it.

Writes bench/results/telemetry_overhead.json. Short mode: --pairs 1 --steps 10.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import harness
import psutil

from bench.figures import ROOT, ratios
from tests.waiting import until

WARM = 5  # steps before the first look
FIXED = ("staleness.max=0", "learner.optimizer.lr=1e-12", "learner.checkpoint.every=100000", "tasks.eval_dataset=null")
WAYS = {
    "on": ("telemetry.sinks=[tensorboard,prometheus]",),
    "off": ("telemetry.transcripts=none", "telemetry.trace_mib=0", "telemetry.sinks=[]"),
}


def job(way: str, number: int, scratch: Path, steps: int, page: bool) -> dict[str, float]:
    """CPU seconds of a job's roles over `steps` steps, and the tokens that these steps sampled."""
    assets, run = scratch / "assets", scratch / f"{number}-{way}"
    paths = (f"run.dir={run}", f"model.path={assets}/model", f"tasks.dataset={assets}/addition/train.jsonl")
    words = (
        *paths,
        f"run.steps={WARM + steps + 2}",
        "rollout.nodes=1",
        *FIXED,
        *WAYS[way],
        *["--web"] * (page and way == "on"),
    )
    command = [sys.executable, "-m", "launch.cli", "up", "configs/quickstart.yaml", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (scratch / f"{number}-{way}.log").open("wb") as log:
        up = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
    try:
        first, last = (cpu_at(run, line, up) for line in (WARM, WARM + steps))
        up.send_signal(signal.SIGINT)
        up.wait(harness.PATIENCE_S)
    finally:
        up.kill()
    lines = harness.read(run).lines[WARM : WARM + steps]
    used = {f"{role}_s": last[role] - first[role] for role in first}
    tokens = sum(line["length_mean"] * line["samples"] for line in lines)
    return {"cpu_s": used["learner_s"] + used["node_s"], **used, "tokens": tokens}


def cpu_at(run: Path, lines: int, up: subprocess.Popen[bytes]) -> dict[str, float]:
    """CPU seconds of each role when metrics.jsonl has so many lines; raises AssertionError when the job ends before."""

    def check() -> None:
        assert up.poll() is None, f"the job ended with {up.returncode}; see {run}.log"

    metrics = run / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= lines, f"{lines} steps", 1200, check=check)
    joins = [event["detail"]["pid"] for event in harness.json_lines(run / "events.jsonl") if event["kind"] == "join"]
    found = {name: [json.loads((run / f"{name}.json").read_text())["pid"]] for name in ("learner", "broker")}
    processes = {role: map(psutil.Process, pids) for role, pids in (found | {"node": joins}).items()}
    return {
        role: sum(harness.cpu_s(part) for one in ones for part in (one, *one.children(recursive=True)))
        for role, ones in processes.items()
    }


def main() -> None:
    options = harness.parser(__doc__, pairs=10, steps=60, page=1).parse_args()
    scratch = harness.scratch()
    harness.python("-m", "launch.quickstart.assets", "--out", scratch / "assets")
    measure = partial(job, scratch=scratch, steps=options.steps, page=bool(options.page))
    found = harness.in_turns(list(WAYS), range(options.pairs), measure)
    compared = {}
    for name in ("cpu_s", "learner_s", "node_s", "broker_s", "tokens"):
        pairs = [round(x, 4) for x in ratios(*([one[name] for one in found[way]] for way in WAYS))]
        compared[name] = {"median": statistics.median(pairs), "least": min(pairs), "most": max(pairs), "pairs": pairs}
    result = {"ways": harness.rows(found, ("way",), "cpu_s"), "on_over_off": compared}
    harness.save("telemetry_overhead", options, {"rounds": options.pairs, **result})


if __name__ == "__main__":
    main()
