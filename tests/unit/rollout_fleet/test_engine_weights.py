"""EngineWeights tells those who time the engine's steps when a flip is under way."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rollout_fleet.weights.engine_weights import EngineWeights, Flip
from rollout_fleet.weights.weight_proof import Proof


class Core:
    """Notes how many halves of flips there are while the engine flips."""

    def __init__(self, weights: EngineWeights, fails: bool) -> None:
        self.weights, self.fails, self.seen, self.version = weights, fails, list[int](), -1

    async def call_utility_async(self, method: str, incarnation: int, version: int, recompute: bool) -> float:
        self.seen.append(self.weights.half_flips)
        self.version = version
        if self.fails:
            raise RuntimeError("no")
        return 0.25

    async def pause_scheduler_async(self, mode: str, **_: Any) -> None:
        if mode == "keep":
            self.seen.append(self.weights.half_flips)

    async def resume_scheduler_async(self) -> None:
        self.seen.append(self.weights.half_flips)

    async def prove(self, method: str, kwargs: dict[str, Any]) -> list[bytes]:
        assert method == "slipstream_proof"
        return [msgspec.msgpack.encode(Proof(0, self.version, "sum"))]


@pytest.mark.parametrize(("batches_in_flight", "calls"), [(False, 1), (True, 3)])
@pytest.mark.parametrize("fails", [False, True])
async def test_they_are_odd_from_the_pause_to_the_resumption_and_even_after(
    batches_in_flight: bool, calls: int, fails: bool
) -> None:
    weights = EngineWeights(recompute=False)
    core = Core(weights, fails)
    scheduler = SimpleNamespace(async_scheduling=batches_in_flight)
    config = SimpleNamespace(scheduler_config=scheduler, max_concurrent_batches=1)
    llm = SimpleNamespace(engine_core=core, vllm_config=config, collective_rpc=core.prove)
    await weights.attach(llm, usable=True)
    for flips in (1, 2):
        core.seen.clear()
        if fails:
            with pytest.raises(RuntimeError):
                await weights.flip(0, flips, "sum")
        else:
            assert isinstance(await weights.flip(0, flips, "sum"), Flip)
        assert set(core.seen) == {2 * flips - 1} and len(core.seen) == (min(calls, 2) if fails else calls)
        assert weights.half_flips == 2 * flips
