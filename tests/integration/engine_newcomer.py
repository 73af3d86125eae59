"""A node without an engine that joins beside a real one, for tests."""

import asyncio
from typing import Any

from common.weights import messages, packing
from common.weights.receiver import Receiver
from rollout_fleet.weights.engine_weights import Flip, StagingFailed
from tests.integration.engine_rig import logprobs


class Buffer:
    """EngineWeights without an engine: a newcomer that notes where its weights came from."""

    def __init__(self, model: Any) -> None:
        self.model, self.receiver, self.sources = model, Receiver(), list[str]()

    async def tell(self, message: bytes, node_id: str) -> bytes:
        told = messages.decode_from_learner(message)
        if isinstance(told, messages.Epoch):
            self.sources.append(told.source.address if told.source is not None else "")
        answer = self.receiver.obey(told, node_id)
        return b"" if answer is None else messages.encode(answer)

    async def stage(self, publish: bytes) -> float:
        await self.tell(publish, "")
        while (status := self.receiver.status).state == "receiving":
            await asyncio.sleep(0.002)
        if status.state != "staged":
            raise StagingFailed(status.error)
        return status.receive_s

    async def flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        flat = self.receiver.take(incarnation, version)
        return Flip(0.0, packing.checksum(flat))

    async def canary(self, tokens: list[int]) -> list[float]:
        return logprobs(self.model, tokens)

    async def exclude(self, reason: str) -> None: ...
