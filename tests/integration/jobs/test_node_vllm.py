"""A real rollout node (the command, vLLM, the weight plane over gloo) on a real broker; this test is the learner.

The node serves both environments through one class beside the test's config. Tests run in order; the last one drains.
"""

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from broker.client.connection import BrokerClient
from broker.contract import LearnerReport, NodeStatus
from common.config.schema import WeightsConfig
from common.process.run_dir import RunDir
from common.rollouts import Sample, Task, decode_group
from common.weights.source.publisher import WeightPublisher
from launch.observe.transcripts import read
from launch.quickstart.assets import build
from tests.rigs.processes import ROOT, Command, descendants, survivors, until
from tests.rigs.waiting import LIMIT_S

GROUP_SIZE, PER_STEP, EOS = 4, 4, 1
TOLERANCE = 2e-4

ENVIRONMENT = """
import asyncio
from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.builtin.number_guessing import NumberGuessing


class Mixed:
    '''Either built-in environment, by what the problem holds; `fault` makes it raise or hang.'''

    def __init__(self, problem, *, seed, guesses=5):
        self.fault = problem.get("fault")
        self.inner = (NumberGuessing(problem, seed=seed, guesses=guesses) if "number" in problem
                      else Addition(problem, seed=seed))

    async def reset(self):
        return await self.inner.reset()

    async def step(self, action):
        if self.fault == "raise":
            raise RuntimeError("fault on purpose")
        if self.fault == "hang":
            await asyncio.sleep(3600)
        return await self.inner.step(action)
"""


def warmed(folder: Path) -> Any:
    """The quickstart's random model after a few steps on demonstrated games: it ends its turns."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    games = [json.loads(line)["segments"] for line in (folder / "number_guessing/sft.jsonl").read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        ids, labels = [], []
        for game in games[16 * step : 16 * step + 16]:
            parts = [(tokenizer.encode(text) + [EOS] * trained, trained) for text, trained in game]
            ids.append([i for part, _ in parts for i in part])
            labels.append([i if trained else -100 for part, trained in parts for i in part])
        width = max(map(len, ids))
        inputs = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        targets = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
        model(input_ids=inputs, labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


class Job:
    """Broker and node as processes, and the learner's side here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        build(folder / "assets", 1, "tiny")
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "assets/model")
        (folder / "mixed_environment.py").write_text(ENVIRONMENT)
        (folder / "job.yaml").write_text(json.dumps(self._config()))
        self._commands = ExitStack()
        config = str(folder / "job.yaml")
        self.broker = self._commands.enter_context(Command(folder, "broker", "broker", config))
        node = Command(folder, "node", "rollout", config, "--node-id", "n0", PYTHONPATH=f"{ROOT}:{folder}")
        self.node = self._commands.enter_context(node)
        self.publisher = WeightPublisher(0, "float32", WeightsConfig(timeout_s=60.0, bucket_mib=1, buffers="device"))
        self.models: dict[int, Any] = {0: warmed(folder / "assets")}
        self.client = BrokerClient(self._broker_address(), deadline_s=LIMIT_S)
        self.report("training", self.publisher.start())
        self.offered = 0

    def _config(self) -> dict[str, Any]:
        assets = self.folder / "assets"
        return {
            "run": {"name": "node-test", "dir": str(self.folder / "run"), "steps": 10},
            "model": {"path": str(assets / "model"), "dtype": "float32"},
            "tasks": {
                "environment": "mixed_environment:Mixed", "dataset": str(assets / "addition/train.jsonl"),
                "options": {"guesses": 4}, "max_attempts": 2,
            },
            "learner": {"groups_per_step": PER_STEP},
            "rollout": {
                "group_size": GROUP_SIZE, "max_tokens": 24, "max_turns": 4, "concurrency": 16, "sample_timeout_s": 15,
                "engine": {"max_model_len": 160, "max_num_seqs": 32, "kv_cache_mib": 32, "eager": True},
            },
            "broker": {"lease_s": 30, "heartbeat_s": 0.2},
            "telemetry": {"profile_steps": [1, 7], "profile_nodes": ["n0"]},
        }  # fmt: skip

    def until(self, found: Callable[[], Any]) -> Any:
        """The first true value of `found` while broker and node run."""
        return until("", found, self.broker, self.node)

    def _broker_address(self) -> str:
        file = self.folder / "run/broker.json"
        self.until(file.exists)
        return str(json.loads(file.read_text())["address"])

    def report(self, state: str, weights_address: str = "") -> None:
        self.weights_address = weights_address or getattr(self, "weights_address", "")
        told = LearnerReport(os.getpid(), 0, state, max(self.models, default=0), weights_address=self.weights_address)
        self.client.attach(told) if weights_address else self.client.report(told)

    def status(self) -> NodeStatus | None:
        return next((n for n in self.client.status().nodes if n.report.node_id == "n0"), None)

    def offer(self, *problems: dict[str, Any]) -> None:
        tasks = [
            Task(self.offered + i, json.dumps(problem).encode(), seed=i, group_size=GROUP_SIZE)
            for i, problem in enumerate(problems)
        ]
        self.offered += len(tasks)
        self.client.offer(tasks)

    def take(self, step: int) -> list[list[Sample]]:
        groups = self.until(lambda: self.client.take(step, PER_STEP, 0.5))
        return [decode_group(g.payload).samples for g in groups]

    def publish(self, version: int) -> None:
        if version not in self.models:
            state = {k: v + 0.01 * version * torch.ones_like(v).cumsum(-1).sin() for k, v in
                     self.models[0].state_dict().items()}  # fmt: skip
            self.models[version] = AutoModelForCausalLM.from_config(self.models[0].config).eval().requires_grad_(False)
            self.models[version].load_state_dict(state)
        self.publisher.publish(version, list(self.models[version].named_parameters()), None)

    def text(self, sample: Sample, trained: int) -> str:
        tokens, mask = sample.tokens.numpy(), sample.loss_mask.numpy()
        return self.tokenizer.decode(tokens[mask == trained])

    def close(self) -> None:
        self.client.close()
        self.publisher.close()
        self._commands.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    made = Job(tmp_path_factory.mktemp("node"))
    yield made
    made.close()


