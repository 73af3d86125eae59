"""A scripted sampler, a scripted weight feed and a character tokenizer: the fleet's edges without an engine."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from broker.client.calls import NodeBroker
from broker.contract import HeartbeatReply, LearnerReport, NodeReport
from common.rollouts import Sample, Task, VersionRun
from common.spans import SpanBatch
from common.weights.receive.contract import WeightsState
from rollout_fleet.environments.isolation.backend import Backend
from rollout_fleet.environments.isolation.thread_backend import EnvironmentThread, ThreadBackend
from rollout_fleet.environments.protocol import Action, Budget, Limits, StepResult
from rollout_fleet.episode.driver import EpisodeDriver, EpisodeRules, Sampling
from rollout_fleet.episode.rendering import Renderer, Tokenizer
from rollout_fleet.episode.sampler_protocol import EngineCounters, FinishReason, Generation, Session
from tests.rigs.waiting import LIMIT_S

EOS = 0


class CharacterTokenizer:
    """One token per character: its code point. It has no special tokens to add."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoded.append(text)
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(map(chr, token_ids))


def say(text: str, version: int = 0, ended: bool = True, runs: list[VersionRun] | None = None) -> Generation:
    """A generation of `text`, closed by the end token unless cut off; log-probabilities -1, -2, ..."""
    tokens = [ord(c) for c in text] + ([EOS] if ended else [])
    reason: FinishReason = "stop" if ended else "length"
    logprobs = [-float(i + 1) for i in range(len(tokens))]
    return Generation(tokens, logprobs, runs or [VersionRun(0, version)], reason)


@dataclass
class Call:
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None = None
    session: Session | None = None


class ScriptedSampler:
    """Answers each call with `respond(text of the prompt)`, after `delay_s` and after `gate` opened."""

    def __init__(self, respond: Callable[[str], Generation | Exception], delay_s: float = 0.0) -> None:
        self.respond, self._delay_s = respond, delay_s
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[Call] = []
        self.cancelled = 0
        self.now = 0
        self.most_at_once = 0
        self.counters = EngineCounters()

    async def generate(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        session: Session | None = None,
    ) -> Generation:
        self.calls.append(Call(list(prompt_ids), max_tokens, temperature, top_p, seed, session))
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        try:
            await asyncio.sleep(self._delay_s)
            await self.gate.wait()
            answer = self.respond("".join(map(chr, prompt_ids)))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1
        if isinstance(answer, Exception):
            raise answer
        self.counters.tokens_generated += len(answer.tokens)
        return answer


def in_turn(*answers: Generation) -> Callable[[str], Generation]:
    """Each call gets the next answer."""
    left: Iterator[Generation] = iter(answers)
    return lambda _: next(left)


class Base:
    """An environment that asks once, pays 1 and ends."""

    def __init__(self, problem: dict[str, Any], *, seed: int) -> None:
        self.problem, self.seed = problem, seed

    async def reset(self) -> Any:
        return "go"

    async def step(self, action: Action) -> Any:
        return StepResult(reward=1.0)


def play(driver: EpisodeDriver, problem: dict[str, Any], seed: int = 7, group_seed: int | None = None) -> Sample:
    """One episode in an event loop of its own, after which the driver is closed."""

    async def once() -> Sample:
        try:
            return await driver.run(problem, seed, group_seed=group_seed)
        finally:
            await driver.close()

    return asyncio.run(once())


def text_of(sample: Sample, trained: int) -> str:
    """The text of a sample of character tokens, of the trained tokens or of the others."""
    pairs = zip(sample.tokens.numpy(), sample.loss_mask.numpy(), strict=True)
    return "".join(chr(t) for t, m in pairs if m == trained)


def prompts_of(sampler: ScriptedSampler) -> list[str]:
    return ["".join(map(chr, call.prompt)) for call in sampler.calls]


HOSTS: list[EnvironmentThread] = []  # closed after each test


def new_host() -> EnvironmentThread:
    """An environments' thread that ends with the test."""
    HOSTS.append(EnvironmentThread())
    return HOSTS[-1]


def make_driver(
    sampler: ScriptedSampler,
    environment: type | Backend,
    options: dict[str, object] | None = None,
    budget: Budget | None = None,
    timeout_s: float = LIMIT_S,
    host: EnvironmentThread | None = None,
    tokenizer: Tokenizer | None = None,
    limits: Limits | None = None,
) -> EpisodeDriver:
    """A driver over the scripted sampler, for an environment on a thread or for a backend."""
    given = isinstance(environment, Backend)
    backend = environment if given else ThreadBackend(environment, options or {}, host or new_host())
    budget = budget or Budget(max_turns=8, max_tokens=100, max_context=1000)
    rules = EpisodeRules(budget, Sampling(), timeout_s, limits or Limits())
    return EpisodeDriver(sampler, Renderer(tokenizer or CharacterTokenizer()), backend, rules)


@dataclass
class ScriptedFeed:
    """A WeightClient whose state the test sets."""

    state: WeightsState = field(default_factory=WeightsState)
    followed: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        self._changed.set()

    def follow(self, address: str, incarnation: int) -> None:
        self.followed.append((address, incarnation))

    async def wait_change(self, timeout_s: float) -> WeightsState:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        return self.state

    async def close(self) -> None:
        return None


class InOwnerLoop:
    """A node's broker client for another thread: every call runs in the loop that made this."""

    def __init__(self, broker: NodeBroker) -> None:
        self._broker, self._loop = broker, asyncio.get_running_loop()
        self.threads: set[str] = set()
        self.beats = 0

    async def __aenter__(self) -> "InOwnerLoop":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def heartbeat(
        self, report: NodeReport, tokens: list[str], log: str | None = None, spans: SpanBatch | None = None
    ) -> HeartbeatReply:
        self.threads.add(threading.current_thread().name)
        call = self._broker.heartbeat(report, tokens, log, spans)
        reply = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))  # type: ignore[arg-type]
        self.beats += 1
        return reply


def learner_report(state: str = "waiting", version: int = 0, incarnation: int = 0) -> LearnerReport:
    return LearnerReport(
        pid=1, incarnation=incarnation, state=state, policy_version=version, weights_address="tcp://127.0.0.1:1"
    )


def addition_task(serial: int, group_size: int = 2) -> Task:
    problem = f'{{"question": "{serial}+1", "answer": "{serial + 1}"}}'.encode()
    return Task(serial=serial, problem=problem, seed=100 * serial, group_size=group_size)


def add(prompt: str) -> Generation:
    """The right answer to an addition prompt."""
    a, b = prompt.removeprefix("Q: ").removesuffix("=? A:").split("+")
    return say(f" {a}+{b} ={int(a) + int(b)}")
