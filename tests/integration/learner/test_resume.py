"""A learner killed with -9, or drained, and started again ends with bitwise the weights of one that was not."""

import contextlib
import gzip
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from common.config.loading import load_config
from common.config.schema import Config
from common.errors import EXIT_HOPELESS
from learner.batch.dynamic_sampling import carries_signal
from tests.rigs.device import CUDA
from tests.rigs.jobs import GROUP_SIZE, GROUPS, STEPS, VOCABULARY, Job, assert_delivered_once, slipstream
from tests.rigs.processes import until
from tests.rigs.recorded_node import recorded_group


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model: Path) -> str:
    """The weights of a run that is left alone; '' on CUDA, where they are compared with nothing."""
    if CUDA:
        return ""
    job = Job(tmp_path_factory.mktemp("unbroken") / "job", model)
    with job.served() as client:
        job.finish()
        assert_delivered_once(client.ledger())
    job.assert_every_step_once()
    return job.weights()


def made(job: Job, pattern: str) -> set[tuple[str, int, int]]:
    """The matches in the checkpoints' folder, by name and identity, since what a kill left is made again."""
    while True:
        found = set()
        with contextlib.suppress(FileNotFoundError):  # a folder was renamed or removed while it was looked at
            for path in job.run.checkpoints.glob(pattern):
                found.add((path.name, path.stat().st_ino, path.stat().st_ctime_ns))
            return found


def kill_in_a_save(job: Job, jitter_s: float, moment: str) -> bool:
    """Start a learner and kill it with -9 soon after it makes what `moment` matches; whether a save was under way."""
    before = made(job, moment)
    job.start()
    job.until(lambda: made(job, moment) - before, every_s=0.0005)
    time.sleep(jitter_s)
    job.kill()
    return any(job.run.checkpoints.glob(".step-*.tmp"))


def test_killed_with_9_at_any_moment_of_a_save_it_resumes_from_the_one_before(
    tmp_path: Path, model: Path, unbroken: str
) -> None:
    job = Job(tmp_path / "job", model, checkpoint={"every": 1, "keep": 1})
    draw = random.Random(11)
    with job.served() as client:
        hits = 0
        for moment in (".step-*", ".step-*/model", ".step-*/model/*", ".step-*/model/metadata.json", "step-*"):
            hits += kill_in_a_save(job, draw.uniform(0.0, 0.01), moment)
            complete = [path.name for path in job.run.checkpoints.glob("step-*")]
            assert len(complete) <= 2  # the newest, and before it is pruned the one before
            for name in complete:
                assert (job.run.checkpoints / name / "model" / "metadata.json").is_file()
        assert hits >= 2
        assert not job.run.model.exists()
        job.finish()
        assert_delivered_once(client.ledger())
        assert client.status().learner.incarnation == 5
    job.assert_every_step_once()
    assert CUDA or job.weights() == unbroken, "on CUDA kernels add in any order"
    assert not list(job.run.checkpoints.glob(".*"))


