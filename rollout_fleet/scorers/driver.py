"""Episodes of reward functions whose answers scorers judge as well.

The functions run where environments run, on their thread or in a process of their own. After them the node's event
loop asks the scorers. So keys stay in the node, and all episodes share its bounds and its cache.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.config.schema import Config
from rollout_fleet.environments.isolation.backend import Backend, EnvironmentHandle
from rollout_fleet.environments.protocol import Action, Chat, Observation, StepResult
from rollout_fleet.episode.driver import Episode, EpisodeDriver, EpisodeFailed, EpisodeRules, Progress, bounded
from rollout_fleet.episode.rendering import Renderer
from rollout_fleet.episode.sampler_protocol import Sampler
from rollout_fleet.scorers.client import Scorer


@dataclass(frozen=True)
class _Judge:
    """A reward that a scorer gives."""

    scorer: Scorer
    metric: str
    weight: float

    async def judge(self, prompt: str, completion: str, row: Mapping[str, Any]) -> tuple[dict[str, float], str]:
        """(its metrics, the model and its answer)."""
        score, known = await self.scorer.score(prompt, completion, row)
        metrics = {
            self.metric: score.value,
            f"{self.metric}/cached": float(known),
            f"{self.metric}/retries": 0.0 if known else float(score.retries),
            f"{self.metric}/seconds": 0.0 if known else score.seconds,
        }
        return metrics, score.said


class ScoredDriver(EpisodeDriver):
    """Runs episodes of reward functions and scorers. The time of the scorers is no time of the functions."""

    def __init__(
        self, sampler: Sampler, renderer: Renderer, backend: Backend, *, rules: EpisodeRules, config: Config
    ) -> None:
        self.step_s = rules.limits.step_s
        self._scorers = {name: Scorer(name, scorer) for name, scorer in config.scorers.items()}
        longest = max(scorer.deadline_s for scorer in config.scorers.values())
        limits = replace(rules.limits, step_s=self.step_s + longest + 1.0)
        super().__init__(sampler, renderer, backend, replace(rules, limits=limits))
        self.judges: list[_Judge] = []
        for entry in config.tasks.reward if isinstance(config.tasks.reward, list) else ():
            if entry.scorer is not None and not isinstance(entry.weight, dict):
                self.judges.append(_Judge(self._scorers[entry.scorer], entry.name or entry.scorer, entry.weight))

    @property
    def paused(self) -> str:
        return next((scorer.paused for scorer in self._scorers.values() if scorer.paused), "")

    async def begin(self, problem: dict[str, Any], seed: int, group_seed: int, progress: Progress) -> Episode:
        environment = _Scored(self.backend.environment(problem, seed, group_seed), problem, self)
        return self.episode(environment, progress)

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for scorer in self._scorers.values()))
        await super().close()


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
            self._prompt = "\n\n".join(content for _, content in observation.messages)
        return observation

    async def step(self, action: Action) -> StepResult:
        async with bounded("step", self._driver.step_s):
            result = await self._functions.step(action)
        judges = self._driver.judges
        found = await asyncio.gather(*(judge.judge(self._prompt, action.text, self._row) for judge in judges))
        metrics, reward = dict(result.metrics), result.reward
        for judge, (values, _) in zip(judges, found, strict=True):
            if twice := metrics.keys() & values.keys():
                raise EpisodeFailed(f"two rewards are named {min(twice)!r}; give one of them a `name`")
            metrics |= values
            reward += judge.weight * values[judge.metric]
        notes = {judge.metric: said for judge, (_, said) in zip(judges, found, strict=True)}
        return replace(result, reward=reward, metrics=metrics, notes=notes)

    async def close(self) -> None:
        await self._functions.close()
