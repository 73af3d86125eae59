"""EngineWeights tells those who time the engine's steps when a flip is under way."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollout_fleet.weights.engine_weights import EngineWeights


class Core:
    """Notes how many halves of flips there are while the engine flips."""

    def __init__(self, weights: EngineWeights, fails: bool) -> None:
        self.weights, self.fails, self.seen = weights, fails, []

    async def call_utility_async(self, *_: Any) -> float:
        self.seen.append(self.weights.half_flips)
        if self.fails:
            raise RuntimeError("no")
        return 0.25

    async def pause_scheduler_async(self, **_: Any) -> None:
        self.seen.append(self.weights.half_flips)

    async def resume_scheduler_async(self) -> None:
        self.seen.append(self.weights.half_flips)


@pytest.mark.parametrize(("batches_in_flight", "calls"), [(False, 1), (True, 3)])
@pytest.mark.parametrize("fails", [False, True])
async def test_they_are_odd_from_the_pause_to_the_resumption_and_even_after(
    batches_in_flight: bool, calls: int, fails: bool
) -> None:
    weights = EngineWeights(recompute=False)
    core = Core(weights, fails)
    scheduler = SimpleNamespace(async_scheduling=batches_in_flight)
    config = SimpleNamespace(scheduler_config=scheduler, max_concurrent_batches=1)
    await weights.attach(SimpleNamespace(engine_core=core, vllm_config=config), usable=True)
    for flips in (1, 2):
        core.seen.clear()
        if fails:
            with pytest.raises(RuntimeError):
                await weights._flip(0, flips)
        else:
            await weights._flip(0, flips)
        assert set(core.seen) == {2 * flips - 1} and len(core.seen) == (min(calls, 2) if fails else calls)
        assert weights.half_flips == 2 * flips
