"""A node without an engine that joins beside a real one, for tests."""

import asyncio
from typing import Any

from common.errors import SlipstreamError
from common.weights import messages, packing
from common.weights.receiver import Receiver
from rollout_fleet.weights.staging_poll import StagingFailed
from rollout_fleet.weights.weight_client import Flip
from tests.integration.engine_rig import logprobs


class Buffer:
    """WeightTarget without an engine: a newcomer that notes where its weights came from."""

    def __init__(self, model: Any) -> None:
        self.model, self.receiver, self.sources = model, Receiver(), list[str]()

    async def set_layout(self, incarnation: int, welcome: bytes) -> None:
        self.receiver.set_layout(messages.decode_from_learner(welcome).layout)

    async def set_epoch(self, epoch: bytes) -> None:
        told = messages.decode_from_learner(epoch)
        self.sources.append(told.source.address if told.source is not None else "")
        self.receiver.set_epoch(told)

    async def serve(self, serve: bytes, node_id: str) -> bytes:
        raise SlipstreamError("nothing to serve")

    async def stage(self, publish: bytes) -> float:
        self.receiver.start(messages.decode_from_learner(publish))
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
