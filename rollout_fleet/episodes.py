"""The episode driver: token in, token out, one Sample per episode.

    environment --text--> tokenised once, masked out --> context --> engine --> sampled tokens, trained
         ^                                                                          |
         +------------------------------- decoded text -----------------------------+

The context only ever grows; what the policy sampled is never tokenised again, so the learner trains on exactly the
tokens that the engine saw. Whatever an environment does wrong fails its own sample, with a reason.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from common.arrays import Array
from common.rollouts import Sample, VersionRun
from rollout_fleet.environments.host import EnvironmentHost
from rollout_fleet.environments.protocol import Action, Budget, Chat, Environment, Observation, StepResult, StopReason
from rollout_fleet.sampler_protocol import Generation, Sampler

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the driver uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...

    # those of chat models have `chat_template` and `apply_chat_template` too


@dataclass(frozen=True)
class Sampling:
    """The distribution to sample from; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass
class Progress:
    """An episode while it runs, for those who watch it.

    Attributes:
        sampled_tokens: by calls of the model that ended.
        turns: calls of the model that began.
        place: room (not started), engine, environment, or done.
        since: when it came there, monotonic seconds.
    """

    sampled_tokens: int = 0
    turns: int = 0
    place: str = "room"
    since: float = field(default_factory=time.monotonic)

    def at(self, place: str) -> None:
        """It is in `place` from now on."""
        self.place, self.since = place, time.monotonic()


@dataclass
class _Trace:
    """An episode while it grows; `tokens`, `mask` and `logprobs` stay equally long."""

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[VersionRun] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    sampled: int = 0
    routed: list[np.ndarray] = field(default_factory=list)  # together: of the first `routed_tokens` tokens
    routed_tokens: int = 0

    def observe(self, ids: list[int]) -> None:
        self.tokens += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def retract(self, count: int) -> None:
        """Drop the last `count` observed tokens, which no model call has seen."""
        for column in (self.tokens, self.mask, self.logprobs):
            del column[len(column) - count :]

    def extend(self, generation: Generation) -> None:
        offset, count = len(self.tokens), len(generation.tokens)
        for run in generation.version_runs:
            if not self.runs or self.runs[-1].version != run.version:
                self.runs.append(VersionRun(offset + run.start, run.version))
        self.tokens += generation.tokens
        self.mask += [1] * count
        self.logprobs += generation.logprobs
        self.sampled += count
        self.turns += 1
        if generation.routed_experts is not None:
            # what an earlier turn recorded stays: that is what its tokens were sampled with
            self.routed.append(generation.routed_experts[self.routed_tokens :])
            self.routed_tokens = max(self.routed_tokens, len(generation.routed_experts))

    def sample(self, reason: StopReason, error: str | None = None) -> Sample:
        return Sample(
            tokens=Array.of(self.tokens, "int32"),
            loss_mask=Array.of(self.mask, "uint8"),
            behavior_logprobs=Array.of(self.logprobs, "float32"),
            version_runs=self.runs,
            reward=sum(self.turn_rewards),
            stop_reason=reason.value,
            turns=self.turns,
            turn_rewards=self.turn_rewards,
            error=error,
            metrics=self.metrics,
            routed_experts=self._routing(),
        )

    def _routing(self) -> Array | None:
        """[T, MoE layers, experts per token], -1 for tokens that were never fed."""
        if not self.routed:
            return None
        known = np.concatenate(self.routed)[: len(self.tokens)]
        unknown = np.full((len(self.tokens) - len(known), *known.shape[1:]), -1, dtype=np.int16)
        return Array.of(np.concatenate([known, unknown]), "int16")


class _Refused(Exception):
    """The environment said something that the driver cannot use."""


