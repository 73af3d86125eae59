"""The environment contract. Public signatures here are frozen: fields are appended with defaults, never changed.

An environment is a single-use asynchronous object, one per episode:

    environment = SomeEnvironment(problem, seed=7, **options)   # problem: one dataset row; options: tasks.options
    prompt = await environment.reset()                          # first observation
    result = await environment.step(action)                     # after each turn of the policy, until result.done

A single-turn task is an environment of one step. Observations are text (tokenised once, by the driver) or token
ids (used as they are); neither trains. What the policy sampled is never tokenised again. Environments run on a
thread of their own: one that blocks or raises fails its sample and nothing else.

Text is used as it is. Chat models want their template: return a Chat from `reset`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


@dataclass(frozen=True)
class Chat:
    """A first observation as messages: the tokenizer's chat template makes the prompt of them, up to where the
    assistant begins. A tokenizer without one gets the contents, joined by blank lines.

    Attributes:
        messages: (role, content), for example ("user", "What is 1 + 1?").
        options: (name, value) for the template; templates ignore names that they do not know.
    """

    messages: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str | int | float | bool], ...] = ()


Observation = str | list[int] | Chat


class StopReason(StrEnum):
    """Why an episode ended."""

    STOP = "stop"  # the policy's end token ended a one-turn episode
    ENVIRONMENT_DONE = "environment_done"  # the environment ended an episode of several turns
    LENGTH = "length"  # the token budget or the context ran out
    TURN_LIMIT = "turn_limit"  # max_turns used up, the environment would have gone on
    ENVIRONMENT_ERROR = "environment_error"  # failed: the environment raised or answered nonsense
    TIMEOUT = "timeout"  # failed: no end within rollout.sample_timeout_s
    CANCELLED = "cancelled"  # failed: the lease was lost or the node drains


@dataclass(frozen=True)
class Action:
    """One turn of the policy.

    Attributes:
        text: the sampled tokens as text, without the end token.
        tokens: [N] sampled token ids, the end token included.
        ended: whether the policy ended its turn itself; False when a budget cut it off.
    """

    text: str
    tokens: tuple[int, ...]
    ended: bool


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to an action.

    Attributes:
        observation: what the policy reads next; ignored when done.
        reward: of this turn; the episode's reward is the sum over turns.
        done: the episode is over.
        metrics: numbers to be averaged over a step's samples; those of the last step win.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = True
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """Bounds of one episode.

    Attributes:
        max_turns: calls of the model.
        max_tokens: sampled tokens in all turns together.
        max_context: tokens of prompt, turns and observations together (the engine's model length).
    """

    max_turns: int
    max_tokens: int
    max_context: int


class Environment(Protocol):
    """One episode; see the module's docstring for the order of calls."""

    def __init__(self, problem: dict[str, Any], *, seed: int, **options: Any) -> None:
        """`seed` differs between the samples of a group; raise ValueError when `problem` cannot be used."""
        ...

    async def reset(self) -> Observation:
        """The prompt; called once."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Judge one turn; called until a result is done or a budget is used up.

        An action with `ended` False was cut off; nothing follows it, whatever the result says.
        """
        ...
