"""Episodes of agents: programs that call the policy through an OpenAI-compatible endpoint and return a reward.

    async def agent(problem, *, base_url, api_key, model, seed, **options) -> float

It may return a number, or {"reward": number, "metrics": {...}}. It runs where environments run: on their thread, or
with `tasks.limits.process` in a process of its own.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any

from common.rollouts import Sample
from rollout_fleet.agents.api import MODEL
from rollout_fleet.agents.conversation import Conversation
from rollout_fleet.agents.endpoint import Endpoint, Session
from rollout_fleet.environments.isolation.placement import Stage
from rollout_fleet.environments.protocol import StopReason
from rollout_fleet.episode.driver import EpisodeFailed, EpisodeRules, Progress, checked_metrics, failure, finite
from rollout_fleet.episode.rendering import Renderer
from rollout_fleet.episode.sampler_protocol import Sampler
from rollout_fleet.episode.token_record import TokenRecord

logger = logging.getLogger(__name__)


class AgentDriver:
    """Runs episodes of one agent against a sampler; safe to call concurrently."""

    def __init__(self, sampler: Sampler, renderer: Renderer, stage: Stage, rules: EpisodeRules) -> None:
        self._sampler, self._renderer, self._stage, self._rules = sampler, renderer, stage, rules
        self._endpoint, self._slots = Endpoint(), rules.slots()

    async def run(
        self, problem: dict[str, Any], seed: int, progress: Progress | None = None, group_seed: int | None = None
    ) -> Sample:
        """One episode as in EpisodeDriver.run; of several conversations the one with most sampled tokens counts."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._slots)
            progress = progress or Progress()
            progress.at("environment")
            talk = Conversation(self._sampler, self._renderer, self._rules, progress)
            session = await self._endpoint.open(talk)
            stack.callback(session.close)
            try:
                async with asyncio.timeout(self._rules.timeout_s):
                    said = await self._play(session, problem, seed, seed if group_seed is None else group_seed)
                return _sample(talk, *_judged(said))
            except TimeoutError:
                return _failed(talk, StopReason.TIMEOUT, f"the agent was not done within {self._rules.timeout_s:g} s")
            except EpisodeFailed as error:
                logger.warning("%s of seed %d: %s", error.reason.value, seed, error)
                return _failed(talk, error.reason, str(error))

    async def close(self) -> None:
        """Stop the endpoint."""
        await self._endpoint.close()

    async def _play(self, session: Session, problem: dict[str, Any], seed: int, group_seed: int) -> Any:
        """The agent's return value; None when it gave up because its budget was used up.

        Raises:
            EpisodeFailed: the agent raised, or its request failed in the engine.
            SlipstreamError: the engine failed.
        """
        access = {"base_url": session.base_url, "api_key": session.api_key, "model": MODEL}
        agent = asyncio.ensure_future(self._stage.call(problem, seed, group_seed, **access))
        try:
            await asyncio.wait({agent, session.broken}, return_when=asyncio.FIRST_COMPLETED)
            if session.broken.done():
                raise session.broken.result()
            return agent.result()
        except (EpisodeFailed, asyncio.CancelledError):
            raise
        except Exception as error:
            if session.broken.done():
                raise
            if session.conversation.exhausted is not None:
                return None
            raise failure(error, "the agent") from error
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)


def _judged(said: Any) -> tuple[float, dict[str, float]]:
    """Reward and metrics of what an agent returned."""
    try:
        if isinstance(said, dict):
            return finite(said["reward"]), checked_metrics(said.get("metrics", {}))
        return (0.0 if said is None else finite(said)), {}
    except Exception as error:
        raise EpisodeFailed(f"the agent returned {str(said)[:100]!r}, expected a number: {error}") from error


def _sample(talk: Conversation, reward: float, metrics: dict[str, float]) -> Sample:
    turn = talk.longest()
    if turn is None:
        raise EpisodeFailed("the agent ended without a call of the model")
    record = turn.path()
    record.turn_rewards = [0.0] * (record.turns - 1) + [reward]
    record.metrics = {**metrics, "tokens_left_out": float(talk.sampled - record.sampled)}
    done = (
        StopReason.LENGTH if not turn.ended else StopReason.STOP if record.turns == 1 else StopReason.ENVIRONMENT_DONE
    )
    return record.sample(talk.exhausted or done)


def _failed(talk: Conversation, reason: StopReason, message: str) -> Sample:
    turn = talk.longest()
    return (turn.path() if turn is not None else TokenRecord()).sample(reason, message)
