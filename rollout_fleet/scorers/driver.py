"""Episodes of reward functions whose answers scorers judge as well.

The functions run where environments run, on their thread or in a process of their own. After them the node's event
loop asks the scorers. So keys stay in the node, and all episodes share its bounds and its cache.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from common.config.schema import Config
from common.rollouts import Sample
from rollout_fleet.environments import registry
from rollout_fleet.environments.builtin.reward_function import messages_of
from rollout_fleet.environments.isolation.backend import Backend, EnvironmentHandle
from rollout_fleet.environments.protocol import Action, Chat, Observation, StepResult, StopReason
from rollout_fleet.environments.reward_library import total_of
from rollout_fleet.episode.driver import (
    Episode,
    EpisodeDriver,
    EpisodeFailed,
    EpisodeRules,
    Progress,
    bounded,
    checked_metrics,
    checked_notes,
    finite,
)
from rollout_fleet.episode.rendering import Renderer
from rollout_fleet.episode.sampler_protocol import Sampler
from rollout_fleet.scorers.client import Scorer
from rollout_fleet.scorers.requests import ScorerFailed, text_of_prompt


@dataclass(frozen=True)
class _Judge:
    scorer: Scorer
    metric: str
    weight: float

    async def judge(
        self, prompt: str, completion: str, row: Mapping[str, Any], *, other: str = ""
    ) -> tuple[dict[str, float], str]:
        """(its metrics, the model and its answer)."""
        score, known = await self.scorer.score(prompt, completion, row, other=other)
        metrics = {
            self.metric: score.value,
            f"{self.metric}/cached": float(known),
            f"{self.metric}/retries": 0.0 if known else float(score.retries),
            f"{self.metric}/seconds": 0.0 if known else score.seconds,
        }
        return metrics, score.said

    async def compare(
        self, prompt: str, texts: list[str], row: Mapping[str, Any], *, index: int
    ) -> tuple[dict[str, float], str]:
        """As `judge`, of one of a group's answers against the next ones: means, and what it said last.

        The answer always stands first. So a judge's preference for a place changes all scores alike.
        """
        count = min(self.scorer.config.opponents, len(texts) - 1)
        if not count:
            raise ScorerFailed(f"{self.metric}: the group has no other answer to compare with")
        others = [texts[(index + step) % len(texts)] for step in range(1, count + 1)]
        found = await asyncio.gather(*(self.judge(prompt, texts[index], row, other=other) for other in others))
        metrics = [each for each, _ in found]
        return {name: sum(each[name] for each in metrics) / count for name in metrics[0]}, found[-1][1]


class ScoredDriver(EpisodeDriver):
    """Runs episodes of reward functions and scorers. The time of the scorers is no time of the functions."""

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        backend: Backend,
        *,
        rules: EpisodeRules,
        config: Config,
        clients: dict[str, Scorer] | None = None,
    ) -> None:
        """`clients`: those of other sources, whose bounds and cache are a node's; new ones are added."""
        self.step_s = rules.limits.step_s
        known = {} if clients is None else clients
        judging = {name: scorer for name, scorer in config.scorers.items() if scorer.kind != "teacher"}
        for name, scorer in judging.items():
            known[name] = known.get(name) or Scorer(name, scorer)
        self._scorers = {name: known[name] for name in judging}
        longest = max(scorer.deadline_s for scorer in judging.values())
        limits = replace(rules.limits, step_s=self.step_s + longest + 1.0)
        super().__init__(sampler, renderer, backend, replace(rules, limits=limits))
        self._prompt = registry.played(config.tasks)[1]["prompt"]
        self.judges: list[_Judge] = []
        self._comparing: list[_Judge] = []
        for entry in config.tasks.reward if isinstance(config.tasks.reward, list) else ():
            if entry.scorer is not None and not isinstance(entry.weight, dict):
                judge = _Judge(self._scorers[entry.scorer], entry.name or entry.scorer, entry.weight)
                compares = judge.scorer.config.kind == "pairwise"
                (self._comparing if compares else self.judges).append(judge)

    @property
    def paused(self) -> str:
        return next((scorer.paused for scorer in self._scorers.values() if scorer.paused), super().paused)

    async def begin(self, problem: dict[str, Any], seed: int, group_seed: int, progress: Progress) -> Episode:
        environment = _Scored(self.backend.environment(problem, seed, group_seed), problem, self)
        return self.episode(environment, progress)

    async def compared(self, samples: list[Sample], problem: dict[str, Any]) -> list[Sample]:
        """The samples with the scores of pairwise scorers; a failed comparison fails its sample."""
        good = [number for number, sample in enumerate(samples) if sample.error is None] if self._comparing else []
        if not good:
            return samples
        texts = [self._answer(samples[number]) for number in good]
        prompt = text_of_prompt(Chat(tuple(messages_of(self._prompt, problem))))

        async def one(index: int) -> Sample:
            try:
                asked = (judge.compare(prompt, texts, problem, index=index) for judge in self._comparing)
                return self._added(samples[good[index]], await asyncio.gather(*asked))
            except EpisodeFailed as failure:
                reason = failure.reason.value
                return msgspec.structs.replace(samples[good[index]], stop_reason=reason, error=str(failure))

        done = dict(zip(good, await asyncio.gather(*map(one, range(len(good)))), strict=True))
        return [done.get(number, sample) for number, sample in enumerate(samples)]

    def _added(self, sample: Sample, found: Sequence[tuple[dict[str, float], str]]) -> Sample:
        reward, metrics, said = _summed(self._comparing, found, sample.metrics)
        rewards = [*sample.turn_rewards[:-1], sample.turn_rewards[-1] + reward]
        return msgspec.structs.replace(
            sample,
            reward=finite(total_of(rewards)),
            turn_rewards=rewards,
            metrics=checked_metrics(metrics),
            notes=sample.notes | checked_notes(said),
        )

    def _answer(self, sample: Sample) -> str:
        """The policy's answer without its end token, as functions and other scorers got it."""
        start, end = sample.turn_spans[-1]
        ended = sample.stop_reason != StopReason.LENGTH
        return self.renderer.text(sample.tokens.numpy()[start : end - ended].tolist())

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for scorer in self._scorers.values()))
        await super().close()


