"""A node without an engine: the real control protocol and collectives, a plain buffer as the weights.

Run as a process by plane_rig.py; writes one JSON line per event. Faults are asked for by arguments.
"""

import argparse
import asyncio
import json
import os
import time
from multiprocessing.reduction import DupFd

import torch

from common.security.credentials import load_credential
from common.weights import messages, packing
from common.weights.messages import Epoch
from common.weights.receiver import Receiver
from common.weights.transports.registry import receivable
from rollout_fleet.weights.engine_weights import Flip, ProofFailed, StagingFailed
from rollout_fleet.weights.weight_client import WeightClient
from tests.contract.transport_receiver import FaultyGroup

_events = -1  # file descriptor


def say(event: str, **what: object) -> None:
    os.write(_events, (json.dumps({"event": event, "time": time.time(), **what}) + "\n").encode())


class PlaneGroup(FaultyGroup):
    """It tells of its fault. Two more are possible: no collective forms, or the bucket is changed."""

    def __init__(self, epoch: Epoch) -> None:
        if self.fault == "no collective" and epoch.transport != "relay":
            raise RuntimeError("no route to the others")
        super().__init__(epoch)

    def strike(self, bucket: torch.Tensor) -> None:
        say("fault", kind=self.fault)
        super().strike(bucket)
        if self.fault == "corrupt":
            bucket[7] ^= 1


class BufferTarget:
    """EngineWeights whose engine is a buffer."""

    def __init__(self, break_load: bool, spoil_served: bool) -> None:
        self.receiver = Receiver(PlaneGroup)
        self.spoil_served = spoil_served
        self.weights: torch.Tensor | None = None
        self.break_load = break_load

    async def tell(self, message: bytes, node_id: str) -> bytes:
        told = messages.decode_from_learner(message)
        if isinstance(told, Epoch):
            source = told.source.address if told.source else ""
            say("epoch", epoch=told.epoch, size=told.world_size, transport=told.transport, source=source)
        answer = self.receiver.obey(told, node_id)
        if answer is None:
            return b""
        say("serves", address=answer.address, reason=answer.reason)
        return messages.encode(answer)

    async def stage(self, publish: bytes) -> float:
        await self.tell(publish, "")
        while True:
            status = self.receiver.status
            if status.state == "failed":
                say("failed", version=status.version, reason=status.error)
                raise StagingFailed(status.error)
            if status.state == "staged":
                return status.receive_s
            await asyncio.sleep(0.002)

    async def flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        flat = self.receiver.take(incarnation, version)
        self.weights = flat.clone()
        if self.spoil_served:
            flat[9] ^= 1
        self.receiver.give_back(flat)
        if self.break_load:
            self.weights[0] ^= 1
        found = packing.checksum(self.weights)
        if found != expected_checksum:
            raise ProofFailed(f"found {found}, published {expected_checksum}")
        return Flip(0.0, found)

    async def canary(self, tokens: list[int]) -> list[float]:
        return [-0.5] * (len(tokens) - 1)

    async def exclude(self, reason: str) -> None:
        say("excluded", reason=reason)


async def main(words: list[str], orders: int) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("node_id")
    parser.add_argument("--fault", default="")
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--break-load", action="store_true")
    parser.add_argument("--spoil-served", action="store_true")
    parser.add_argument("--credentials", default="")
    parser.add_argument("--transport", default="gloo")
    arguments = parser.parse_args(words)
    FaultyGroup.fault, FaultyGroup.at = arguments.fault, arguments.at
    target = BufferTarget(arguments.break_load, arguments.spoil_served)
    credentials = arguments.credentials
    credential = load_credential(credentials, "node", arguments.node_id) if credentials else None
    client = WeightClient(arguments.node_id, target, credential, receivable(arguments.transport))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(orders))
    say("up")
    state = client.state
    reading = asyncio.create_task(lines.readline())
    while True:
        if reading.done():
            line = reading.result()
            if not line:
                break
            address, incarnation = line.decode().split()
            client.follow(address, int(incarnation))
            reading = asyncio.create_task(lines.readline())
        now = await client.wait_change(0.05)
        if (now.version, now.incarnation) != (state.version, state.incarnation):
            assert target.weights is not None
            value = next(iter(packing.view(target.weights, target.receiver.layout)))[1].view(-1)[0].item()  # type: ignore[arg-type]
            say("active", version=now.version, incarnation=now.incarnation, value=value)
        state = now
    await client.close()


def run(words: list[str], orders: DupFd, events: DupFd) -> None:
    """The process: addresses to follow come in as lines of `orders`."""
    global _events
    _events = events.detach()
    torch.set_num_threads(1)
    asyncio.run(main(words, orders.detach()))
