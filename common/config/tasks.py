"""The section `tasks` of the config: the rows of the dataset, and the environment or the rewards that judge them.

A job has one source of tasks, whose keys are in `tasks` itself, or several in `tasks.sources`; docs/mixtures.md.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.config.types import (
    AddressSpace,
    AdvantageName,
    Fraction,
    NonNegative,
    Number,
    Positive,
    Scalar,
    Seconds,
    Strict,
    Text,
)
from common.errors import Problem, UsageError
from common.json_lines import dataset_rows

AGENT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Role = Literal["system", "user", "assistant", "tool"]
SOURCE_NAME = re.compile(r"[A-Za-z][\w-]{0,63}")  # the wire has room for 256
# arguments of a tokenizer's apply_chat_template, which are no variables of the template; chat_template chooses one
TAKEN = {
    "add_generation_prompt", "continue_final_message", "conversation", "documents", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools",
    "truncation",
}  # fmt: skip
PENALTY = "overlong_penalty"  # metric of tasks.truncated: penalized
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

    dataset: Text  # As tasks.dataset.
    shuffle: bool = True  # Gives every epoch its own order. False keeps the order of the file.

    @property
    def datasets(self) -> dict[str, str]:
        """The dataset by the key that names it, one for each source."""
        return {"tasks.dataset": self.dataset}


class EpisodesConfig(RowsConfig, frozen=True, kw_only=True):
    """The keys that are a source's own."""

    # Built-in name or 'module:Class'; docs/environments.md lists both. A source has this key or `reward`.
    environment: Text | None = None
    # Function (completion, row) that returns the reward, as 'module:function' or a built-in name, or several functions
    # with weights; docs/rewards.md.
    reward: Text | list[RewardConfig] | None = None
    # Template with {column}, or messages with such templates, for `reward`. Unset, the dataset's column `prompt`.
    prompt: Text | list[MessageConfig] | None = None
    # Variables of the chat template, for `reward`; enable_thinking of Qwen3 is one.
    chat_template_kwargs: dict[str, Scalar] = {}
    options: dict[str, Scalar] = {}  # Keyword arguments of the environment, or of the reward function.
    # Sub-agents by name, which an agent asks as the model policy/NAME. Unset, it may use any name, and all train.
    agents: dict[str, AgentConfig] = {}
    # Column with the success rate of a row, which some datasets have, for min_success and max_success.
    success_column: Text = "pass_rate"
    min_success: Fraction | None = None  # Rows with a lower success rate are left out.
    max_success: Fraction | None = None  # Rows with a higher success rate are left out.
    success: Number = 1.0  # A sample with this reward or more is a success, in metrics and for `tasks.curriculum`.

    @property
    def filters(self) -> bool:
        return self.min_success is not None or self.max_success is not None


class SourceConfig(EpisodesConfig, frozen=True, kw_only=True):
    """One of `tasks.sources`. An unset key has its value in `tasks`, `rollout` or `learner.loss`."""

    limits: LimitsConfig = LimitsConfig()  # As tasks.limits; each limit by itself.
    truncated: Literal["counted", "masked", "penalized"] | None = None  # As tasks.truncated.
    overlong_buffer_tokens: Positive | None = None  # As tasks.overlong_buffer_tokens.
    # Share of the source, relative to the other weights; 0 pauses it. `slipstream set` changes it while the job runs.
    weight: NonNegative = 1.0
    max_tokens: Positive | None = None  # As rollout.max_tokens, which it must not exceed.
    max_turns: Positive | None = None  # As rollout.max_turns, which it must not exceed.
    advantage: AdvantageName | None = None  # As learner.loss.advantage.
    advantage_options: dict[str, Number] = {}  # As learner.loss.advantage_options, for the source's own estimator.
    kl_coefficient: NonNegative | None = None  # As learner.loss.kl_coefficient.


