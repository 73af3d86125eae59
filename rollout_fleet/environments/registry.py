"""Environment names to classes: a built-in name, or 'module:Class' of any importable module.

Imports neither torch nor vllm, so that config checks may use it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.import_path import load

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
    return load(name, built_in=built_in, file=file, key=key, expected=expected)
