"""How long a node takes to join a running job: python bench/join.py [--joins 6].

Starts the quickstart's job (random model, the real `slipstream up`) and lets it train. Then it adds one node after the
other with `slipstream rollout --join`, each after the one before has left. The node measures the figures itself, as
`joined` of `slipstream status --json`. They are seconds from the start of its process, and from a ready engine, to its
first accepted group. Learner and first node keep both cores of a small machine busy meanwhile.
"""

import tempfile
from pathlib import Path

import harness

from broker.contract import JoinTimes
from common.errors import SlipstreamError
from common.process.run_dir import RunDir
from launch.observe.observation import observe
from launch.resolve_target import Target
from tests.rigs.jobs import make_assets, metrics
from tests.rigs.processes import Command, until

WARM_STEPS = 5  # trained before the first node is added


def times_of(job: Target, node_id: str) -> JoinTimes | None:
    """The times of a node that has delivered its first group; None before."""
    try:
        nodes = observe(job).status.nodes
    except SlipstreamError:
        return None
    return next((n.report.joined for n in nodes if n.report.node_id == node_id and n.report.joined.delivered), None)


def join(run: RunDir, node_id: str) -> dict[str, float]:
    """Add one node, wait for its first group, let it leave."""
    job = Target(run)
    address = observe(job).status.address
    with Command(run.path, node_id, "rollout", "--join", address, "--node-id", node_id) as node:
        times = until("the first group", lambda: times_of(job, node_id), node)
        node.drain()
    return {
        "engine_to_first_group_s": round(times.delivered - times.engine, 3),
        "process_to_first_group_s": round(times.delivered, 3),
    }


def measure(arguments: harness.Options, folder: Path) -> list[dict[str, float]]:
    make_assets(folder / "assets")
    run = RunDir(folder / "run")
    words = [f"run.dir={run.path}", "run.steps=1000000", f"model.path={folder}/assets/model"]
    words += [f"tasks.dataset={folder}/assets/addition/train.jsonl", "evaluation.datasets=[]", *arguments.overrides]
    rows: list[dict[str, float]] = []
    with Command(folder, "up", "up", arguments.config, *words, "--plain") as job:
        until("training", lambda: len(metrics(run.path)) >= WARM_STEPS, job)
        for i in range(arguments.joins):
            rows.append(join(run, f"newcomer-{i}"))
            print(rows[-1], flush=True)
        job.drain()
    return rows


@harness.script(config="configs/quickstart.yaml", joins=6, overrides=())
def main(arguments: harness.Options) -> harness.Figures:
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        rows = measure(arguments, Path(folder))
    return {"rounds": len(rows), "joins": rows}
