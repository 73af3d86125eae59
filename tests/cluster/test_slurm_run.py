"""Whole runs on a real Slurm: submitted, scaled, preempted, requeued and cancelled; or trained to the end."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from common.process.run_dir import RunDir
from launch.cluster.slurm.jobs import read_jobs
from tests.rigs.hosts import Slurm, slurm, slurm_missing
from tests.rigs.jobs import assert_trained_exactly_once, make_assets, metrics, write_config
from tests.rigs.processes import OURS
from tests.rigs.waiting import until

pytestmark = pytest.mark.skipif(slurm_missing() != "", reason=slurm_missing())
STEPS = 100_000  # more than the test waits for


class Run:
    """A run on the cluster, as its owner on the head host sees it."""

    def __init__(self, cluster: Slurm, folder: Path, steps: int, **learner: int) -> None:
        self.cluster, self.path = cluster, folder / "run"
        sections: dict[str, Any] = {"rollout": {"nodes": 1}, "weights": {"transport": "relay"}, "learner": learner}
        sections["tasks"] = {"options": {"pause_s": 0.25}}  # else the learner trains all the time that Slurm takes
        self.config = write_config(folder / "job.yaml", make_assets(folder / "assets"), self.path, steps, **sections)

    def slipstream(self, *words: str) -> str:
        env = OURS
        done = self.cluster.command(sys.executable, "-m", "launch.cli", *words, **env)
        assert done.returncode == 0, done.stderr + self.told()
        return done.stdout

    def submit(self) -> None:
        self.slipstream("slurm", str(self.config), "--sbatch", "gpus-per-node=")

    def scale(self, nodes: int) -> None:
        self.slipstream("scale", str(self.path), "--rollouts", str(nodes))

    def queue(self) -> str:
        return self.cluster.said("squeue", "--noheader", "--array", "--format=%i %P %T %N")

    def nodes(self) -> int:
        """Nodes that have run a version, by their logs: a command for each look would keep a core busy."""
        logs = (self.path / "logs").glob("slurm-fleet-*")
        return sum(" active: flip" in log.read_text(errors="replace") for log in logs)

    def step(self) -> int:
        return metrics(self.path)[-1]["step"] if (self.path / "metrics.jsonl").exists() and metrics(self.path) else -1

    def until_trained(self, more: int) -> None:
        goal = self.step() + more
        until(lambda: self.step() >= goal, f"step {goal}", told=self.told, every_s=0.2)

    def until_ended(self) -> None:
        until(lambda: not self.queue(), "no job is left", told=self.told, every_s=0.5)
        left = [host.processes("launch.") for host in self.cluster.hosts]
        assert not any(left), left

    def told(self) -> str:
        logs = sorted((self.path / "logs").glob("slurm-*"))
        text = "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
        return f"{text}\n{self.queue()}"


def test_a_run_is_scaled_preempted_requeued_and_cancelled_exactly_once(tmp_path: Path) -> None:
    with slurm(tmp_path, 3) as cluster:
        run = Run(cluster, tmp_path, STEPS)
        run.submit()
        run.until_trained(2)
        jobs = read_jobs(RunDir(run.path))
        run.scale(2)
        until(lambda: run.nodes() == 2, "2 nodes work", told=run.told, every_s=0.5)
        status = json.loads(run.slipstream("status", str(run.path), "--json"))
        first, second = read_jobs(RunDir(run.path)).fleet
        expected = {f"fleet:{first}_0", f"fleet:{second}_0"}
        assert {node["id"] for node in status["nodes"]} == expected, "behind the name of their credential"

        urgent = ("--partition=urgent", "--nodelist=h2", "--exclusive", "--wrap=sleep 1000")
        guest = cluster.said("sbatch", "--parsable", *urgent)
        cluster.said("scontrol", "requeue", jobs.learner)
        until(lambda: f"{guest} urgent RUNNING h2" in run.queue(), "h2 was given away", told=run.told, every_s=0.5)
        cluster.said("scancel", guest)
        log = run.path / "logs" / f"slurm-learner-{jobs.learner}.log"
        until(lambda: "drained; comes back" in log.read_text(), "the learner was requeued", told=run.told, every_s=0.5)
        run.until_trained(3)
        until(lambda: run.queue().count("RUNNING") == 4, "everything is back", told=run.told, every_s=0.5)

        run.scale(1)
        until(lambda: run.queue().count("\n") == 2, "3 jobs are left", told=run.told, every_s=0.5)
        run.until_trained(2)
        run.slipstream("slurm", str(run.path), "--cancel")
        run.until_ended()

        assert_trained_exactly_once(run.path, run.step() + 1)


def test_a_learner_of_two_hosts_trains_to_the_end_and_ends_the_run(tmp_path: Path) -> None:
    with slurm(tmp_path, 3) as cluster:
        run = Run(cluster, tmp_path, 4, machines=2, world_size=2)
        run.submit()
        run.until_ended()
        assert (run.path / "model" / "config.json").exists()
        assert_trained_exactly_once(run.path, 4)
