"""Where an episode's environment lives: on the environments' thread, or in a process of its own.

The driver sees an EnvironmentHandle and does not know which it is. This module needs the standard library only, because
environment processes import it too.
"""

import inspect
from abc import ABC, abstractmethod
from typing import Any

from common.errors import SlipstreamError
from rollout_fleet.environments.protocol import Action, Observation, StepResult

CLOSE_S = 10.0


class EnvironmentDied(Exception):
    """An environment's process ended without an answer; the message says how."""


class EnvironmentLost(EnvironmentDied):
    """The process ended, and so did the one that watches it; the environment is not to blame."""


class EnvironmentRaised(Exception):
    """An environment's own exception, from its process; the message has its type."""


class ObservationTooLarge(Exception):
    """An environment said more than its limit allows."""


class BackendFailed(SlipstreamError):
    """Environments cannot be started at all on this node, which is no sample's fault."""


class EnvironmentHandle(ABC):
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


class Backend(ABC):
    """Runs the environments or the agents of one kind."""

    def __init__(self, options: dict[str, Any], shares_seed: bool) -> None:
        self._options = options
        self._shares_seed = shares_seed

    def keywords(self, seed: int, group_seed: int) -> dict[str, Any]:
        """Arguments of the constructor beside the problem."""
        return {"seed": seed, **({"group_seed": group_seed} if self._shares_seed else {}), **self._options}

    @abstractmethod
    def environment(self, problem: dict[str, Any], seed: int, group_seed: int) -> EnvironmentHandle:
        """The environment of one episode; `reset` builds it."""

    @abstractmethod
    async def run_agent(self, problem: dict[str, Any], seed: int, group_seed: int, **access: str) -> Any:
        """Run an agent to its end; cancelling it ends the agent. Raises what the agent raises."""

    def close(self) -> None:  # noqa: B027
        """End the processes that this backend started; a thread belongs to its maker."""


def takes_group_seed(kind: Any) -> bool:
    """Whether the constructor names `group_seed`."""
    return "group_seed" in inspect.signature(kind).parameters


async def close_environment(environment: Any) -> None:
    """Call `close` of an environment that has one, as a coroutine or not."""
    result = environment.close() if hasattr(environment, "close") else None
    if inspect.isawaitable(result):
        await result
