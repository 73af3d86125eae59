"""Episodes of agents: programs that call the policy through an OpenAI-compatible endpoint and return a reward.

    async def agent(problem, *, base_url, api_key, model, seed, **options) -> float

It may return a number, or {"reward": number, "metrics": {...}}. It runs where environments run: on their thread, or
with `tasks.limits.process` in a process of its own.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rollout_fleet.agents.api import MODEL
from rollout_fleet.agents.conversation import Conversation
from rollout_fleet.agents.endpoint import Endpoint, Session
from rollout_fleet.environments.isolation.backend import Backend
from rollout_fleet.environments.protocol import StopReason
from rollout_fleet.episode import driver
from rollout_fleet.episode.driver import Episode, EpisodeDriver, EpisodeFailed, EpisodeRules, Progress
from rollout_fleet.episode.rendering import Renderer
from rollout_fleet.episode.sampler_protocol import Sampler
from rollout_fleet.episode.token_record import TokenRecord


class AgentDriver(EpisodeDriver):
    """Runs episodes of one agent. All its conversations train: the longest is the sample, the others its branches."""

    def __init__(self, sampler: Sampler, renderer: Renderer, backend: Backend, rules: EpisodeRules) -> None:
        super().__init__(sampler, renderer, backend, rules)
        self._endpoint = Endpoint()

    async def begin(self, problem: dict[str, Any], seed: int, group_seed: int, progress: Progress) -> Episode:
        progress.at("environment")
        session = await self._endpoint.open(Conversation(self.sampler, self.renderer, self.rules, progress))
        access = {"base_url": session.base_url, "api_key": session.api_key, "model": MODEL}
        return _AgentEpisode(session, partial(self.backend.run_agent, problem, seed, group_seed, **access))

    async def close(self) -> None:
        await self._endpoint.close()
        await super().close()


class _AgentEpisode:
    """An agent talks to the policy until it returns its reward."""

    def __init__(self, session: Session, agent: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._session = session
        self._agent = agent
        self._talk = session.conversation
        self._final: TokenRecord | None = None

    @property
    def record(self) -> TokenRecord:
        return self._final or self._talk.whole()

    async def play(self) -> StopReason:
        said = await self._returned()
        try:
            told: dict[str, Any] = said if isinstance(said, dict) else {"reward": 0.0 if said is None else said}
            reward = driver.finite(told["reward"])
            metrics = driver.checked_metrics(told.get("metrics", {}))
        except Exception as error:
            raise EpisodeFailed(f"the agent returned {str(said)[:100]!r}, expected a number: {error}") from error
        turn = self._talk.longest()
        if turn is None:
            raise EpisodeFailed("the agent ended without a call of the model")
        record = self._final = self._talk.whole()
        record.turn_rewards = [0.0] * (record.turns - 1) + [reward]
        record.metrics = {**metrics, "branches": float(len(record.branches))}
        if self._talk.terms.agents:
            record.metrics["tokens_frozen"] = float(self._talk.frozen)
        if self._talk.exhausted is not None or turn.cut:
            return self._talk.exhausted or StopReason.LENGTH
        return StopReason.STOP if record.turns == 1 else StopReason.ENVIRONMENT_DONE

    async def close(self) -> None:
        self._session.close()

    async def _returned(self) -> Any:
        """The agent's return value; None when it gave up because its budget was used up."""
        agent = asyncio.create_task(self._agent())
        broken = self._session.broken
        try:
            await asyncio.wait({agent, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                raise broken.result()
            return agent.result()
        except (EpisodeFailed, asyncio.CancelledError):
            raise
        except Exception as error:
            if broken.done():
                raise
            if self._talk.exhausted is not None:
                return None
            raise driver.failure(error, "the agent") from error
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
