"""The quickstart's addition, whose episodes begin when a file is there: jobs start at once and then run in turns."""

import asyncio
from pathlib import Path
from typing import Any

from rollout_fleet.environments.builtin.addition import Addition

LOOK_S = 0.05


class Gated(Addition):
    """Option `gate`: the file RUN.gate. Before there is a RUN, a launch that tries the first row does not wait."""

    def __init__(self, problem: dict[str, Any], *, seed: int, gate: str) -> None:
        super().__init__(problem, seed=seed)
        self._gate = Path(gate)

    async def reset(self) -> str:
        while self._gate.with_suffix("").exists() and not self._gate.exists():
            await asyncio.sleep(LOOK_S)
        return await super().reset()
