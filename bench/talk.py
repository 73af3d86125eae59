"""A game of many turns whose answers end by chance, its model, and jobs that play it on one node.

A job is `slipstream broker` and `slipstream rollout`; this process is its learner. All jobs of a comparison stay up,
and all but one are stopped meanwhile (SIGSTOP): neighbouring windows meet the same machine.
"""

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import harness
import psutil
from harness import Figures

from rollout_fleet.environments.protocol import Action, StepResult

END, VOCABULARY, POSITIONS = 1, 128, 8192
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SETTLE_S = 0.3  # before a window counts
START_S, TAKE_S = 300, 0.2
LEARNED = 1  # samples of a step that are trained on and compared, so that no node waits for this process
KEPT = 16  # versions whose weights a learner keeps, to tell what its node sampled with


@dataclass(frozen=True)
class Shape:
    """Episodes of a game."""

    turns: int
    answer: int  # mean tokens of an answer
    prompt: int  # tokens
    observation: int  # tokens of what the environment says between two turns
    requests: int  # episodes at once
    group: int = 8  # episodes with the same prompt
    cut: float = 3.0  # an answer has at most so many times the mean that it would have without

    @property
    def most(self) -> int:
        """Most tokens of an answer."""
        return int(self.cut * self.answer)

    @property
    def longest(self) -> int:
        """Most tokens of an episode, with room for chance."""
        return self.prompt + self.turns * (self.most + self.observation) + 64

    def problem(self, number: int) -> str:
        return "".join(LETTERS[(number * (place + 3) + place) % 26] for place in range(self.prompt))

    def said(self, turn: int) -> str:
        return "".join(LETTERS[(7 * turn + place) % 26] for place in range(self.observation))


@dataclass(frozen=True)
class Serving:
    """How the engines of a comparison compute."""

    dtype: str = "float32"
    kv_cache_mib: int = 512
    max_batched_tokens: int = 2048
    eager: bool = True
    quantization: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # keyword arguments of vLLM's EngineArgs


class Talk:
    """So many turns; the reward says nothing."""

    def __init__(self, problem: dict[str, Any], *, seed: int, turns: int, prompt: int, observation: int) -> None:
        self._shape = Shape(turns=turns, answer=0, prompt=prompt, observation=observation, requests=0)
        self._number, self._turn = problem["number"], 0

    async def reset(self) -> str:
        return self._shape.problem(self._number)

    async def step(self, action: Action) -> StepResult:
        self._turn += 1
        if self._turn == self._shape.turns:
            return StepResult(reward=float(self._number % 2))
        return StepResult(self._shape.said(self._turn), done=False)


def build(folder: Path, answer: int, dtype: str = "float32", **shape: Any) -> None:
    """A small random Qwen3 with a tokenizer; the end token has probability 1 / `answer` on average.

    `shape` replaces fields of its config. It is made on the device of torch's context.
    """
    import torch

    from launch.quickstart.assets import build_tokenizer

    small = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
    fixed = {"initializer_range": 0.1, "tie_word_embeddings": False}
    model = harness.qwen3_model(**small | fixed | shape).requires_grad_(False)
    for layer in model.model.layers:  # the first element of a hidden state says only how long the others are
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    model.model.embed_tokens.weight[:, 0] = 1.0
    model.lm_head.weight[:, 0] = 0
    model.lm_head.weight[END] = 0
    vocabulary = model.config.vocab_size
    hidden = model.model(torch.randint(4, vocabulary, (4, 256))).last_hidden_state
    low, high = -20.0, 20.0
    for _ in range(40):
        model.lm_head.weight[END, 0] = middle = (low + high) / 2
        often = (hidden @ model.lm_head.weight.T).softmax(-1)[..., END].mean() > 1 / answer
        low, high = (low, middle) if often else (middle, high)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


class Side(Protocol):
    """One way of a comparison: a process with everything that it started."""

    @property
    def processes(self) -> list[psutil.Process]: ...

    def tokens(self) -> int:
        """Sampled so far."""
        ...

    def work(self) -> None:
        """Do this process's part for about TAKE_S."""

    def settle(self) -> None:
        """Return when it may be stopped."""

    def close(self) -> None: ...


