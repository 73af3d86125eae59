"""Gymnasium environments as text games: discrete actions by name or number, what `render` draws as observations.

Any environment with a discrete action space works (tasks.options: {id: Taxi-v4, actions: ...}); `frozen_lake` is built
in, with a map of its own for every problem.
"""

import re
from contextlib import closing
from typing import Any

from rollout_fleet.environments.protocol import Action, Chat, StepResult

_MARKED = re.compile(r"\x1b\[\d+(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_WORD = re.compile(r"[A-Za-z_]+|\d+")


class GymnasiumText:
    """Multi turn. Problem: {"seed": 7, "arguments": {...}}, both optional.

    `seed` goes to `reset`, `arguments` to `gymnasium.make`. Without a seed, all samples of a group use the group's, so
    they play the same game.

    Options:
        id: of gymnasium's registry; 'module:Name-v0' imports the module first.
        actions: names of the actions 0, 1, 2, ..., separated by spaces; '' for numbers.
        prompt: template of the first message, with {rules} and {observation}.
    """

    NEEDS = ("gymnasium",)

    def __init__(
        self,
        problem: dict[str, Any],
        *,
        seed: int,
        group_seed: int,
        id: str = "FrozenLake-v1",
        actions: str = "",
        prompt: str = "{rules}{observation}",
    ) -> None:
        import gymnasium

        arguments = {**self.arguments(problem), **problem.get("arguments", {})}
        with closing(gymnasium.spec(id).make(**arguments)) as probe:
            modes = probe.metadata.get("render_modes", [])
        mode = "ansi" if "ansi" in modes else None
        self._game = gymnasium.make(id, render_mode=mode, **arguments)
        if not isinstance(self._game.action_space, gymnasium.spaces.Discrete):
            raise ValueError(f"{id} has actions {self._game.action_space}, expected a discrete space")
        self._first = int(self._game.action_space.start)
        count = int(self._game.action_space.n)
        self._names = actions.lower().split() or [str(self._first + i) for i in range(count)]
        if len(self._names) != count:
            raise ValueError(f"{id} has {count} actions, the option 'actions' names {len(self._names)}: {actions!r}")
        self._seed = int(problem.get("seed", group_seed))
        self._rules = f"Answer with one of: {', '.join(self._names)}.\n"
        self._prompt = prompt
        self._drawn = mode is not None
        self._malformed = 0.0

    def arguments(self, problem: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of gymnasium.make that follow from the problem."""
        return {}

    async def reset(self) -> Chat:
        observation, _ = self._game.reset(seed=self._seed)
        said = self._prompt.replace("{rules}", self._rules).replace("{observation}", self._text(observation))
        return Chat((("user", said),))

    async def step(self, action: Action) -> StepResult:
        """Play the last action named in the turn; if none is named, answer with the rules."""
        if not action.ended:
            return StepResult(metrics={"malformed": self._malformed})
        named = [word for word in _WORD.findall(action.text.lower()) if word in self._names]
        if not named:
            self._malformed += 1
            return StepResult(Chat((("user", self._rules),)), done=False)
        observation, reward, terminated, truncated, _ = self._game.step(self._first + self._names.index(named[-1]))
        shown = Chat((("user", self._text(observation)),))
        return StepResult(shown, float(reward), bool(terminated or truncated), {"malformed": self._malformed})

    async def close(self) -> None:
        self._game.close()

    def _text(self, observation: Any) -> str:
        """The drawn board with highlighted cells in brackets; the observation itself where nothing is drawn."""
        drawn = self._game.render() if self._drawn else None
        if not isinstance(drawn, str):
            return str(observation)
        return _ESCAPE.sub("", _MARKED.sub(r"[\1]", drawn)).strip("\n")


class FrozenLake(GymnasiumText):
    """Walk from S to G over F, not into H; [ ] is where you are. Problem: {"size": 4, "map_seed": 7}, both optional."""

    def __init__(
        self, problem: dict[str, Any], *, seed: int, group_seed: int, size: int = 4, slippery: bool = False
    ) -> None:
        self._size = size
        self._slippery = slippery
        self._group_seed = group_seed
        super().__init__(problem, seed=seed, group_seed=group_seed, id="FrozenLake-v1", actions="left down right up")

    def arguments(self, problem: dict[str, Any]) -> dict[str, Any]:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        size = int(problem.get("size", self._size))
        seed = int(problem.get("map_seed", self._group_seed))
        return {"desc": generate_random_map(size=size, seed=seed), "is_slippery": self._slippery}
