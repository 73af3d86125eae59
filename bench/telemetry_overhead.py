"""CPU time of learner and node with all that observes a job, against nothing: python bench/telemetry_overhead.py.

- on: transcripts and trace as by default, TensorBoard and Prometheus fed, and the live page
- off: no transcripts, no trace, no sinks, no page

A pair is two synchronous jobs with the assets of the quickstart, in turns. The learning rate is almost zero, so no run
learns to write less than the other. CPU is user and system time of the learner's rank and of the node, children
included, over `--steps` steps after line WARM of metrics.jsonl. The broker's stands beside it.

Writes bench/results/telemetry_overhead.json. Short mode: --pairs 1 --steps 10.
"""

import json
import statistics
from pathlib import Path

import harness
import psutil

from bench.figures import ratios
from tests.rigs.jobs import events, make_assets, metrics
from tests.rigs.processes import Command, until

WARM = 5  # steps before the first look
FIXED = ("staleness.max=0", "learner.optimizer.lr=1e-12", "learner.checkpoint.every=100000", "evaluation.datasets=[]")
WAYS = {
    "on": ("telemetry.sinks=[tensorboard,prometheus]", "--web", "--no-stay"),
    "off": ("telemetry.transcripts=none", "telemetry.trace_mib=0", "telemetry.sinks=[]"),
}


def job(way: str, number: int, scratch: Path, steps: int) -> dict[str, float]:
    """CPU seconds of a job's roles over `steps` steps, and the tokens that these steps sampled."""
    assets, run = scratch / "assets", scratch / f"{number}-{way}"
    paths = (f"run.dir={run}", f"model.path={assets}/model", f"tasks.dataset={assets}/addition/train.jsonl")
    words = (*paths, f"run.steps={WARM + steps + 2}", "rollout.nodes=1", *FIXED, *WAYS[way])
    with Command(scratch, run.name, "up", "configs/quickstart.yaml", *words) as up:
        first, last = (cpu_at(run, line, up) for line in (WARM, WARM + steps))
        up.drain()
    used = {f"{role}_s": last[role] - first[role] for role in first}
    tokens = sum(line["length_mean"] * line["samples"] for line in metrics(run)[WARM : WARM + steps])
    return {"cpu_s": used["learner_s"] + used["node_s"], **used, "tokens": tokens}


def cpu_at(run: Path, lines: int, up: Command) -> dict[str, float]:
    """CPU seconds of each role when metrics.jsonl has so many lines; raises AssertionError when the job ends before."""
    until(f"{lines} steps", lambda: len(metrics(run)) >= lines, up)
    pids = {role: json.loads((run / f"{role}.json").read_text())["pid"] for role in ("learner", "broker")}
    pids["node"] = next(event["detail"]["pid"] for event in events(run) if event["kind"] == "join")
    return {role: harness.cpu_s(one := psutil.Process(pid)) + harness.children_cpu_s(one) for role, pid in pids.items()}


@harness.script(pairs=10, steps=60)
def main(options: harness.Options) -> harness.Figures:
    scratch = harness.scratch()
    make_assets(scratch / "assets")
    ways = harness.in_turns(list(WAYS), range(options.pairs), lambda *one: job(*one, scratch, options.steps))
    compared = {}
    for name in ("cpu_s", "learner_s", "node_s", "broker_s", "tokens"):
        pairs = [round(x, 4) for x in ratios(*([one[name] for one in ways[way]] for way in WAYS))]
        compared[name] = {"median": statistics.median(pairs), "least": min(pairs), "most": max(pairs), "pairs": pairs}
    return {"rounds": options.pairs, "ways": harness.rows(ways, ("way",), "cpu_s"), "on_over_off": compared}
