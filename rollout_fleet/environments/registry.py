"""Environment names to classes: a built-in name, or 'module:Class' of any importable module.

Imports neither torch nor vllm, so that config checks may use it.
"""

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


def played(tasks: "TasksConfig") -> tuple[str, dict[str, Any]]:
    """(name, keyword arguments) of the environment: tasks.environment, or the one around the functions of tasks.reward.

    The arguments are JSON.
    """
    if tasks.environment is not None:
        return tasks.environment, dict(tasks.options)
    import msgspec  # an environment's interpreter may lack it

    names = ("reward", "options", "prompt", "chat_template_kwargs")
    return REWARD_FUNCTION, {name: msgspec.to_builtins(getattr(tasks, name)) for name in names}


def resolve(name: str, file: str = "config") -> Any:
    """The class, or the agent's function, that a name stands for; description.py checks it. Raises as `load`."""
    return load(name, built_in=BUILT_IN, file=file, key=KEY, expected="a built-in environment or 'module:Class'")