class EpisodeDriver:
    """Runs episodes of one environment class against a sampler; safe to call concurrently."""

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        environment: Callable[..., Environment],
        options: dict[str, Any],
        budget: Budget,
        sampling: Sampling,
        timeout_s: float,
        host: EnvironmentHost,
    ) -> None:
        self._sampler, self._tokenizer = sampler, tokenizer
        self._environment, self._options = environment, options
        self._budget, self._sampling, self._timeout_s = budget, sampling, timeout_s
        self._host = host
        self._encode = lru_cache(maxsize=4096)(self._encode_text)

    async def run(self, problem: dict[str, Any], seed: int, progress: Progress | None = None) -> Sample:
        """One episode.

        Args:
            problem: the dataset row.
            seed: for the environment; the sampler draws from its own generator.
            progress: of this episode, kept current also when it is cancelled later.

        Returns:
            The sample; `error` is set and `stop_reason` says why when the environment failed or time ran out.

        Raises:
            SlipstreamError: the engine failed, which is not the sample's fault.
            asyncio.CancelledError: the caller gave the episode up.
        """
        trace = _Trace()
        try:
            async with asyncio.timeout(self._timeout_s):
                reason = await self._play(trace, problem, seed, progress or Progress())
        except TimeoutError:
            what = "the environment or the engine did not answer"
            return trace.sample(StopReason.TIMEOUT, f"{what} within {self._timeout_s:g} s (turn {trace.turns})")
        except _EnvironmentFailed as failure:
            logger.warning("environment failed on turn %d of seed %d: %s", trace.turns, seed, failure)
            return trace.sample(StopReason.ENVIRONMENT_ERROR, str(failure))
        except _EpisodeCancelled as cancelled:
            return trace.sample(StopReason.CANCELLED, str(cancelled))
        return trace.sample(reason)

    async def _play(self, trace: _Trace, problem: dict[str, Any], seed: int, progress: Progress) -> StopReason:
        progress.at("environment")
        environment, observation = await self._open(problem, seed)
        budget = self._budget
        while True:
            ids = self._tokens_of(observation, first=trace.turns == 0)
            trace.observe(ids)
            room = min(budget.max_tokens - trace.sampled, budget.max_context - len(trace.tokens))
            if room <= 0:
                return self._no_room(trace, len(ids))
            progress.turns += 1
            progress.at("engine")
            generation = await self._generate(trace, room)
            progress.at("environment")
            trace.extend(generation)
            progress.sampled_tokens += len(generation.tokens)
            if generation.finish_reason == "abort":
                raise _EpisodeCancelled("the engine aborted the request")
            ended = generation.finish_reason == "stop"
            result = await self._step(environment, self._action(generation, ended), trace)
            if not ended:
                return StopReason.LENGTH
            if result.done:
                return StopReason.STOP if trace.turns == 1 else StopReason.ENVIRONMENT_DONE
            if trace.turns >= budget.max_turns:
                return StopReason.TURN_LIMIT
            observation = result.observation

    async def _generate(self, trace: _Trace, room: int) -> Generation:
        sampling = self._sampling
        try:
            return await self._sampler.generate(list(trace.tokens), room, sampling.temperature, sampling.top_p)
        except ValueError as error:
            raise _EnvironmentFailed(f"the engine refused what the environment said: {error}") from error

    async def _open(self, problem: dict[str, Any], seed: int) -> tuple[Environment, Observation]:
        async def start() -> tuple[Environment, Observation]:
            environment = self._environment(problem, seed=seed, **self._options)
            return environment, await environment.reset()

        try:
            return await self._host.call(start)
        except Exception as error:
            raise _EnvironmentFailed(_describe(error, "reset")) from error

    async def _step(self, environment: Environment, action: Action, trace: _Trace) -> StepResult:
        try:
            result = await self._host.call(lambda: environment.step(action))
            reward = float(result.reward)
            if reward != reward or reward in (float("inf"), float("-inf")):
                raise _Refused(f"reward {reward} is not finite")
        except Exception as error:
            raise _EnvironmentFailed(_describe(error, "step")) from error
        trace.turn_rewards.append(reward)
        trace.metrics = {**trace.metrics, **result.metrics}
        return result

    def _no_room(self, trace: _Trace, observed: int) -> StopReason:
        if trace.turns:
            trace.retract(observed)
            return StopReason.LENGTH
        limit = self._budget.max_context
        raise _EnvironmentFailed(f"the prompt has {len(trace.tokens)} tokens, the context holds {limit}")

    def _action(self, generation: Generation, ended: bool) -> Action:
        said = generation.tokens[:-1] if ended else generation.tokens
        text = self._tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Action(text, tuple(generation.tokens), ended)

    def _tokens_of(self, observation: Observation, first: bool) -> list[int]:
        try:
            if isinstance(observation, Chat) and not first:
                raise _Refused("a Chat can only be the first observation; later ones are text or token ids")
            textual = isinstance(observation, str | Chat)
            ids = self._encode(observation) if textual else [int(t) for t in observation]
        except Exception as error:
            raise _EnvironmentFailed(_describe(error, "observation")) from error
        return list(ids)

    def _encode_text(self, said: str | Chat) -> tuple[int, ...]:
        text = said if isinstance(said, str) else self._prompt_of(said)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _prompt_of(self, chat: Chat) -> str:
        if getattr(self._tokenizer, "chat_template", None) is None:
            return "\n\n".join(content for _, content in chat.messages)
        messages = [{"role": role, "content": content} for role, content in chat.messages]
        template: Any = self._tokenizer
        return template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **dict(chat.options))


class _EpisodeCancelled(Exception):
    """The sample ends unfinished; the message is its reason."""


class _EnvironmentFailed(Exception):
    """The sample fails; the message is its reason."""


def _describe(error: Exception, where: str) -> str:
    if isinstance(error, _Refused):
        return f"{where}: {error}"
    return f"{where} raised {type(error).__name__}: {error}"
