"""Environment names to classes: a built-in name, or 'module:Class' of any importable module.

Imports neither torch nor vllm, so that config checks may use it.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import ConfigError
from rollout_fleet.environments.protocol import Environment, Limits

BUILT_IN = {
    "addition": "rollout_fleet.environments.builtin.addition:Addition",
    "frozen_lake": "rollout_fleet.environments.adapters.gymnasium_text:FrozenLake",
    "gsm8k": "rollout_fleet.environments.builtin.gsm8k:Gsm8k",
    "gymnasium": "rollout_fleet.environments.adapters.gymnasium_text:GymnasiumText",
    "math": "rollout_fleet.environments.builtin.math_problem:MathProblem",
    "number_guessing": "rollout_fleet.environments.builtin.number_guessing:NumberGuessing",
    "openenv": "rollout_fleet.environments.adapters.openenv:OpenEnv",
    "python_tool": "rollout_fleet.environments.builtin.python_tool:PythonTool",
    "verifiers": "rollout_fleet.agents.verifiers_agent:agent",
}
KEY = "tasks.environment"
EXPECTED = "a built-in environment or 'module:Class'"
AGENT_KEYWORDS = ("base_url", "api_key", "model", "seed")
AGENT = f"async def agent(problem, *, {', '.join(AGENT_KEYWORDS)})"
WRAPPER = """an environment gives the prompt of a dataset row and judges the policy's answer.
Around a function that only judges, it is this; save it beside {module} and name it here (docs/environments.md):

from {module} import {function}
from rollout_fleet.environments.protocol import StepResult

class Judged:
    def __init__(self, problem, *, seed):
        self.problem = problem  # a row of tasks.dataset

    async def reset(self):
        return self.problem["prompt"]  # the row's text for the policy

    async def step(self, action):
        return StepResult(reward=float({call}(action.text, self.problem)))  # with the arguments that it takes"""


def resolve(name: str, options: Mapping[str, Any] | None = None, file: str = "config") -> type[Environment]:
    """The class that `tasks.environment` names; `tasks.options`, unless None, are checked against its constructor.

    The working directory is searched as well, so that an environment may live beside the config's job. Raises
    ConfigError for a name or options that do not fit, with the nearest valid name.
    """
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        near = difflib.get_close_matches(name, BUILT_IN, 1, 0.0)
        hint = f"nearest built-in: {near[0]!r} (built in are {', '.join(BUILT_IN)})"
        raise ConfigError(file, KEY, EXPECTED, repr(name), hint)
    module_name, _, class_name = path.partition(":")
    module = _module(module_name, name, file)
    found = getattr(module, class_name, None)
    if found is None:
        reason = f"{name!r}: module {module_name!r} has no {class_name!r}"
        near = difflib.get_close_matches(class_name, [n for n in vars(module) if not n.startswith("_")], 1)
        raise ConfigError(file, KEY, EXPECTED, reason, f"did you mean {near[0]!r}?" if near else None)
    _check_shape(found, name, file)
    if options is not None:
        _check_options(found, options, file)
    return found


def check_libraries(found: object, name: str, file: str = "config") -> None:
    """Raise ConfigError when this interpreter lacks libraries (`NEEDS`) of the environment that `resolve` found."""
    needs: tuple[str, ...] = getattr(found, "NEEDS", ())
    lacks = [library for library in needs if importlib.util.find_spec(library) is None]
    if lacks:
        reason = f"{name!r}, which needs {', '.join(lacks)}"
        expected = "an environment whose libraries are installed"
        raise ConfigError(file, KEY, expected, reason, "pip install 'slipstream-rl[environments]'")


def _module(module_name: str, name: str, file: str) -> object:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        reason = f"{name!r}, which does not import: {type(error).__name__}: {error}"
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        hint = f"start where {module_name.replace('.', '/')}.py lies, or install it" if absent else None
        raise ConfigError(file, KEY, EXPECTED, reason, hint) from error


def is_agent(environment: object) -> bool:
    """Whether it is an agent's coroutine function and no environment class; see rollout_fleet/agents/driver.py."""
    return inspect.iscoroutinefunction(environment)


def takes_group_seed(environment: Any) -> bool:
    return "group_seed" in inspect.signature(environment).parameters


def _check_shape(found: object, name: str, file: str) -> None:
    limits, modules = getattr(found, "LIMITS", Limits()), getattr(found, "PRELOAD", ())
    if not isinstance(limits, Limits):
        raise ConfigError(file, KEY, "Limits(...) as LIMITS", f"{name!r} with {limits!r}"[:200])
    if not isinstance(modules, tuple | list) or not all(isinstance(module, str) for module in modules):
        raise ConfigError(file, KEY, "names of modules as PRELOAD", f"{name!r} with {modules!r}"[:200])
    if is_agent(found) and _takes(found, AGENT_KEYWORDS):
        return
    if not inspect.isclass(found):
        reason = f"{name!r}, which is a {type(found).__name__}"
        module, _, function = name.partition(":")
        call = f"await {function}" if is_agent(found) else function
        wrapper = WRAPPER.format(module=module, function=function, call=call) if callable(found) else None
        raise ConfigError(file, KEY, f"an environment class, or an agent ({AGENT})", reason, wrapper)
    for method in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(found, method, None)):
            raise ConfigError(file, KEY, f"a class with 'async def {method}'", f"{name!r} without it")


def _takes(function: Any, keywords: Sequence[str]) -> bool:
    try:
        inspect.signature(function).bind_partial({}, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _check_options(found: Any, options: Mapping[str, Any], file: str) -> None:
    """Bind the options to the constructor without calling it."""
    signature = inspect.signature(found)
    given = [*(AGENT_KEYWORDS if is_agent(found) else ("seed",))]
    given += ["group_seed"] if "group_seed" in signature.parameters else []
    known = [p for p in signature.parameters if p not in ("problem", *given)]
    try:
        signature.bind({}, **dict.fromkeys(given), **options)
    except TypeError as error:
        unknown = next((o for o in options if o not in known), None)
        lacks = [p for p in known if p not in options and signature.parameters[p].default is inspect.Parameter.empty]
        hint = f"give the option {lacks[0]!r}" if lacks else "see its constructor"
        if unknown is not None:
            near = difflib.get_close_matches(unknown, known, 1, 0.0)
            hint = f"did you mean {near[0]!r}?" if near else f"{found.__name__} takes no options"
        expected = f"options of {found.__name__} ({', '.join(known) or 'none'})"
        raise ConfigError(file, "tasks.options", expected, f"{dict(options)}: {error}", hint) from error
