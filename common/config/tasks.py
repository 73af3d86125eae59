"""The section `tasks` of the config: the rows of the dataset, and the environment or the rewards that judge them."""

import re
from collections.abc import Iterator
from typing import Literal

from common.config.types import AddressSpace, Number, Positive, Scalar, Seconds, Strict, Text
from common.errors import Problem

AGENT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Role = Literal["system", "user", "assistant", "tool"]
DEFAULT_BUFFER_SHARE = 5  # overlong_buffer_tokens is this part of rollout.max_tokens, as in DAPO


class LimitsConfig(Strict, frozen=True, kw_only=True):
    """Limits of an environment. Each one that is unset is what the environment's class says (docs/environments.md)."""

    reset_s: Seconds | None = None  # Seconds to build an environment and to get its first observation.
    step_s: Seconds | None = None  # Seconds for each later answer of the environment.
    observation_chars: Positive | None = None  # Characters of one observation; a longer one fails the sample.
    # Episodes that run at once on a node. Lower it for an environment that needs much memory.
    max_concurrent: Positive | None = None
    # Runs every episode in its own process. Turn it on for code that blocks or that is not trusted.
    process: bool | None = None
    cpu_s: Positive | None = None  # CPU seconds of that process over the whole episode.
    memory_mib: AddressSpace | None = None  # Address space of that process.
    # Interpreter of that process. Set it for libraries that do not fit the node's environment.
    python: Text | None = None


class RewardConfig(Strict, frozen=True, kw_only=True):
    """One of several rewards; docs/rewards.md."""

    # 'module:function' or a built-in name; docs/rewards.md lists them. An entry has this key or `scorer`.
    function: Text | None = None
    scorer: Text | None = None  # Name of one of `scorers`; docs/scorers.md.
    # Factor in the sum; 0 only logs it. For a function that returns several rewards, a mapping of names to factors.
    weight: Number | dict[str, Number] = 1.0
    options: dict[str, Scalar] = {}  # Keyword arguments of the function.
    # Name of the reward in metrics. Unset, that of the function or scorer. Before several names, a prefix.
    name: Text | None = None


class MessageConfig(Strict, frozen=True, kw_only=True):
    """One message of a prompt."""

    role: Role  # Author of the message.
    content: Text  # Template with {column}.


class AgentConfig(Strict, frozen=True, kw_only=True):
    """A sub-agent of an agent; docs/agents.md."""

    # False serves the policy's answers to it and trains none of them.
    trained: bool = True


class RowsConfig(Strict, frozen=True, kw_only=True):
    """The keys that the tasks of an RL job and the rows of a warm start have in common."""

    dataset: Text
    shuffle: bool = True  # Gives every epoch its own order. False keeps the order of the file.


class TasksConfig(RowsConfig, frozen=True, kw_only=True):
    # Built-in name or 'module:Class'; docs/environments.md lists both. A job has this key or `reward`.
    environment: Text | None = None
    # Function (completion, row) that returns the reward, as 'module:function' or a built-in name, or several functions
    # with weights; docs/rewards.md.
    reward: Text | list[RewardConfig] | None = None
    # Template with {column}, or messages with such templates, for `reward`. Unset, the dataset's column `prompt`.
    prompt: Text | list[MessageConfig] | None = None
    # Variables of the chat template, for `reward`; enable_thinking of Qwen3 is one.
    chat_template_kwargs: dict[str, Scalar] = {}
    # JSONL or parquet file with one problem per row; * in its name stands for several files. Or a file of the hub:
    # hf://datasets/OWNER/NAME[@REVISION]/FILE; docs/models.md.
    dataset: Text
    options: dict[str, Scalar] = {}  # Keyword arguments of the environment, or of the reward function.
    # Sub-agents by name, which an agent asks as the model policy/NAME. Unset, it may use any name, and all train.
    agents: dict[str, AgentConfig] = {}
    limits: LimitsConfig = LimitsConfig()
    max_attempts: Positive = 3  # Failed attempts after which a task is given up; docs/delivery.md.
    # Use of an answer that the token limit cut: as it was judged, not in the loss, or with DAPO's penalty. The penalty
    # begins before the limit; docs/rewards.md.
    truncated: Literal["counted", "masked", "penalized"] = "counted"
    # Sampled tokens before rollout.max_tokens over which the penalty grows from 0 to 1. Unset, a fifth of that limit.
    overlong_buffer_tokens: Positive | None = None

    def penalty_tokens(self, max_tokens: int) -> int:
        """Tokens of the overlong penalty's buffer; 0: no penalty."""
        default = max(1, max_tokens // DEFAULT_BUFFER_SHARE)
        return (self.overlong_buffer_tokens or default) if self.truncated == "penalized" else 0


class SftTasksConfig(RowsConfig, frozen=True, kw_only=True):
    dataset: Text  # JSONL: {"prompt", "completion"}, {"segments": [[text, trained 0|1], ...]} or {"messages": [...]}.


def task_problems(tasks: TasksConfig) -> Iterator[Problem]:
    """Keys of `tasks` that contradict each other, or have no effect."""
    if tasks.environment is None and tasks.reward is None:
        yield Problem("tasks", "an environment or a reward", "neither", "docs/environments.md, docs/rewards.md")
    if tasks.environment is not None:
        for key in ("reward", "prompt", "chat_template_kwargs"):
            if getattr(tasks, key):
                yield Problem(f"tasks.{key}", "nothing beside tasks.environment", "both", "an environment has its own")
    if tasks.environment is None and tasks.agents:
        yield Problem("tasks.agents", "an agent as tasks.environment with it", "a reward", "docs/agents.md")
    for name in tasks.agents:
        if not AGENT_NAME.fullmatch(name):
            yield Problem(f"tasks.agents.{name}", "a name of at most 64 of a-z, A-Z, 0-9, _, . and -", f"{name!r}")
    for key in ("reward", "prompt"):
        if getattr(tasks, key) == []:
            yield Problem(f"tasks.{key}", "at least one entry", "none")
    if isinstance(tasks.reward, list) and tasks.options:
        hint = "give each function its own: tasks.reward[].options"
        yield Problem("tasks.options", "nothing beside a list of rewards", f"{', '.join(tasks.options)}", hint)
    if isinstance(tasks.reward, list) and not any(map(_weighs, tasks.reward)):
        yield Problem("tasks.reward", "a weight that is not 0", "none: every reward would be 0")
    if tasks.overlong_buffer_tokens is not None and tasks.truncated != "penalized":
        yield Problem("tasks.overlong_buffer_tokens", "tasks.truncated: penalized with it", f"{tasks.truncated}")


def _weighs(reward: RewardConfig) -> bool:
    return any(reward.weight.values()) if isinstance(reward.weight, dict) else reward.weight != 0
