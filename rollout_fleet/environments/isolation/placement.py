"""Where an episode's environment lives: on the environments' thread, or in a process of its own (process_host.py).

The driver sees a Seat and does not know which it is.
"""

import asyncio
import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from common.errors import SlipstreamError
from rollout_fleet.environments import registry
from rollout_fleet.environments.isolation.thread_host import EnvironmentHost
from rollout_fleet.environments.protocol import Action, Observation, StepResult

CLOSE_S = 10.0


class EnvironmentDied(Exception):
    """An environment's process ended without an answer; the message says how."""


class StageFailed(SlipstreamError):
    """Environments cannot be started at all on this node, which is no sample's fault."""


class EnvironmentRaised(Exception):
    """An environment's own exception, from its process; the message has its type."""


class Flood(Exception):
    """An environment said more than its limit allows."""


async def closed(environment: Any) -> None:
    """Call `close` of an environment that has one, as a coroutine or not."""
    result = environment.close() if hasattr(environment, "close") else None
    if inspect.isawaitable(result):
        await result


class Seat(ABC):
    """One episode's environment; `reset` and `step` raise whatever it raises."""

    @abstractmethod
    async def reset(self) -> Observation:
        """Build the environment and get its first observation."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """One turn."""

    @abstractmethod
    async def close(self) -> None:
        """The episode is over, however it ended; never raises."""


class Stage(ABC):
    """Where the environments or the agents of one kind live."""

    def __init__(self, options: dict[str, Any], shares_seed: bool) -> None:
        self._options, self._shares_seed = options, shares_seed

    def keywords(self, seed: int, group_seed: int) -> dict[str, Any]:
        """Arguments of the constructor beside the problem."""
        return {"seed": seed, **({"group_seed": group_seed} if self._shares_seed else {}), **self._options}

    @abstractmethod
    def seat(self, problem: dict[str, Any], seed: int, group_seed: int) -> Seat:
        """The place of one episode's environment."""

    @abstractmethod
    async def call(self, problem: dict[str, Any], seed: int, group_seed: int, **access: str) -> Any:
        """Run an agent to its end; cancelling it ends the agent. Raises what the agent raises."""


class ThreadStage(Stage):
    """Environments or agents on the environments' thread."""

    def __init__(self, kind: Callable[..., Any], options: dict[str, Any], host: EnvironmentHost) -> None:
        super().__init__(options, registry.takes_group_seed(kind))
        self._kind, self._host = kind, host

    def seat(self, problem: dict[str, Any], seed: int, group_seed: int) -> Seat:
        return _ThreadSeat(self._host, partial(self._kind, problem, **self.keywords(seed, group_seed)))

    async def call(self, problem: dict[str, Any], seed: int, group_seed: int, **access: str) -> Any:
        keywords = {**access, **self.keywords(seed, group_seed)}
        return await self._host.call(lambda: self._kind(problem, **keywords))


class _ThreadSeat(Seat):
    def __init__(self, host: EnvironmentHost, build: Callable[[], Any]) -> None:
        self._host, self._build = host, build
        self._environment: Any = None

    async def reset(self) -> Observation:
        async def begin() -> Observation:
            self._environment = self._build()
            return await self._environment.reset()

        return await self._host.call(begin)

    async def step(self, action: Action) -> StepResult:
        return await self._host.call(lambda: self._environment.step(action))

    async def close(self) -> None:
        if hasattr(self._environment, "close"):  # without it, the thread need not be woken
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_S):
                    await self._host.call(lambda: closed(self._environment))
