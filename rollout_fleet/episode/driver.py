"""The episode driver: token in, token out, one Sample per episode.

    environment --text--> tokenised once, masked out --> context --> engine --> sampled tokens, trained
         ^                                                                          |
         +------------------------------- decoded text -----------------------------+

The context only ever grows; what the policy sampled is never tokenised again, so the learner trains on exactly the
tokens that the engine saw. Whatever an environment does wrong fails its own sample, with a reason.
"""

import asyncio
import copy
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from common.config.tasks import PENALTY
from common.rollouts import Sample
from common.span_buffer import SPANS
from rollout_fleet.environments.isolation.backend import (
    Backend,
    BackendFailed,
    EnvironmentDied,
    EnvironmentHandle,
    EnvironmentRaised,
    ObservationTooLarge,
)
from rollout_fleet.environments.protocol import Action, Budget, Chat, Limits, Observation, StepResult, StopReason
from rollout_fleet.environments.reward_library import soft_overlong
from rollout_fleet.episode.rendering import Renderer, parse_turn, tool_format
from rollout_fleet.episode.sampler_protocol import Generation, Sampler
from rollout_fleet.episode.token_record import TokenRecord

logger = logging.getLogger(__name__)

METRICS_MAX = 64
METRIC_NAME_MAX = 64
NOTES_MAX = 8
NOTE_CHARS = 500
REASON_CHARS = 500  # a longer error message is cut, because it travels with the sample


@dataclass(frozen=True)
class Sampling:
    """The distribution to sample from; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None  # makes one request's draws repeatable


@dataclass(frozen=True)
class EpisodeRules:
    """The bounds and the distribution of a job's episodes."""

    budget: Budget
    sampling: Sampling = Sampling()
    timeout_s: float = 600.0  # for a whole episode
    limits: Limits = field(default_factory=Limits)  # the environment's
    named: Sampling | None = None  # an agent may name it too (evaluation)
    penalty_tokens: int = 0  # buffer of tasks.truncated: penalized; 0: no penalty
    same_metrics: bool = False  # every sample has metrics of the same names, as reward functions must
    taught: bool = False  # a teacher gives log-probabilities, so agents may ask for no other temperature
    agents: Mapping[str, bool] = field(default_factory=dict)  # tasks.agents: names of sub-agents to whether they train


@dataclass
class Progress:
    """An episode while it runs, for those who watch it."""

    sampled_tokens: int = 0  # by calls of the model that ended
    turns: int = 0  # calls of the model that began
    state: str = "queued"  # for a slot; engine, environment, scorer (its teacher), or done
    since: float = field(default_factory=time.monotonic)  # when this state began
    track: str = "episodes"  # for its spans

    def at(self, state: str) -> None:
        """Begin a state; the one that ends becomes a span."""
        now = time.monotonic()
        if self.state in ("engine", "environment"):
            SPANS.add(self.state, self.state, self.since, now, self.track, turn=self.turns)
        self.state = state
        self.since = now