def test_two_ranks_drain_on_sigterm_and_go_on_where_they_stopped(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path / "job", model, {"world_size": 2, "parallel": {"tensor": 2}})
    with job.config.open("a") as config:
        config.write("telemetry: {profile_steps: [1], profile_ranks: [1], profile_nodes: [elsewhere]}\n")
    with job.served() as client:
        with job.learner(ranks=2) as learner:
            until("two steps", lambda: len(job.lines()) >= 2, learner)
            learner.drain()
        stopped = len(job.lines())
        assert 2 <= stopped < STEPS
        assert job.run.checkpoints.joinpath(f"step-{stopped:06d}").is_dir()
        assert client.status().groups_committed == stopped * GROUPS
        job.finish(ranks=2)
        assert_delivered_once(client.ledger())
    job.assert_every_step_once()
    assert all(line.staleness_max <= 2 for line in job.lines())
    (profile,) = job.run.profiles.iterdir()
    assert profile.name == "learner-1-step-1.json.gz"
    recorded = Counter(event.get("name") for event in json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"])
    assert [recorded[f"step {step}"] for step in range(3)] == [0, 1, 0]
    assert len([name for name in recorded if name and name.startswith("Optimizer.step#")]) == 1
    assert recorded["aten::mm"] > 0 and recorded["gloo:all_reduce"] > 0


def test_two_ranks_killed_with_9_filter_the_same_groups_again(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path / "job", model, {"world_size": 2, "dynamic_sampling": True})
    config = load_config(job.config, [], Config)
    flat = {n for n in range(200) if not carries_signal(recorded_group(n, VOCABULARY, GROUP_SIZE, 0), config)}
    expected: list[tuple[int, int, bool]] = []  # (serial, step, filtered), a step being full at GROUPS others
    while not expected or expected[-1][1] < STEPS:
        kept = sum(not filtered for _, _, filtered in expected)
        expected.append((len(expected), kept // GROUPS, len(expected) in flat))
    expected = [entry for entry in expected if entry[1] < STEPS]
    while expected[-1][2]:
        expected.pop()  # after the last step's last group nothing is offered
    with job.served() as client:
        job.start(ranks=2)
        job.until(lambda: len(job.lines()) >= 4)
        job.kill()
        job.finish(ranks=2)
        ledger = client.ledger()
    assert any(filtered for _, _, filtered in expected)
    assert [(entry.serial, entry.step, entry.filtered) for entry in ledger] == expected
    assert {entry.state for entry in ledger} == {"committed"}
    filtered = Counter(step for _, step, is_filtered in expected if is_filtered)
    assert [line.groups_filtered for line in job.lines()] == [filtered[step] for step in range(STEPS)]
    assert {line.groups for line in job.lines()} == {GROUPS}


def test_a_rule_on_a_metric_of_the_lead_stops_both_ranks_alike_and_one_rank_goes_on_from_their_checkpoint(
    tmp_path: Path, model: Path
) -> None:
    job = Job(tmp_path / "job", model, {"world_size": 2, "parallel": {"tensor": 2}}, {"every": 100})
    with job.config.open("a") as config:
        config.write("watch: [{metric: nodes_live, above: 0, steps: 3, do: stop}]\n")  # only the lead asks the broker
    with job.served() as client:
        job.finish(EXIT_HOPELESS, ranks=2)
        reason = "stopped by watch[0]: nodes_live was 1, above 0, for 3 steps at step 2; `slipstream resume "
        for rank in range(2):
            assert reason in (job.run.logs / f"learner-{rank}.log").read_text()
        (checkpoint,) = job.run.checkpoints.iterdir()
        assert checkpoint.name == "step-000003" and (checkpoint / "model" / "metadata.json").is_file()
        learner = client.status().learner
        assert learner.state == "failed" and learner.waiting_on.startswith(reason)
        assert client.status().groups_committed == 3 * GROUPS
        job.finish(EXIT_HOPELESS, ranks=2)
        assert len(job.lines()) == 3, "it refused to train"
        slipstream("resume", str(job.run.path))
        alone = ["learner.world_size=1", "learner.parallel.tensor=1"]
        job.run.prepare(load_config(job.config, alone, Config))  # as the commands do
        job.config = job.run.config
        job.finish()
        assert_delivered_once(client.ledger())
    job.assert_every_step_once()


def test_a_lead_that_cannot_begin_ends_the_ranks_that_wait_for_it(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path / "job", model, {"world_size": 2, "parallel": {"tensor": 2}})
    with (job.folder / "tasks.jsonl").open("a") as dataset:
        dataset.write("{not JSON\n")  # only the lead reads beyond the first line
    with job.learner(ranks=2) as learner:  # it ends far sooner than torchrun kills
        assert learner.wait() == 2, learner.output()
    assert "line 10" in learner.output()