def expected_logprobs(model: Any, sample: Sample) -> np.ndarray:
    """[T] Hugging Face's log-probability of every token given the ones before; 0 for the first."""
    ids = torch.tensor(sample.tokens.numpy()[None].astype(np.int64))
    rows = model(ids).logits[0, :-1].float().log_softmax(-1)
    return np.concatenate([[0.0], rows.gather(-1, ids[0, 1:, None])[:, 0].numpy()])


def check_logprobs(job: Job, sample: Sample, version: int) -> None:
    mask = sample.loss_mask.numpy() == 1
    difference = np.abs(expected_logprobs(job.models[version], sample) - sample.behavior_logprobs.numpy())[mask]
    assert difference.max() < TOLERANCE
    assert not sample.behavior_logprobs.numpy()[~mask].any()


def test_without_weights_the_node_waits_for_the_learner(job: Job) -> None:
    job.offer({"question": "384+519", "answer": "903"}, *({"number": n} for n in (7, 16, 24)))
    job.until(lambda: (s := job.status()) and s.report.state == "joining" and s.report.waiting_on)
    assert [e.state for e in job.client.ledger()] == ["pending"] * 4


def test_both_environments_are_served_token_by_token(job: Job) -> None:
    job.publish(0)
    sums, *games = job.take(0)
    assert [len(g) for g in (sums, *games)] == [GROUP_SIZE] * 4
    for sample in sums:
        assert job.text(sample, 0) == "Q: 384+519=? A:"
        assert sample.turns == 1
    for number, group in zip((7, 16, 24), games, strict=True):
        for sample in group:
            replay(job, sample, number)
    assert max(s.turns for g in games for s in g) > 1
    for sample in (*sums, *(s for g in games for s in g)):
        assert sample.error is None
        assert set(sample.token_versions()) == {0}
        check_logprobs(job, sample, 0)


def replay(job: Job, sample: Sample, number: int) -> None:
    """Tell the game again from the sampled guesses; text and reward must be the sample's."""
    guesses = job.text(sample, 1).split("<eos>")
    low, high, said, reward = 1, 31, "Guess 1-31\n", 0.0
    for made, word in enumerate(guesses[: sample.turns], 1):
        if sample.stop_reason == "length" and made == sample.turns:
            break
        if not word.strip().isdigit() or int(word) == number or made == 4:
            reward = float(word.strip().isdigit() and int(word) == number)
            break
        guess = int(word)
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        said += f" {'higher' if guess < number else 'lower'} {low}-{high}\n"
    assert (job.text(sample, 0), sample.reward) == (said, reward)


def test_a_new_version_is_used_and_labelled(job: Job) -> None:
    job.offer(*({"number": n} for n in range(1, 9)))
    assert job.take(1)
    job.publish(1)
    job.until(lambda: (s := job.status()) and s.report.policy_version == 1)
    job.offer(*({"number": n} for n in range(9, 13)))
    job.take(2)
    samples = [s for group in job.take(3) for s in group]
    assert {int(v) for s in samples for v in s.token_versions()} == {1}
    for sample in samples:
        check_logprobs(job, sample, 1)
    report = job.until(lambda: (s := job.status()) and s.report.flips == 2 and s.report)
    assert report.tokens_generated > 0


def test_environments_that_raise_or_hang_fail_their_groups_and_not_the_node(job: Job) -> None:
    first = job.offered
    job.publish(2)
    job.offer({"number": 3, "fault": "raise"}, {"number": 4, "fault": "hang"}, *({"number": n} for n in (1, 2, 3, 4)))
    assert len(job.take(4)) == PER_STEP
    entries = job.until(
        lambda: (e := job.client.ledger()[first : first + 2]) and {x.state for x in e} == {"dead"} and e
    )
    assert [e.attempts for e in entries] == [2, 2]
    assert "fault on purpose" in entries[0].reason
    assert "timeout" in entries[1].reason and "15 s" in entries[1].reason
    status = job.status()
    assert status is not None and status.alive and status.waste["failed"].tokens > 0
    run = RunDir(job.folder / "run")
    for number, why in enumerate(("fault on purpose", "15 s")):
        told = job.until(lambda serial=first + number: (t := list(read(run, task=serial))) and len(t) == 2 and t)
        assert all((t.node_id, t.why, why in t.error) == ("n0", ["failed"], True) for t in told), told
    for turn in (t.turns[1] for t in read(run, task=first)):
        assert turn.author == "policy" and turn.tokens
        assert turn.text == "".join(turn.pieces) == job.tokenizer.decode(turn.tokens)


def test_the_engine_was_profiled_while_it_had_a_chosen_version(job: Job) -> None:
    (path,) = job.until(lambda: list((job.folder / "run/profiles").glob("*.json.gz")))
    assert path.name.startswith("rollout-n0-step-1_")
    names = [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert any(name.startswith("execute_context") for name in names), "an engine step"
    assert "aten::linear" in names


def test_sigterm_drains_the_node_and_leaves_no_process_behind(job: Job) -> None:
    family = descendants(job.node.process.pid)
    assert family
    job.node.drain()
    assert survivors(family) == []
    status = job.client.status()
    assert status.groups_leased == 0
    assert [n for n in status.nodes if n.report.node_id == "n0"] == []
    assert status.tokens_generated_total > 0
