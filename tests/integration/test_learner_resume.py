"""A learner killed with -9, or drained, and started again ends with bitwise the weights of one that was not."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.messaging.sync_client import BrokerClient
from common.metrics import StepMetrics, read_metrics
from common.process.run_dir import RunDir
from learner.batch.dynamic_sampling import carries_signal
from tests.integration.recorded_node import recorded_group
from tests.waiting import LIMIT_S, until

HERE = Path(__file__).parent
STEPS, GROUPS, GROUP_SIZE, VOCABULARY = 8, 4, 4, 128
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
BROKER = """
import sys
from pathlib import Path
import msgspec
from broker.main import run_broker
from common.config.loading import load_config
from common.process.lifecycle import die_with_parent
die_with_parent()
config = load_config(Path(sys.argv[1]))
sys.exit(run_broker(config, msgspec.json.encode(config)))
"""


class Job:
    """A run folder with its broker and a node that hands in recorded groups."""

    def __init__(
        self, folder: Path, model: Path, learner: str = "", checkpoint: str = "every: 3", broker: str = ""
    ) -> None:
        folder.mkdir()
        (folder / "tasks.jsonl").write_text(
            "".join(f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(9))
        )
        self.config = folder / "job.yaml"
        self.config.write_text(
            f"run: {{name: resume, dir: {folder}/run, steps: {STEPS}, seed: 3}}\n"
            f"model: {{path: {model}, dtype: float32}}\n"
            f"tasks: {{environment: addition, dataset: {folder}/tasks.jsonl}}\n"
            f"learner: {{groups_per_step: {GROUPS}, optimizer: {{lr: 0.001}}, "
            f"checkpoint: {{{checkpoint}}}{learner}}}\n"
            f"rollout: {{group_size: {GROUP_SIZE}, max_tokens: 64, engine: {{max_model_len: 128}}}}\n"
            f"broker: {{{broker}}}\n"
        )
        self.run = RunDir(folder / "run")

    @contextlib.contextmanager
    def served(self) -> Iterator[BrokerClient]:
        """While active, a broker process and a node process serve the learner."""
        with self.broker() as client, self.node():
            yield client

    @contextlib.contextmanager
    def broker(self) -> Iterator[BrokerClient]:
        """While active, a broker process serves the learner."""
        with process([sys.executable, "-c", BROKER, str(self.config)]) as broker:
            wait_for(lambda: self.run.broker() is not None, broker)
            with BrokerClient(self.run.broker().address) as client:
                yield client

    def node(self) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """While active, a node process generates."""
        words = [self.run.broker().address, str(VOCABULARY), str(GROUP_SIZE), str(GROUPS)]
        return process([sys.executable, str(HERE / "recorded_node.py"), *words])

    def learner(self, ranks: int = 1) -> list[str]:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "learner.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
            command += ["--shutdown-timeout", "300"]
        return [*command, "-m", "learner.main", "--config", str(self.config)]

    def finish(self, ranks: int = 1) -> None:
        done = subprocess.run(
            self.learner(ranks), capture_output=True, text=True, timeout=LIMIT_S, env=ENVIRONMENT, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def lines(self) -> list[StepMetrics]:
        return read_metrics(self.run.metrics, StepMetrics)

    def weights(self) -> str:
        return hashlib.sha256((self.run.model / "model.safetensors").read_bytes()).hexdigest()


@contextlib.contextmanager
def process(
    command: list[str], stdin: bool = False, env: dict[str, str] = ENVIRONMENT
) -> Iterator[subprocess.Popen[str]]:
    """A child that is gone afterwards, whatever happens; with `stdin` one to talk with."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if stdin else {"stdout": subprocess.DEVNULL}
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, **pipes)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(LIMIT_S)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def wait_for(condition: Callable[[], bool], child: subprocess.Popen[str], every_s: float = 0.01) -> None:
    """Wait while `child` runs."""

    def check() -> None:
        assert child.poll() is None, child.stderr.read()[-3000:]

    until(condition, check=check, every_s=every_s)


def assert_delivered_once(client: BrokerClient) -> None:
    ledger = client.ledger()
    assert [entry.serial for entry in ledger] == list(range(STEPS * GROUPS))
    assert {entry.state for entry in ledger} == {"committed"}
    assert [entry.step for entry in ledger] == [n // GROUPS for n in range(STEPS * GROUPS)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model: Path) -> str:
    job = Job(tmp_path_factory.mktemp("unbroken") / "job", model)
    with job.served() as client:
        job.finish()
        assert_delivered_once(client)
    assert [line.step for line in job.lines()] == list(range(STEPS))
    return job.weights()


def test_killed_with_9_between_checkpoints_it_replays_and_ends_bitwise_equal(
    tmp_path: Path, model: Path, unbroken: str
) -> None:
    job = Job(tmp_path / "job", model, checkpoint="every: 3, asynchronous: false")
    with job.served() as client:
        with process(job.learner()) as learner:
            wait_for(lambda: len(job.lines()) >= 5, learner)
            learner.kill()
            assert learner.wait(LIMIT_S) == -signal.SIGKILL
        assert not job.run.model.exists()
        job.finish()
        assert_delivered_once(client)
        assert client.status().learner.incarnation == 1
    assert [line.step for line in job.lines()] == list(range(STEPS))
    assert {line.incarnation for line in job.lines()} == {0, 1}
    assert job.weights() == unbroken


def made(job: Job, pattern: str) -> set[tuple[str, int, int]]:
    """What matches in the checkpoints' folder: name and identity, since what a kill left is made again."""
    found = set()
    for path in job.run.checkpoints.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino, path.stat().st_ctime_ns))
    return found


