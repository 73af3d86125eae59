"""Environment names to classes: a built-in name, or 'module:Class' of any importable module.

Imports neither torch nor vllm, so that config checks may use it.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError

if TYPE_CHECKING:
    from common.config.tasks import TasksConfig

BUILT_IN = {
    "addition": "rollout_fleet.environments.builtin.addition:Addition",
    "frozen_lake": "rollout_fleet.environments.builtin.gymnasium_text:FrozenLake",
    "gsm8k": "rollout_fleet.environments.builtin.math_problems:Gsm8k",
    "gymnasium": "rollout_fleet.environments.builtin.gymnasium_text:GymnasiumText",
    "math": "rollout_fleet.environments.builtin.math_problems:MathProblem",
    "mcp": "rollout_fleet.environments.builtin.mcp_tools:McpTools",
    "number_guessing": "rollout_fleet.environments.builtin.number_guessing:NumberGuessing",
    "openenv": "rollout_fleet.environments.builtin.openenv:OpenEnv",
    "python_tool": "rollout_fleet.environments.builtin.python_tool:PythonTool",
    "reasoning_gym": "rollout_fleet.environments.builtin.reasoning_gym_tasks:ReasoningGym",
    "verifiers": "rollout_fleet.agents.verifiers_agent:agent",
}
REWARD_FUNCTION = "rollout_fleet.environments.builtin.reward_function:RewardFunction"
KEY = "tasks.environment"
EXPECTED = "a built-in environment or 'module:Class'"


def played(tasks: "TasksConfig") -> tuple[str, dict[str, Any]]:
    """(name, keyword arguments) of the environment: tasks.environment, or the one around the functions of tasks.reward.

    The arguments are JSON.
    """
    if tasks.environment is not None:
        return tasks.environment, dict(tasks.options)
    import msgspec  # an environment's interpreter may lack it

    names = ("reward", "options", "prompt", "chat_template_kwargs")
    return REWARD_FUNCTION, {name: msgspec.to_builtins(getattr(tasks, name)) for name in names}


def resolve(
    name: str, file: str = "config", key: str = KEY, built_in: Mapping[str, str] = BUILT_IN, expected: str = EXPECTED
) -> Any:
    """The class, or the agent's function, that `tasks.environment` names; description.py checks it.

    The working directory is searched as well, so that an environment may live beside the config's job. Raises
    ConfigError for an unknown name, with the nearest valid one. `key`, `built_in`, `expected`: for names of another
    key, such as `tasks.reward`.
    """
    path = built_in.get(name, name)
    if ":" not in path:
        near = difflib.get_close_matches(name, built_in, 1, 0.0)
        hint = f"nearest built-in: {near[0]!r} (built in are {', '.join(built_in)})"
        raise ConfigError(file, key, expected, repr(name), hint)
    module_name, _, class_name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        reason = f"{name!r}, which does not import: {type(error).__name__}: {error}"
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        hint = f"start where {module_name.replace('.', '/')}.py lies, or install it" if absent else None
        raise ConfigError(file, key, expected, reason, hint) from error
    found = getattr(module, class_name, None)
    if found is None:
        reason = f"{name!r}: module {module_name!r} has no {class_name!r}"
        near = difflib.get_close_matches(class_name, [n for n in vars(module) if not n.startswith("_")], 1)
        raise ConfigError(file, key, expected, reason, f"did you mean {near[0]!r}?" if near else None)
    return found


def check_arguments(
    found: Callable[..., Any],
    options: Mapping[str, Any],
    takes: Sequence[str],
    given: Sequence[str],
    *,
    file: str,
    key: str,
) -> None:
    """Raise ConfigError for `key`, with the nearest name, unless `found` takes all of these arguments.

    It is not called. `takes` are its positional arguments, `given` the keywords that are no options.
    """
    signature = inspect.signature(found)
    known = [name for name in [*signature.parameters][len(takes) :] if name not in given]
    try:
        signature.bind(*takes, **dict.fromkeys(given), **options)
    except TypeError as error:
        name = getattr(found, "__name__", type(found).__name__)
        unknown = next((o for o in options if o not in known), None)
        lacks = [p for p in known if p not in options and signature.parameters[p].default is inspect.Parameter.empty]
        hint = f"give the option {lacks[0]!r}" if lacks else f"it is called with {', '.join((*takes, *given))}"
        if unknown is not None:
            near = difflib.get_close_matches(unknown, known, 1, 0.0)
            hint = f"did you mean {near[0]!r}?" if near else f"{name} takes no options"
        expected = f"options of {name} ({', '.join(known) or 'none'})"
        raise ConfigError(file, key, expected, f"{dict(options)}: {error}", hint) from error
