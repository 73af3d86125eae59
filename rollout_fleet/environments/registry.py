"""Environment names to classes: a built-in name, or 'module:Class' of any importable module.

Imports neither torch nor vllm, so that config checks may use it.
"""

import difflib
import importlib
import os
import sys
from typing import Any

from common.errors import ConfigError

BUILT_IN = {
    "addition": "rollout_fleet.environments.builtin.addition:Addition",
    "frozen_lake": "rollout_fleet.environments.builtin.gymnasium_text:FrozenLake",
    "gsm8k": "rollout_fleet.environments.builtin.math_problems:Gsm8k",
    "gymnasium": "rollout_fleet.environments.builtin.gymnasium_text:GymnasiumText",
    "math": "rollout_fleet.environments.builtin.math_problems:MathProblem",
    "number_guessing": "rollout_fleet.environments.builtin.number_guessing:NumberGuessing",
    "openenv": "rollout_fleet.environments.builtin.openenv:OpenEnv",
    "python_tool": "rollout_fleet.environments.builtin.python_tool:PythonTool",
    "verifiers": "rollout_fleet.agents.verifiers_agent:agent",
}
KEY = "tasks.environment"
EXPECTED = "a built-in environment or 'module:Class'"


def resolve(name: str, file: str = "config") -> Any:
    """The class, or the agent's function, that `tasks.environment` names; description.py checks it.

    The working directory is searched as well, so that an environment may live beside the config's job. Raises
    ConfigError for an unknown name, with the nearest valid one.
    """
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        near = difflib.get_close_matches(name, BUILT_IN, 1, 0.0)
        hint = f"nearest built-in: {near[0]!r} (built in are {', '.join(BUILT_IN)})"
        raise ConfigError(file, KEY, EXPECTED, repr(name), hint)
    module_name, _, class_name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        reason = f"{name!r}, which does not import: {type(error).__name__}: {error}"
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        hint = f"start where {module_name.replace('.', '/')}.py lies, or install it" if absent else None
        raise ConfigError(file, KEY, EXPECTED, reason, hint) from error
    found = getattr(module, class_name, None)
    if found is None:
        reason = f"{name!r}: module {module_name!r} has no {class_name!r}"
        near = difflib.get_close_matches(class_name, [n for n in vars(module) if not n.startswith("_")], 1)
        raise ConfigError(file, KEY, EXPECTED, reason, f"did you mean {near[0]!r}?" if near else None)
    return found