def in_windows(sides: dict[str, Side], windows: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    """Tokens, wall and CPU seconds of each side in windows that alternate between them."""
    members = {name: side.processes for name, side in sides.items()}

    def cpu_s(name: str) -> float:
        return sum(harness.cpu_s(process) for process in members[name])

    def window(name: str, _: int) -> dict[str, float]:
        side = sides[name]
        go_on(members[name])
        _worked(side, SETTLE_S)
        before, cpu_before_s, began = side.tokens(), cpu_s(name), time.perf_counter()
        _worked(side, seconds)
        wall_s, used_s = time.perf_counter() - began, cpu_s(name) - cpu_before_s
        tokens = side.tokens() - before
        side.settle()
        stop(members[name])
        rates = {"tokens_per_s": round(tokens / wall_s, 1), "tokens_per_cpu_s": round(tokens / used_s, 1)}
        return {"tokens": tokens, "wall_s": round(wall_s, 3), "cpu_s": round(used_s, 3), **rates}

    for name in sides:
        stop(members[name])
    found = harness.in_turns([*sides], range(windows), window)
    for name in sides:
        go_on(members[name])
    return found


def _worked(side: Side, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        side.work()


def stop(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.suspend()


def go_on(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.resume()


def totals(rounds: Sequence[dict[str, float]]) -> Figures:
    """Over all windows."""
    tokens, wall_s, cpu_s = (sum(r[name] for r in rounds) for name in ("tokens", "wall_s", "cpu_s"))
    rates = {"tokens_per_s": round(tokens / wall_s, 1), "tokens_per_cpu_s": round(tokens / cpu_s, 1)}
    return {**rates, "rounds": [*rounds]}


class NodeJob:
    """One real node on a real broker. A version is published for every `step` groups, of trained weights or the same.

    With `learning` a version is an Adam step from the one before, on advantages by chance. Per step `differences` gets
    how far the sampled log-probabilities are from those of a forward pass.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        shape: Shape,
        *,
        step: int,
        learning: float | None = None,
        weights: dict[str, Any] | None = None,
        serving: Serving | None = None,
        staleness: int | None = None,  # None: as many versions as the episodes at once need
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from broker.client.connection import BrokerClient
        from broker.contract import LearnerReport
        from common.config.schema import WeightsConfig
        from common.weights.source.publisher import WeightPublisher
        from tests.rigs.processes import Command, until

        folder.mkdir()
        self._shape, self._step, self._taken, self._offered, self._counted = shape, step, 0, 0, 0
        serving = serving or Serving()
        self._serving = serving
        self._staleness = 1 + -(-2 * shape.requests // (shape.group * step)) if staleness is None else staleness
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, serving.dtype))
        self._optimizer = None if learning is None else torch.optim.Adam(self._model.parameters(), lr=learning)
        self._former: dict[int, dict[str, Any]] = {}
        self.differences: list[dict[str, float]] = []
        self.hit_rate = 0.0
        config = folder / "job.yaml"
        config.write_text(json.dumps(self._config(folder, model, weights or {})))
        self._stack = ExitStack()
        self._broker = self._stack.enter_context(Command(folder, "broker", "broker", str(config)))
        node = Command(folder, "node", "rollout", str(config), "--node-id", "n0", PYTHONPATH=harness.python_path())
        self._node = self._stack.enter_context(node)
        address = folder / "run/broker.json"
        until("the broker", address.exists, self._broker, self._node)
        self._client = BrokerClient(json.loads(address.read_text())["address"], deadline_s=START_S)
        self._stack.callback(self._client.close)
        self._publisher = WeightPublisher(0, serving.dtype, WeightsConfig(**{"timeout_s": 60.0, **(weights or {})}))
        self._stack.callback(self._publisher.close)
        report = LearnerReport(os.getpid(), 0, "training", 0, weights_address=self._publisher.start())
        self._client.attach(report)
        self._publish()
        while self._taken < 4:
            self.work()

    def _config(self, folder: Path, model: Path, weights: dict[str, str]) -> dict[str, Any]:
        shape = self._shape
        options = {name: getattr(shape, name) for name in ("turns", "prompt", "observation")}
        engine = dataclasses.asdict(self._serving) | {"max_model_len": shape.longest, "max_num_seqs": shape.requests}
        return {
            "run": {"name": "talk", "dir": str(folder / "run"), "steps": 1 << 20},
            "model": {"path": str(model), "dtype": engine.pop("dtype")},
            "tasks": {"environment": "talk:Talk", "dataset": "none", "options": options},
            "learner": {"groups_per_step": self._step},
            "rollout": {
                "group_size": shape.group, "max_tokens": shape.most * shape.turns, "max_turns": shape.turns,
                "concurrency": shape.requests, "engine": engine,
            },
            "broker": {"heartbeat_s": 0.1, "lease_s": 600, "durability": "everysec"},
            "staleness": {"max": self._staleness},
            "weights": weights,
        }  # fmt: skip

    @property
    def processes(self) -> list[psutil.Process]:
        roots = [psutil.Process(command.process.pid) for command in (self._broker, self._node)]
        return [process for root in roots for process in (root, *root.children(recursive=True))]

    def tokens(self) -> int:
        for node in self._client.status().nodes:
            self._counted, self.hit_rate = node.report.tokens_generated, node.report.prefix_hit_rate
        return self._counted

    def work(self) -> None:
        self._offer()
        groups = self._client.take(self._taken, self._step, TAKE_S)
        if groups:
            self._taken += 1
            if self._optimizer is not None:
                self._learn([group.payload for group in groups])
            self._publish()

    def settle(self) -> None:
        """The node has the newest version: one that is sent to a stopped node would be taken from it."""
        while any(node.report.policy_version != self._taken for node in self._client.status().nodes):
            time.sleep(TAKE_S / 10)

    def close(self) -> None:
        self._stack.close()

    def _offer(self) -> None:
        from common.rollouts import Task

        size, wanted = self._shape.group, (self._taken + 8) * self._step + 4 * self._shape.requests // self._shape.group
        numbers = range(self._offered, wanted)
        if numbers:
            self._client.offer([Task(n, json.dumps({"number": n}).encode(), seed=n, group_size=size) for n in numbers])
            self._offered = wanted

    def _publish(self) -> None:
        if self._optimizer is not None:
            self._former[self._taken] = {name: value.detach().clone() for name, value in self._model.named_parameters()}
            self._former.pop(self._taken - KEPT, None)
        self._publisher.publish(self._taken, self._model.named_parameters(), None)

    def _learn(self, payloads: Iterable[bytes]) -> None:
        import torch

        from common.rollouts import decode_group

        samples = [sample for payload in payloads for sample in decode_group(payload).samples][:LEARNED]
        own, now, ages = (list[Any]() for _ in range(3))
        loss: Any = 0.0
        for number, sample in enumerate(samples):
            tokens = torch.tensor(sample.tokens.numpy()[None].astype("int64"))
            sampled = torch.tensor(sample.loss_mask.numpy()[1:] > 0)
            behavior = torch.tensor(sample.behavior_logprobs.numpy()[1:])
            versions = torch.tensor(sample.token_versions()[1:])
            current = _logprobs(self._model, tokens)
            loss = loss - (1.0 if (self._taken + number) % 2 else -1.0) * current[sampled].mean() / len(samples)
            now.append((current.detach() - behavior)[sampled])
            ages.append(self._taken - 1 - versions[sampled])
            for version in set(versions[sampled].tolist()) & self._former.keys():
                with torch.no_grad():
                    then = torch.func.functional_call(self._model, self._former[version], (tokens,))
                known = _picked(then.logits, tokens)
                own.append((known - behavior)[sampled & (versions == version)])
        assert self._optimizer is not None
        self._optimizer.zero_grad()
        torch.as_tensor(loss).backward()
        self._optimizer.step()
        mixed = [len(sample.version_runs) for sample in samples]
        self.differences.append({
            "mismatch": float(torch.cat(now).abs().mean()),
            "mismatch_of_own_version": float(torch.cat(own).abs().mean()),
            "versions": sum(mixed) / len(mixed),
            "staleness": float(torch.cat(ages).float().mean()),
        })  # fmt: skip


def _logprobs(model: Any, tokens: Any) -> Any:
    return _picked(model(tokens).logits, tokens)


def _picked(logits: Any, tokens: Any) -> Any:
    """[T - 1] log-probabilities of tokens[0, 1:]."""
    return logits[0, :-1].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
