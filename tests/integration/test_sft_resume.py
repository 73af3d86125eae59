"""A warm start that was killed or drained goes on bitwise where it was; its model goes straight into the RL loop."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.json_lines import read_jsonl
from common.metrics import SftMetrics, read_metrics
from common.process.run_dir import RunDir
from tests.integration import sft_assets
from tests.integration.test_learner_resume import ENVIRONMENT, HERE, Job, process, wait_for
from tests.waiting import LIMIT_S

STEPS = 24
ROWS = 10  # an epoch is no whole number of steps


class WarmStart:
    """A run folder of `slipstream sft` on conversations, and its learners, forked one at a time or real processes."""

    def __init__(self, folder: Path, model: Path, learner: str = "", checkpoint: str = "every: 3") -> None:
        folder.mkdir()
        self.rows = folder / "rows.jsonl"
        sft_assets.write_rows(self.rows, ROWS)
        self.config = folder / "sft.yaml"
        self.config.write_text(
            f"run: {{name: warm, dir: {folder}/run, steps: {STEPS}, seed: 3}}\n"
            f"model: {{path: {model}, dtype: float32}}\n"
            f"tasks: {{dataset: {self.rows}}}\n"
            f"learner: {{sequences_per_step: 4, micro_batch_tokens: 128, "
            f"optimizer: {{lr: 1.0e-3, warmup_steps: 2, schedule: cosine}}, checkpoint: {{{checkpoint}}}{learner}}}\n"
        )
        self.run = RunDir(folder / "run")

    def start(self, forks: subprocess.Popen[str]) -> int:
        """Fork a learner; its process id."""
        forks.stdin.write(json.dumps(["--config", str(self.config)]) + "\n")
        forks.stdin.flush()
        return int(forks.stdout.readline())

    def finish(self, forks: subprocess.Popen[str]) -> None:
        self.start(forks)
        assert int(forks.stdout.readline()) == 0, forks.stderr

    def command(self, ranks: int) -> list[str]:
        command = [sys.executable, "-m", "learner.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
        return [*command, "--shutdown-timeout", "300", "-m", "learner.main", "--config", str(self.config)]

    def lines(self) -> list[SftMetrics]:
        return read_metrics(self.run.metrics, SftMetrics)

    def weights(self) -> str:
        return hashlib.sha256((self.run.model / "model.safetensors").read_bytes()).hexdigest()

    def record(self) -> dict[str, object]:
        return json.loads(self.run.learner_json.read_bytes())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("dense", "moe"):
        sft_assets.build(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "learner_forks.py")]
    with process(command, stdin=True) as server:
        yield server


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, models: Path, forks: subprocess.Popen[str]) -> WarmStart:
    job = WarmStart(tmp_path_factory.mktemp("unbroken") / "job", models / "dense")
    job.finish(forks)
    assert job.lines()[-1].loss < 0.5 * job.lines()[0].loss
    return job


def check_equal(job: WarmStart, unbroken: WarmStart) -> None:
    found, expected = job.lines(), unbroken.lines()
    assert [(line.step, line.loss, line.lr) for line in found] == [(x.step, x.loss, x.lr) for x in expected]
    assert job.weights() == unbroken.weights()


def test_killed_with_9_it_resumes_from_its_newest_checkpoint_and_ends_bitwise_equal(
    tmp_path: Path, models: Path, forks: subprocess.Popen[str], unbroken: WarmStart
) -> None:
    job = WarmStart(tmp_path / "job", models / "dense", checkpoint="every: 3, asynchronous: false")
    pid = job.start(forks)
    wait_for(lambda: len(job.lines()) >= 8, forks)
    os.kill(pid, signal.SIGKILL)
    assert int(forks.stdout.readline()) == -signal.SIGKILL
    assert not job.run.model.exists()
    job.finish(forks)
    check_equal(job, unbroken)
    starts = [e["detail"]["step"] for e in read_jsonl(job.run.events) if e["kind"] == "learner_started"]
    assert starts[0] == 0 and starts[1] >= 6 and starts[1] % 3 == 0
    assert job.record()["state"] == "done"


def test_killed_with_9_in_the_middle_of_saves_it_still_ends_bitwise_equal(
    tmp_path: Path, models: Path, forks: subprocess.Popen[str], unbroken: WarmStart
) -> None:
    job = WarmStart(tmp_path / "job", models / "dense", checkpoint="every: 1, keep: 1")
    draw = random.Random(3)
    for kill in range(3):
        pid = job.start(forks)
        reached = len(job.lines()) + 2
        wait_for(lambda reached=reached: len(job.lines()) >= reached, forks, every_s=0.0005)
        wait_for(lambda: any(job.run.checkpoints.glob(".step-*.tmp")), forks, every_s=0.0005)
        time.sleep(draw.uniform(0.0, 0.01))
        os.kill(pid, signal.SIGKILL)
        assert int(forks.stdout.readline()) == -signal.SIGKILL, f"kill {kill}"
    job.finish(forks)
    check_equal(job, unbroken)
    assert not list(job.run.checkpoints.glob(".*"))


def test_told_to_stop_it_writes_a_checkpoint_and_goes_on_from_there(
    tmp_path: Path, models: Path, forks: subprocess.Popen[str], unbroken: WarmStart
) -> None:
    job = WarmStart(tmp_path / "job", models / "dense", checkpoint="every: 100")
    pid = job.start(forks)
    wait_for(lambda: len(job.lines()) >= 4, forks, every_s=0.0005)
    os.kill(pid, signal.SIGTERM)
    assert int(forks.stdout.readline()) == 0
    stopped = len(job.lines())
    assert 4 <= stopped < STEPS
    assert [path.name for path in job.run.checkpoints.iterdir()] == [f"step-{stopped:06d}"]
    assert not job.run.model.exists()
    assert (job.record()["state"], job.record()["policy_version"]) == ("drained", stopped)
    job.finish(forks)
    check_equal(job, unbroken)


def test_another_dataset_is_refused_when_a_run_goes_on(
    tmp_path: Path, models: Path, forks: subprocess.Popen[str]
) -> None:
    job = WarmStart(tmp_path / "job", models / "dense", checkpoint="every: 2, asynchronous: false")
    pid = job.start(forks)
    wait_for(lambda: len(job.lines()) >= 4, forks, every_s=0.0005)
    os.kill(pid, signal.SIGTERM)
    assert int(forks.stdout.readline()) == 0
    sft_assets.write_rows(job.rows, ROWS + 1)
    job.start(forks)
    assert int(forks.stdout.readline()) == 2


def test_experts_tuned_on_two_ranks_go_on_after_a_stop_and_into_the_rl_loop(tmp_path: Path, models: Path) -> None:
    layout = ", world_size: 2, parallel: {expert: 2}, moe: {freeze_router: true}"
    job = WarmStart(tmp_path / "job", models / "moe", layout)
    with process(job.command(2)) as learner:
        wait_for(lambda: len(job.lines()) >= 4, learner)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(LIMIT_S) == 0, learner.stderr.read()[-3000:]
    stopped = len(job.lines())
    assert 4 <= stopped < STEPS
    done = subprocess.run(job.command(2), capture_output=True, text=True, timeout=LIMIT_S, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = job.lines()
    assert [line.step for line in lines] == list(range(STEPS))
    assert lines[-1].loss < 0.6 * lines[0].loss
    # verified against Hugging Face when it is loaded, on one rank, where the experts were on two
    rl = Job(tmp_path / "rl", job.run.model)
    with rl.served():
        rl.finish()
    assert all(line.tokens_trained > 0 and line.grad_norm > 0 for line in rl.lines())
    assert (rl.run.model / "config.json").is_file()
