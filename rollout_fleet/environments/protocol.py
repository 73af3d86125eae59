"""The environment contract. Public signatures here are frozen: fields are appended with defaults, never changed.

An environment is a single-use asynchronous object, one per episode:

    environment = SomeEnvironment(problem, seed=7, **options)   # problem: one dataset row; options: tasks.options
    prompt = await environment.reset()                          # first observation
    result = await environment.step(action)                     # after each turn of the policy, until result.done
    await environment.close()                                   # if it has one; also when the episode was given up

A single-turn task is an environment of one step. Observations are text (tokenised once, by the driver) or token
ids (used as they are); neither trains. Sampled tokens are never tokenised again. Environments run on a separate
thread, or in separate processes with `Limits.process`. One that blocks, raises or returns too much fails only its
sample.

Text is used as it is. For a chat model, return a Chat, which the model's template renders. `reset` returns the
conversation up to the policy's first turn; later observations are only the messages that the environment adds.

An environment whose constructor takes `group_seed` gets the seed that all samples of its group share as well.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

MESSAGE_CHARS = 200  # characters of a refused message


@dataclass(frozen=True)
class Chat:
    """An observation as messages: the tokenizer's chat template makes text of them, up to where the assistant
    begins. A tokenizer without one gets the contents, joined by blank lines.

    Raises ValueError for messages that are no pairs of texts, such as the dicts of OpenAI's API.
    """

    # (role, content), for example ("user", "What is 1 + 1?") or, after a tool call, ("tool", "2")
    messages: tuple[tuple[str, str], ...]
    # (name, value) for the template; templates ignore names that they do not know
    options: tuple[tuple[str, str | int | float | bool], ...] = ()
    # the tools that the policy may call, as a JSON list of function schemas; '' for none. The same in every Chat of an
    # episode.
    tools: str = ""

    def __post_init__(self) -> None:
        for message in self.messages:  # a dict with two keys would unpack to their names
            pair = isinstance(message, tuple | list) and len(message) == 2
            if not pair or not all(isinstance(part, str) for part in message):
                raise ValueError(f'expected messages that are ("user", text) pairs, found {message!r}'[:MESSAGE_CHARS])


Observation = str | list[int] | Chat


class StopReason(StrEnum):
    """Why an episode ended."""

    STOP = "stop"  # the policy's end token ended a one-turn episode
    ENVIRONMENT_DONE = "environment_done"  # the environment ended an episode of several turns
    LENGTH = "length"  # the token budget or the context ran out
    TURN_LIMIT = "turn_limit"  # max_turns used up, the environment would have gone on
    ENVIRONMENT_ERROR = "environment_error"  # failed: the environment raised or answered nonsense
    ENVIRONMENT_TIMEOUT = "environment_timeout"  # failed: a reset or a step took longer than its limit
    ENVIRONMENT_FLOOD = "environment_flood"  # failed: an observation larger than its limit
    ENVIRONMENT_KILLED = "environment_killed"  # failed: its process died, of its limits or by itself
    SCORER_ERROR = "scorer_error"  # failed: a scorer gave no score
    TIMEOUT = "timeout"  # failed: no end within rollout.sample_timeout_s
    CANCELLED = "cancelled"  # failed: the lease was lost or the node drains


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote; `arguments` is a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Action:
    """One turn of the policy."""

    text: str  # the sampled tokens as text, without the end token
    tokens: tuple[int, ...]  # [N] sampled token ids, the end token included
    ended: bool  # whether the policy ended its turn itself; False when a budget cut it off
    # tool calls, in the format of the tokenizer's template; only after a Chat with tools
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""  # why something that looks like a tool call is none; '' when all is well


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to an action."""

    observation: Observation = ""  # the text or tokens that the policy reads next; ignored when done
    reward: float = 0.0  # this turn's reward; the episode's reward is the sum over turns
    done: bool = True  # the episode is over
    # numbers to be averaged over a step's samples; those of the last step win. At most 64.
    metrics: dict[str, float] = field(default_factory=dict)
    trained: bool = True  # whether the loss takes what the policy sampled in this turn
    # short texts by name for the transcript, for example a judge's answer; those of the last step win
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """Limits of the environments of a class. A class says its own as `LIMITS`; tasks.limits overrides single ones."""

    # for building it and `reset`, and for each `step`; the whole episode has rollout.sample_timeout_s
    reset_s: float = 120.0
    step_s: float = 120.0
    observation_chars: int = 262_144  # length of one observation; for a list, its number of token ids
    # episodes at once on a node, besides rollout.concurrency; None: no bound of its own
    max_concurrent: int | None = None
    process: bool = False  # run every episode in a process of its own, for code that blocks or is not trusted
    cpu_s: int = 60  # limits of that process for the whole episode; memory is address space
    memory_mib: int = 1024
    python: str = ""  # interpreter of that process, for libraries that do not fit the node's; '' for the node's own


@dataclass(frozen=True)
class Budget:
    """Bounds of one episode."""

    max_turns: int | None  # calls of the model; None: as many as the tokens allow
    max_tokens: int  # sampled tokens in all turns together
    max_context: int  # tokens of prompt, turns and observations together (the engine's model length)


class Environment(Protocol):
    """One episode; see the module's docstring for the order of calls."""

    def __init__(self, problem: dict[str, Any], *, seed: int, **options: Any) -> None:
        """`seed` differs between the samples of a group, `group_seed` (only for constructors that name it) does not;
        raise ValueError when `problem` cannot be used."""

    async def reset(self) -> Observation:
        """The prompt; called once."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Judge one turn; called until a result is done or a budget is used up.

        An action with `ended` False was cut off; nothing follows it, whatever the result says.
        """
        ...