def _summed(
    judges: Sequence[_Judge], found: Sequence[tuple[dict[str, float], str]], metrics: Mapping[str, float]
) -> tuple[float, dict[str, float], dict[str, str]]:
    """(weighted sum of the scores, `metrics` with theirs, what was said by metric).

    Raises EpisodeFailed for two metrics of one name.
    """
    weighted: list[float] = []
    metrics = dict(metrics)
    notes: dict[str, str] = {}
    for judge, (values, said) in zip(judges, found, strict=True):
        if twice := metrics.keys() & values.keys():
            raise EpisodeFailed(f"two rewards are named {min(twice)!r}; give one of them a `name`")
        weighted.append(judge.weight * values[judge.metric])
        metrics |= values
        notes[judge.metric] = said
    return total_of(weighted), metrics, notes


class _Scored(EnvironmentHandle):
    """The environment around reward functions, and the scorers behind it."""

    def __init__(self, functions: EnvironmentHandle, row: Mapping[str, Any], driver: ScoredDriver) -> None:
        self._functions = functions
        self._row = row
        self._driver = driver
        self._prompt = ""

    async def reset(self) -> Observation:
        observation = await self._functions.reset()
        if isinstance(observation, Chat):
            self._prompt = text_of_prompt(observation)
        return observation

    async def step(self, action: Action) -> StepResult:
        async with bounded("step", self._driver.step_s):
            result = await self._functions.step(action)
        judges = self._driver.judges
        found = await asyncio.gather(*(judge.judge(self._prompt, action.text, self._row) for judge in judges))
        reward, metrics, notes = _summed(judges, found, result.metrics)
        return replace(result, reward=result.reward + reward, metrics=metrics, notes=notes)

    async def close(self) -> None:
        await self._functions.close()
