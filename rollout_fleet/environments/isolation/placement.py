"""Where an episode's environment lives: on the environments' thread, or in a process of its own (processes.py).

The driver sees a Seat and does not know which it is.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from common.errors import SlipstreamError
from rollout_fleet.environments import registry
from rollout_fleet.environments.isolation.thread_host import EnvironmentHost
from rollout_fleet.environments.protocol import Action, Environment, Observation, StepResult

CLOSE_S = 10.0


class EnvironmentDied(Exception):
    """An environment's process ended without an answer; the message says how."""


class StageFailed(SlipstreamError):
    """Environments cannot be started at all on this node, which is no sample's fault."""


class EnvironmentRaised(Exception):
    """An environment's own exception, from its process; the message has its type."""


class Flood(Exception):
    """An environment said more than its limit allows."""


class Seat(Protocol):
    """One episode's environment."""

    async def reset(self) -> Observation:
        """Build the environment and get its first observation; raises whatever it raises."""
        ...

    async def step(self, action: Action) -> StepResult:
        """One turn; raises whatever the environment raises."""
        ...

    async def close(self) -> None:
        """The episode is over, however it ended; never raises."""
        ...


class Stage(Protocol):
    """Where the environments or the agents of one kind live."""

    def seat(self, problem: dict[str, Any], seed: int, group_seed: int) -> Seat:
        """The place of one episode's environment."""
        ...

    async def call(self, problem: dict[str, Any], seed: int, group_seed: int, **access: str) -> Any:
        """Run an agent to its end; cancelling it ends the agent. Raises what the agent raises."""
        ...


class ThreadStage:
    """Environments or agents on the environments' thread."""

    def __init__(self, kind: Callable[..., Any], options: dict[str, Any], host: EnvironmentHost) -> None:
        self._kind, self._options, self._host = kind, options, host
        self._shares_seed = registry.takes_group_seed(kind)

    def seat(self, problem: dict[str, Any], seed: int, group_seed: int) -> Seat:
        """See Stage."""
        return _ThreadSeat(self._host, lambda: self._made(problem, seed, group_seed))

    async def call(self, problem: dict[str, Any], seed: int, group_seed: int, **access: str) -> Any:
        """See Stage."""
        return await self._host.call(lambda: self._made(problem, seed, group_seed, **access))

    def _made(self, problem: dict[str, Any], seed: int, group_seed: int, **access: str) -> Any:
        shared = {"group_seed": group_seed} if self._shares_seed else {}
        return self._kind(problem, seed=seed, **shared, **access, **self._options)


class _ThreadSeat:
    def __init__(self, host: EnvironmentHost, build: Callable[[], Environment]) -> None:
        self._host, self._build = host, build
        self._environment: Environment | None = None

    async def reset(self) -> Observation:
        async def start() -> Observation:
            self._environment = self._build()
            return await self._environment.reset()

        return await self._host.call(start)

    async def step(self, action: Action) -> StepResult:
        environment = self._environment
        assert environment is not None
        return await self._host.call(lambda: environment.step(action))

    async def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is None:
            return

        async def end() -> None:
            ended = close()
            if inspect.isawaitable(ended):
                await ended

        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await self._host.call(end)