class CurriculumConfig(Strict, frozen=True, kw_only=True):
    """The rule by which weights follow success; docs/mixtures.md."""

    # With success a weight grows as the success rate of its source comes near `target`.
    rule: Literal["none", "success"] = "none"
    target: Fraction = 0.5  # Success rate at which a source counts most.
    every: Positive = 10  # Steps between two changes. Each uses the samples since the one before.
    floor: Annotated[float, Meta(gt=0, le=1)] = 0.1  # Least factor, so that no source starves.


class TasksConfig(EpisodesConfig, frozen=True, kw_only=True):
    # JSONL or parquet file with one problem per row; * in its name stands for several files. Or a file of the hub:
    # hf://datasets/OWNER/NAME[@REVISION]/FILE; docs/models.md. A job has this key or `sources`.
    dataset: str = ""
    limits: LimitsConfig = LimitsConfig()
    max_attempts: Positive = 3  # Failed attempts after which a task is given up; docs/delivery.md.
    # Use of an answer that the token limit cut: as it was judged, not in the loss, or with DAPO's penalty. The penalty
    # begins before the limit; docs/rewards.md.
    truncated: Literal["counted", "masked", "penalized"] = "counted"
    # Sampled tokens before rollout.max_tokens over which the penalty grows from 0 to 1. Unset, a fifth of that limit.
    overlong_buffer_tokens: Positive | None = None
    # Several sources of tasks by name, instead of one in `tasks` itself; docs/mixtures.md.
    sources: dict[str, SourceConfig] = {}
    curriculum: CurriculumConfig = CurriculumConfig()

    def penalty_tokens(self, max_tokens: int) -> int:
        """Tokens of the overlong penalty's buffer; 0: no penalty."""
        default = max(1, max_tokens // DEFAULT_BUFFER_SHARE)
        return (self.overlong_buffer_tokens or default) if self.truncated == "penalized" else 0

    @property
    def datasets(self) -> dict[str, str]:
        return {f"{at}.dataset": part.dataset for at, part in self.parts.items()}

    @property
    def parts(self) -> dict[str, "TasksConfig"]:
        """The section of each source, as of a job without other sources, by the key path at which it stands."""
        return {f"tasks.sources.{name}": self.only(name) for name in self.sources} or {"tasks": self}

    def only(self, name: str) -> "TasksConfig":
        """The section of a job with this source alone."""
        own = self.sources[name]
        given = {key: getattr(own, key) for key in EpisodesConfig.__struct_fields__}
        for key in ("truncated", "overlong_buffer_tokens"):
            given[key] = getattr(self if getattr(own, key) is None else own, key)
        if given["truncated"] != "penalized":
            given["overlong_buffer_tokens"] = own.overlong_buffer_tokens
        limits = {key: getattr(own.limits, key) for key in LimitsConfig.__struct_fields__}
        own_limits = {key: value for key, value in limits.items() if value is not None}
        merged = msgspec.structs.replace(self.limits, **own_limits)
        return TasksConfig(limits=merged, max_attempts=self.max_attempts, **given)


class SftTasksConfig(RowsConfig, frozen=True, kw_only=True):
    dataset: Text  # JSONL: {"prompt", "completion"}, {"segments": [[text, trained 0|1], ...]} or {"messages": [...]}.


def task_problems(tasks: TasksConfig) -> Iterator[Problem]:
    """Keys of `tasks` that contradict each other, or have no effect."""
    if tasks.sources:
        yield from _mixture_problems(tasks)
    elif tasks.curriculum.rule != "none":
        yield Problem("tasks.curriculum.rule", "none without tasks.sources", tasks.curriculum.rule)
    for at, part in tasks.parts.items():
        yield from _source_problems(at, part)


def _mixture_problems(tasks: TasksConfig) -> Iterator[Problem]:
    alone = TasksConfig()
    for key in EpisodesConfig.__struct_fields__:
        if getattr(tasks, key) != getattr(alone, key):
            hint = f"each source has its own: tasks.sources.NAME.{key}"
            yield Problem(f"tasks.{key}", "nothing beside tasks.sources", "both", hint)
    by_case = dict[str, str]()
    for name in tasks.sources:
        if not SOURCE_NAME.fullmatch(name):
            yield Problem("tasks.sources", "names of at most 64 letters, digits, - and _", repr(name))
        if (other := by_case.setdefault(name.casefold(), name)) != name:
            yield Problem(f"tasks.sources.{name}", "a name that differs by more than its case", f"{other} and {name}")
    if not any(source.weight for source in tasks.sources.values()):
        first = next(iter(tasks.sources))
        yield Problem(f"tasks.sources.{first}.weight", "a weight above 0 of at least one source", "0 of all")


def _source_problems(at: str, tasks: TasksConfig) -> Iterator[Problem]:
    """Problems of one source, whose keys stand at the key path `at`."""
    if not tasks.dataset:
        yield Problem(f"{at}.dataset", "text", "nothing", "this key is required")
    if tasks.environment is None and tasks.reward is None:
        yield Problem(at, "an environment or a reward", "neither", "docs/environments.md, docs/rewards.md")
    if tasks.environment is not None:
        for key in ("reward", "prompt", "chat_template_kwargs"):
            if getattr(tasks, key):
                yield Problem(f"{at}.{key}", f"nothing beside {at}.environment", "both", "an environment has its own")
    if tasks.environment is None and tasks.agents:
        yield Problem(f"{at}.agents", "an agent as tasks.environment with it", "a reward", "docs/agents.md")
    for name in tasks.agents:
        if not AGENT_NAME.fullmatch(name):
            yield Problem(f"{at}.agents.{name}", "a name of at most 64 of a-z, A-Z, 0-9, _, . and -", f"{name!r}")
    for name in sorted(TAKEN & tasks.chat_template_kwargs.keys()):
        hint = "it is an argument of the tokenizer, which an episode sets"
        yield Problem(f"{at}.chat_template_kwargs", "variables of the chat template", repr(name), hint)
    for key in ("reward", "prompt"):
        if getattr(tasks, key) == []:
            yield Problem(f"{at}.{key}", "at least one entry", "none")
    if isinstance(tasks.reward, list) and tasks.options:
        hint = f"give each function its own: {at}.reward[].options"
        yield Problem(f"{at}.options", "nothing beside a list of rewards", f"{', '.join(tasks.options)}", hint)
    if isinstance(tasks.reward, list) and not any(map(_weighs, tasks.reward)):
        yield Problem(f"{at}.reward", "a weight that is not 0", "none: every reward would be 0")
    if tasks.overlong_buffer_tokens is not None and tasks.truncated != "penalized":
        yield Problem(f"{at}.overlong_buffer_tokens", f"{at}.truncated: penalized with it", f"{tasks.truncated}")
    low, high = tasks.min_success, tasks.max_success
    if low is not None and high is not None and low > high:
        yield Problem(f"{at}.min_success", f"at most {at}.max_success ({high:g})", f"{low:g}")


def _weighs(reward: RewardConfig) -> bool:
    return any(reward.weight.values()) if isinstance(reward.weight, dict) else reward.weight != 0


def kept_rows(source: EpisodesConfig, key: str) -> list[bytes]:
    """The rows of a dataset whose success rate is within the bounds, if there are any.

    Raises as `dataset_rows`, also for a row without a success rate, and when no row is left.
    """
    low, high = source.min_success, source.max_success
    found = dataset_rows(Path(source.dataset), key)
    if low is None and high is None:
        return [row for _, row in found]
    kept: list[bytes] = []
    for where, row in found:
        rate = msgspec.json.decode(row).get(source.success_column)
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= 1:
            raise UsageError(f"{key}: {where} has {rate!r} in the column '{source.success_column}', expected 0 to 1")
        if (0.0 if low is None else low) <= rate <= (1.0 if high is None else high):
            kept.append(row)
    if not kept:
        raise UsageError(f"{key}: {source.dataset} has no row whose '{source.success_column}' is within the bounds")
    return kept