def whole(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which cannot travel."""
    return text.encode("utf-8", "replace").decode()


class EpisodeFailed(Exception):
    """The sample fails with `reason`; the message says why."""

    def __init__(self, message: str, reason: StopReason = StopReason.ENVIRONMENT_ERROR) -> None:
        self.reason = reason
        super().__init__(whole(message if len(message) <= REASON_CHARS else message[:REASON_CHARS] + " ..."))


class Episode(Protocol):
    """One episode. `record` is what its sample has so far; `play` raises EpisodeFailed for a fault of the sample's."""

    @property
    def record(self) -> TokenRecord: ...

    async def play(self) -> StopReason: ...

    async def close(self) -> None: ...


class SampleTeacher(Protocol):
    """Adds a teacher's columns to samples; rollout_fleet/scorers/teacher.py."""

    @property
    def paused(self) -> str: ...

    async def teach(self, sample: Sample) -> Sample: ...

    async def close(self) -> None: ...


class EpisodeDriver:
    """Runs episodes of one environment class against a sampler; safe to call concurrently."""

    teacher: SampleTeacher | None = None  # asked about every sample of a training, when its episode has ended

    def __init__(self, sampler: Sampler, renderer: Renderer, backend: Backend, rules: EpisodeRules) -> None:
        self.sampler = sampler
        self.renderer = renderer
        self.backend = backend
        self.rules = rules
        most = rules.limits.max_concurrent
        self._slots = nullcontext() if most is None else asyncio.Semaphore(most)
        self._names: frozenset[str] = frozenset()  # the metrics of the first sample

    @property
    def paused(self) -> str:
        """Why no episode should begin now; '' when all is well."""
        return "" if self.teacher is None else self.teacher.paused

    def at(self, temperature: float) -> Self:
        """The same driver for an evaluation: its slots and its environment, another temperature, and no penalty."""
        other = copy.copy(self)
        other.teacher = None
        sampling = Sampling(temperature, self.rules.sampling.top_p)
        other.rules = replace(self.rules, sampling=sampling, penalty_tokens=0)
        return other

    def check_names(self, metrics: dict[str, float]) -> None:
        """Raise EpisodeFailed for other names than the first sample's, where they must be the same."""
        names = frozenset(metrics)
        self._names = self._names or names
        if self.rules.same_metrics and names != self._names:
            known, given = (", ".join(sorted(each)) for each in (self._names, names))
            raise EpisodeFailed(f"rewards for {given}, earlier samples had {known}")

    async def begin(self, problem: dict[str, Any], seed: int, group_seed: int, progress: Progress) -> Episode:
        """A new episode, not played yet."""
        return self.episode(self.backend.environment(problem, seed, group_seed), progress)

    def episode(self, environment: EnvironmentHandle, progress: Progress) -> Episode:
        """The policy's turns with an environment."""
        return _EnvironmentEpisode(self, environment, progress)

    async def run(
        self, problem: dict[str, Any], seed: int, progress: Progress | None = None, group_seed: int | None = None
    ) -> Sample:
        """One episode of the dataset row `problem`; the sample's `error` says what failed.

        Raises SlipstreamError when the engine failed, which is not the sample's fault.

        Args:
            seed: for the environment; the sampler draws from its own generator.
            progress: stays correct when the episode is cancelled later.
            group_seed: the seed that all samples of the group share; None: `seed`.
        """
        progress = progress or Progress()
        sample = await self._played(problem, seed, progress, seed if group_seed is None else group_seed)
        if self.teacher is None:
            return sample
        progress.at("scorer")
        return await self.teacher.teach(sample)

    async def _played(self, problem: dict[str, Any], seed: int, progress: Progress, group_seed: int) -> Sample:
        async with self._slots:
            episode = await self.begin(problem, seed, group_seed, progress)
            try:
                async with asyncio.timeout(self.rules.timeout_s):
                    reason = await episode.play()
                record = episode.record
                if buffer := self.rules.penalty_tokens:
                    check_penalty(record.metrics)
                    most = self.rules.budget.max_tokens
                    cut = reason is StopReason.LENGTH  # perhaps by the context, long before the limit
                    sampled = record.sampled + sum(branch.sampled for branch in record.branches)
                    record.penalize(soft_overlong(most if cut else sampled, most, buffer))
                return record.sample(reason)
            except TimeoutError:
                late = f"the episode was not done within {self.rules.timeout_s:g} s (turn {episode.record.turns})"
                return episode.record.sample(StopReason.TIMEOUT, late)
            except EpisodeFailed as failure:
                if failure.reason is not StopReason.CANCELLED:
                    turn = episode.record.turns
                    logger.warning("%s on turn %d of seed %d: %s", failure.reason.value, turn, seed, failure)
                return episode.record.sample(failure.reason, str(failure))
            finally:
                await episode.close()

    async def compared(self, samples: list[Sample], problem: dict[str, Any]) -> list[Sample]:
        """The samples of a group, when all have ended, with the rewards that follow from comparing them."""
        return samples

    async def close(self) -> None:
        """End what the episodes shared."""
        if self.teacher is not None:
            await self.teacher.close()
        self.backend.close()


class _EnvironmentEpisode:
    """The policy and an environment take turns."""

    def __init__(self, driver: EpisodeDriver, environment: EnvironmentHandle, progress: Progress) -> None:
        self._check_names = driver.check_names
        self._sampler = driver.sampler
        self._renderer = driver.renderer
        self._rules = driver.rules
        self._environment = environment
        self._progress = progress
        self.record = TokenRecord()

    async def play(self) -> StopReason:
        self._progress.at("environment")
        record = self.record
        budget = self._rules.budget
        async with bounded("reset", self._rules.limits.reset_s):
            observation = await self._environment.reset()
        ids = self._ids(observation)
        kind = tool_format(self._renderer.template) if isinstance(observation, Chat) and observation.tools else None
        while True:
            record.observe(ids)
            room = min(budget.max_tokens - record.sampled, budget.max_context - len(record.tokens))
            if room <= 0:
                return self._no_room(len(ids))
            generation = await generate(
                self._sampler, record, room=room, sampling=self._rules.sampling, progress=self._progress
            )
            ended = generation.finish_reason == "stop"
            result = await self._step(self._action(generation, ended, kind))
            if not result.trained:
                record.untrain(*record.spans[-1])
            if not ended:
                return StopReason.LENGTH
            if result.done:
                return StopReason.STOP if record.turns == 1 else StopReason.ENVIRONMENT_DONE
            if budget.max_turns is not None and record.turns >= budget.max_turns:
                return StopReason.TURN_LIMIT
            ids = self._ids(result.observation, generation.tokens[-1])

    async def close(self) -> None:
        await self._environment.close()

    async def _step(self, action: Action) -> StepResult:
        async with bounded("step", self._rules.limits.step_s):
            result = await self._environment.step(action)
            reward = finite(result.reward)
            metrics = checked_metrics(result.metrics)
            notes = checked_notes(result.notes)
        self._check_names(metrics)
        self.record.turn_rewards.append(reward)
        self.record.metrics = {**self.record.metrics, **metrics}
        self.record.notes = {**self.record.notes, **notes}
        return result

    def _ids(self, observation: Observation, end_token: int | None = None) -> list[int]:
        """Token ids of an observation; `end_token` None: it is the first one."""
        most = self._rules.limits.observation_chars
        try:
            size = sum(len(c) for _, c in observation.messages) if isinstance(observation, Chat) else len(observation)
            if size > most:
                raise ObservationTooLarge(f"{size} characters or tokens, the limit is {most}")
            return self._renderer.ids(observation, end_token)
        except Exception as error:
            raise failure(error, "observation") from error

    def _no_room(self, observed: int) -> StopReason:
        if self.record.turns:
            self.record.retract(observed)
            return StopReason.LENGTH
        context = self._rules.budget.max_context
        raise EpisodeFailed(f"the prompt has {len(self.record.tokens)} tokens, the context has {context}")

    def _action(self, generation: Generation, ended: bool, kind: str | None) -> Action:
        text = self._renderer.text(generation.tokens[:-1] if ended else generation.tokens)
        if kind is None or not ended:
            return Action(text, tuple(generation.tokens), ended)
        turn = parse_turn(text, kind)
        return Action(text, tuple(generation.tokens), ended, turn.calls, turn.malformed)


async def generate(
    sampler: Sampler, record: TokenRecord, *, room: int, sampling: Sampling, progress: Progress
) -> Generation:
    """One call of the model on the record's tokens, kept in the record and in `progress`; at most `room` tokens.

    Raises EpisodeFailed when the engine refused or aborted the request, SlipstreamError when it failed.
    """
    progress.turns += 1
    progress.at("engine")
    try:
        generation = await sampler.generate(
            list(record.tokens), room, sampling.temperature, sampling.top_p, sampling.seed, record.session
        )
    except ValueError as error:
        raise EpisodeFailed(f"the engine refused what the environment said: {error}") from error
    progress.at("environment")
    record.extend(generation)
    progress.sampled_tokens += len(generation.tokens)
    if generation.finish_reason == "abort":
        raise EpisodeFailed("the engine aborted the request", StopReason.CANCELLED)
    return generation


@asynccontextmanager
async def bounded(where: str, limit_s: float) -> AsyncIterator[None]:
    """An error or timeout inside becomes the reason why the sample fails."""
    clock = asyncio.timeout(limit_s)
    try:
        async with clock:
            yield
    except (BackendFailed, EpisodeFailed):
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and clock.expired():
            raise EpisodeFailed(f"{where} took longer than {limit_s:g} s", StopReason.ENVIRONMENT_TIMEOUT) from error
        raise failure(error, where) from error


def failure(error: Exception, where: str) -> EpisodeFailed:
    """Why a sample fails whose environment raised `error` in `where`."""
    if isinstance(error, EnvironmentRaised):
        return EpisodeFailed(f"{where} {error}")
    if isinstance(error, ObservationTooLarge):
        return EpisodeFailed(f"{where}: {error}", StopReason.ENVIRONMENT_FLOOD)
    if isinstance(error, EnvironmentDied):
        return EpisodeFailed(f"{where}: {error}", StopReason.ENVIRONMENT_KILLED)
    return EpisodeFailed(f"{where} raised {type(error).__name__}: {error}")


def finite(reward: Any) -> float:
    """A reward as a finite float; raises for anything else."""
    if isinstance(reward, str | bytes):
        raise EpisodeFailed(f"reward {reward!r} is no number"[:200])
    reward = float(reward)
    if not math.isfinite(reward):
        raise EpisodeFailed(f"reward {reward} is not finite")
    return reward


def checked_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The environment's numbers, which travel with the sample, as finite floats; raises for anything else."""
    if len(metrics) > METRICS_MAX:
        raise EpisodeFailed(f"{len(metrics)} metrics, at most {METRICS_MAX} are kept")
    found = {whole(str(name)[:METRIC_NAME_MAX]): float(value) for name, value in metrics.items()}
    if len(found) < len(metrics):
        raise EpisodeFailed(f"two metrics have the same first {METRIC_NAME_MAX} characters")
    bad = [name for name, value in found.items() if not math.isfinite(value)]
    if bad:
        raise EpisodeFailed(f"metric {bad[0]!r} is not finite")
    return found


def check_penalty(metrics: Iterable[str]) -> None:
    """Raise EpisodeFailed where the overlong penalty would take the place of a metric of the same name."""
    if PENALTY in metrics:
        raise EpisodeFailed(f"{PENALTY!r} is the metric of tasks.truncated: penalized; give this one another name")


def checked_notes(notes: dict[str, str]) -> dict[str, str]:
    """The texts for the transcript, which travel with the sample; long ones are cut."""
    kept = list(notes.items())[:NOTES_MAX]
    return {whole(str(name)[:METRIC_NAME_MAX]): whole(str(text)[:NOTE_CHARS]) for name, text in kept}