def kill_in_a_save(job: Job, forks: subprocess.Popen[str], jitter_s: float, moment: str) -> bool:
    """Start a learner and kill it with -9 soon after it makes what `moment` matches; whether a save was under way."""
    before = made(job, moment)
    forks.stdin.write(json.dumps(["--config", str(job.config)]) + "\n")
    forks.stdin.flush()
    pid = int(forks.stdout.readline())
    wait_for(lambda: made(job, moment) - before, forks, every_s=0.0005)
    time.sleep(jitter_s)
    os.kill(pid, signal.SIGKILL)
    assert int(forks.stdout.readline()) == -signal.SIGKILL
    return any(job.run.checkpoints.glob(".step-*.tmp"))


def test_killed_with_9_at_any_moment_of_a_save_it_resumes_from_the_one_before(
    tmp_path: Path, model: Path, unbroken: str
) -> None:
    job = Job(tmp_path / "job", model, checkpoint="every: 1, keep: 1")
    draw = random.Random(11)
    with job.served() as client, process([sys.executable, str(HERE / "learner_forks.py")], stdin=True) as forks:
        hits = 0
        for moment in (".step-*", ".step-*/model", ".step-*/model/*", ".step-*/model/metadata.json", "step-*"):
            hits += kill_in_a_save(job, forks, draw.uniform(0.0, 0.01), moment)
            complete = [path.name for path in job.run.checkpoints.glob("step-*")]
            assert len(complete) <= 2  # the newest, and before it is pruned the one before
            for name in complete:
                assert (job.run.checkpoints / name / "model" / "metadata.json").is_file()
        assert hits >= 2
        assert not job.run.model.exists()
        job.finish()
        assert_delivered_once(client)
        assert client.status().learner.incarnation == 5
    assert [line.step for line in job.lines()] == list(range(STEPS))
    assert job.weights() == unbroken
    assert not list(job.run.checkpoints.glob(".*"))


def test_two_ranks_drain_on_sigterm_and_go_on_where_they_stopped(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path / "job", model, ", world_size: 2, parallel: {tensor: 2}")
    with job.served() as client:
        with process(job.learner(ranks=2)) as learner:
            wait_for(lambda: len(job.lines()) >= 2, learner)
            learner.send_signal(signal.SIGTERM)
            assert learner.wait(LIMIT_S) == 0, learner.stderr.read()[-3000:]
        stopped = len(job.lines())
        assert 2 <= stopped < STEPS
        assert job.run.checkpoints.joinpath(f"step-{stopped:06d}").is_dir()
        assert client.status().groups_committed == stopped * GROUPS
        job.finish(ranks=2)
        assert_delivered_once(client)
    assert [line.step for line in job.lines()] == list(range(STEPS))
    assert all(line.staleness_max <= 2 for line in job.lines())


def test_two_ranks_killed_with_9_filter_the_same_groups_again(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path / "job", model, ", world_size: 2, dynamic_sampling: true")
    flat = {n for n in range(200) if not carries_signal(recorded_group(n, VOCABULARY, GROUP_SIZE, 0))}
    expected: list[tuple[int, int, bool]] = []  # (serial, step, filtered), a step being full at GROUPS others
    while not expected or expected[-1][1] < STEPS:
        kept = sum(not filtered for _, _, filtered in expected)
        expected.append((len(expected), kept // GROUPS, len(expected) in flat))
    expected = [entry for entry in expected if entry[1] < STEPS]
    while expected[-1][2]:
        expected.pop()  # after the last step's last group nothing is offered
    with job.served() as client:
        with process(job.learner(ranks=2)) as learner:
            wait_for(lambda: len(job.lines()) >= 4, learner)
            learner.kill()
            learner.wait(LIMIT_S)
        job.finish(ranks=2)
        ledger = client.ledger()
    assert any(filtered for _, _, filtered in expected)
    assert [(entry.serial, entry.step, entry.filtered) for entry in ledger] == expected
    assert {entry.state for entry in ledger} == {"committed"}
    filtered = Counter(step for _, step, is_filtered in expected if is_filtered)
    assert [line.groups_filtered for line in job.lines()] == [filtered[step] for step in range(STEPS)]
    assert {line.groups for line in job.lines()} == {GROUPS}


def test_a_lead_that_cannot_begin_ends_the_ranks_that_wait_for_it(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path / "job", model, ", world_size: 2, parallel: {tensor: 2}")
    with (job.config.parent / "tasks.jsonl").open("a") as dataset:
        dataset.write("{not JSON\n")  # only the lead reads beyond the first line
    done = subprocess.run(  # far sooner than torchrun kills
        job.learner(ranks=2), capture_output=True, text=True, timeout=LIMIT_S, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "line 10 is not JSON" in done.stderr
