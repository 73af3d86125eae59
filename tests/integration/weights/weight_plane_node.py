"""A node without an engine: the real control protocol and collectives, a plain buffer as the weights.

Run as a process by plane_rig.py.
"""

import asyncio
import json
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from common.security.credentials import load_credential
from common.weights.receive.contract import CanaryRead, Flip, Watch
from common.weights.receive.receiver import Receiver, StagingStatus
from common.weights.receive.weight_client import WeightClient, until_staged
from common.weights.transports.groups import RelayedStore, receivable
from common.weights.wire import flat_buffer, messages
from common.weights.wire.failures import FailureKind, ProofFailed
from common.weights.wire.messages import Epoch, Publish
from tests.contract.transport_receiver import FaultyGroup, count_pieces

_rig: Connection | None = None


def say(event: str, **what: object) -> None:
    if _rig is not None:
        _rig.send_bytes(json.dumps({"event": event, "time": time.time(), **what}).encode())


class PlaneGroup(FaultyGroup):
    """It tells of its fault. Two more are possible: no collective forms, or the bucket is changed."""

    def __init__(self, epoch: Epoch, store: RelayedStore) -> None:
        if self.fault == "no collective":
            raise RuntimeError("no route to the others")
        super().__init__(epoch, store)

    @classmethod
    def strike(cls, data: Any) -> None:
        say("fault", kind=cls.fault)
        super().strike(data)
        if cls.fault == "corrupt":
            data[7] ^= 1


class BufferTarget:
    """EngineWeights whose engine is a buffer."""

    def __init__(
        self, break_load: bool = False, spoil_served: bool = False, loads: bool = True, decoding_differs: float = 0.125
    ) -> None:
        """Without `loads` a flip takes no time: nothing is copied, and nothing is proven beyond what was received."""
        self.decoding_differs = decoding_differs
        self.receiver = Receiver(PlaneGroup, device=torch.device("cpu"))
        self.break_load, self.spoil_served, self.loads = break_load, spoil_served, loads
        self.weights: torch.Tensor | None = None

    async def tell(self, message: bytes, node_id: str) -> bytes:
        told = messages.decode_from_learner(message)
        if isinstance(told, Epoch):
            say("epoch", epoch=told.epoch, size=told.world_size, transport=told.transport)
        elif isinstance(told, Publish):
            say("publish", version=told.version, encoding=told.encoding, sources=told.sources)
        elif isinstance(told, messages.Reroute | messages.Serve):
            say(type(told).__name__.lower(), to=getattr(told, "source", ""))
        answer = self.receiver.handle(told, node_id)
        if answer is None:
            return b""
        say("listens", address=answer.address)
        return messages.encode(answer)

    async def stage(self, publish: bytes, watch: Watch) -> float:
        async def status() -> StagingStatus:
            now = self.receiver.status
            if now.state == "failed":
                assert now.failure is not None
                say("failed", version=now.version, kind=now.failure.kind, reason=now.failure.text)
            return now

        await self.tell(publish, "")
        return await until_staged(status, watch)

    async def flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        flat = self.receiver.take(incarnation, version)
        self.weights = flat.clone() if self.loads else flat
        if self.spoil_served:
            flat[9] ^= 1
        self.receiver.give_back(flat)
        if not self.loads:
            return Flip(0.0, expected_checksum)
        if self.break_load:
            self.weights[0] ^= 1
        assert self.receiver.layout is not None
        found = flat_buffer.version_checksum(self.weights, self.receiver.layout)
        if found != expected_checksum:
            raise ProofFailed(FailureKind.PROOF, f"found {found}, published {expected_checksum}")
        return Flip(0.0, found)

    async def canary(self, tokens: list[int]) -> CanaryRead:
        return CanaryRead([-0.5] * (len(tokens) - 1), [0.125, self.decoding_differs])

    async def exclude(self, reason: str) -> None:
        say("excluded", reason=reason)


async def main(node_id: str, credentials: str = "", transport: str = "gloo", **faults: Any) -> None:
    FaultyGroup.fault, FaultyGroup.at = faults.pop("fault", ""), faults.pop("at", -1)
    count_pieces(PlaneGroup)
    target = BufferTarget(**faults)
    credential = load_credential(credentials, "node", node_id) if credentials else None
    client = WeightClient(node_id, target, credential=credential, transports=receivable(transport))
    rig = _rig
    assert rig is not None
    asyncio.get_running_loop().add_reader(rig.fileno(), lambda: client.follow(*json.loads(rig.recv_bytes())))
    say("up")
    state = client.state
    while True:
        now = await client.wait_change(1)
        if (now.version, now.incarnation) != (state.version, state.incarnation):
            assert target.weights is not None
            value = next(iter(flat_buffer.view(target.weights, target.receiver.layout)))[1].view(-1)[0].item()  # type: ignore[arg-type]
            say("active", version=now.version, incarnation=now.incarnation, value=value)
        state = now


def run(node_id: str, options: dict[str, Any], rig: Connection) -> None:
    """The process: addresses to follow come in, JSON of every event goes out; `options` are those of `main`."""
    global _rig
    _rig = rig
    torch.set_num_threads(1)
    asyncio.run(main(node_id, **options))
