"""An OpenEnv server, as people write them; runs under an interpreter that has openenv-core: FILE PORT."""

import sys
from typing import Any


def app() -> Any:
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        guess: int

    class Hint(Observation):
        hint: str = ""

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.number, self.played = 0, State(episode_id="game", step_count=0)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            self.number = (seed or 0) % 10
            return Hint(done=False, reward=None, hint="guess 0-9")

        def step(self, action: Any, **_: Any) -> Any:
            if action.guess == 13:
                raise RuntimeError("unlucky")
            if action.guess == self.number:
                return Hint(done=True, reward=1.0, hint="right")
            return Hint(done=False, reward=0.0, hint="higher" if action.guess < self.number else "lower")

        @property
        def state(self) -> Any:
            return self.played

    Hint.__annotations__, Guess.__annotations__  # noqa: B018
    return create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
