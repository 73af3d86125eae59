"""The node's side of the weight plane, where it leaves a learner and while a version arrives."""

import asyncio
import logging
import math
from typing import Any

import pytest
import zmq

from common.errors import SlipstreamError
from common.process.local_address import this_machine
from common.weights.receive.contract import CanaryRead, Flip, Watch
from common.weights.receive.receiver import StagingStatus
from common.weights.receive.weight_client import WeightClient
from common.weights.transports.relay import Stall
from common.weights.wire import messages
from common.weights.wire.failures import FailureKind, ProofFailed
from common.weights.wire.layout import Layout
from rollout_fleet.weights import engine_weights
from rollout_fleet.weights.engine_weights import EngineWeights
from tests.rigs.waiting import until_async

TRIES = 40  # the race was lost in one of three


def test_a_client_that_leaves_while_a_message_arrives_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def hear(router: "zmq.Socket[bytes]", kind: type) -> bytes:
        """Who said it; a Pong may come after the Leave."""
        while True:
            await until_async(lambda: router.poll(0), kind.__name__)
            identity, said = router.recv_multipart()
            if isinstance(messages.decode_from_node(said), kind):
                return identity

    async def follow_and_leave(router: "zmq.Socket[bytes]", port: int, turns: int) -> None:
        client = WeightClient("node", EngineWeights(recompute=False))
        client.follow(f"tcp://127.0.0.1:{port}", 0)
        router.send_multipart([await hear(router, messages.Join), messages.encode(messages.Ping())])
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.close()
        await hear(router, messages.Leave)

    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with caplog.at_level(logging.ERROR):
            for number in range(TRIES):
                asyncio.run(follow_and_leave(router, port, number % 4))
    assert not caplog.records


class Target:
    """Workers that serve at an address, stall while a version arrives, and carry out no Reroute."""

    def __init__(self) -> None:
        self.told: list[messages.LearnerMessage] = []
        self.excluded = ""

    async def tell(self, message: bytes, node_id: str) -> bytes:
        self.told.append(messages.decode_from_learner(message))
        if isinstance(self.told[-1], messages.Reroute):
            raise SlipstreamError("the engine is not running")
        listening = messages.encode(messages.Listening(node_id, "tcp://here:7"))
        return listening if isinstance(self.told[-1], messages.Welcome) else b""

    async def stage(self, publish: bytes, watch: Watch) -> float:
        epoch = messages.decode_from_learner(publish).epoch  # type: ignore[union-attr]
        await watch(StagingStatus("receiving", epoch=epoch, entries={"rank 1": b"x"}))
        await watch(StagingStatus("receiving", epoch=epoch, stalls={0: Stall("tcp://there:7", 2, "")}))
        return 0.5

    async def exclude(self, reason: str) -> None:
        self.excluded = reason


async def test_a_client_answers_a_welcome_reports_while_a_version_arrives_and_outlives_a_reroute_that_fails() -> None:
    layout, target, heard = Layout.of([("a", "float32", (4,))]), Target(), list[messages.NodeMessage]()
    told = [
        messages.Welcome(0, layout, "127.0.0.1:1"), messages.Epoch(5, 1, 2, 9.0), messages.Reroute(5, 0, "tcp://b:7"),
        messages.StoreEntries(5, {"rank 0": b"y"}), messages.Publish(0, 7, 5, layout.digest, 64, [], "", 9.0),
    ]  # fmt: skip
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client = WeightClient("node", target)  # type: ignore[arg-type]
        client.follow(f"tcp://127.0.0.1:{port}", 0)
        while not any(isinstance(message, messages.Staged) for message in heard):
            await until_async(lambda: router.poll(0), "a message of the node")
            identity, said = router.recv_multipart()
            heard.append(messages.decode_from_node(said))
            for message in told if len(heard) == 1 else ():
                router.send_multipart([identity, messages.encode(message)])
        await client.close()
    assert isinstance(heard[0], messages.Join) and heard[0].machine == this_machine()
    assert heard[1:] == [
        messages.Listening("node", "tcp://here:7"),
        messages.StoreEntries(5, {"rank 1": b"x"}),
        messages.Stalled("node", 5, 0, "tcp://there:7", 2),
        messages.Staged("node", 0, 7, 0.5, 5),
    ]
    assert target.told == told[:-1] and not target.excluded


class WrongWeights(Target):
    """An engine whose parameters are not the published ones after the flip."""

    async def flip(self, incarnation: int, version: int, checksum: str) -> None:
        raise ProofFailed(f"version {version} differs")


def activation(canary: messages.Canary | None = None) -> dict[type, list[messages.LearnerMessage]]:
    """A learner's answers to each message of a node until the node uses version 7."""
    layout = Layout.of([("a", "float32", (4,))])
    welcome, epoch = messages.Welcome(0, layout, "127.0.0.1:1"), messages.Epoch(5, 1, 2, 9.0)
    publish = messages.Publish(0, 7, 5, layout.digest, 64, [], "", 9.0, canary=canary)
    return {messages.Join: [welcome, epoch, publish], messages.Staged: [messages.Activate(0, 7)]}


async def answer_to_an_activation(target: Any, canary: messages.Canary | None = None) -> tuple[WeightClient, Any]:
    """A client that was told to use a version, and its answer: Active or Rejected."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client = WeightClient("node", target)
        client.follow(f"tcp://127.0.0.1:{port}", 0)
        said: messages.NodeMessage | None = None
        while not isinstance(said, messages.Active | messages.Rejected):
            await until_async(lambda: router.poll(0), "a message of the node")
            identity, data = router.recv_multipart()
            said = messages.decode_from_node(data)
            for message in activation(canary).get(type(said), ()):
                router.send_multipart([identity, messages.encode(message)])
        await client.close()
    return client, said


async def test_a_node_whose_weights_are_not_the_published_ones_stops_generating_and_tells_the_learner() -> None:
    target = WrongWeights()
    client, said = await answer_to_an_activation(target)
    assert (said.version, said.fatal, said.kind) == (7, True, FailureKind.PROOF)
    assert target.excluded == client.state.excluded == said.reason


class Canaries(Target):
    """An engine whose canary differs from the learner's and, in decoding, from itself."""

    def __init__(self, learners: list[float], decoding: list[float], rounded: bool) -> None:
        super().__init__()
        self.read = CanaryRead(learners, decoding, rounded)

    async def flip(self, incarnation: int, version: int, checksum: str) -> Flip:
        return Flip(0.0, checksum)

    async def canary(self, tokens: list[int]) -> CanaryRead:
        return self.read


@pytest.mark.parametrize(
    ("differs", "decoding", "rounded", "agrees"),
    [
        ([0.25, -0.75, 0.0], [0.125], False, False),
        ([0.25, -0.75, 0.0], [0.125], True, True),  # 1 / 3 on average
        ([0.75, -0.75, 0.5], [0.125], True, False),
        ([0.25, math.nan, 0.0], [0.125], True, False),
        ([0.25, 0.0, 0.0], [-0.75, 0.0], True, True),
        ([0.25, 0.0, 0.0], [-0.75, 0.0], False, False),
        ([0.25, 0.0, 0.0], [math.nan], True, False),
    ],
)
async def test_a_canary_bounds_the_largest_difference_and_of_rounded_weights_the_mean_one(
    differs: list[float], decoding: list[float], rounded: bool, agrees: bool
) -> None:
    canary = messages.Canary([1, 2, 3, 4], [-1.0, -2.0, -3.0], tolerance=0.5)
    read = [known + each for known, each in zip(canary.logprobs, differs, strict=True)]
    client, said = await answer_to_an_activation(Canaries(read, decoding, rounded), canary)
    if agrees:
        assert said.canary_max_difference == client.state.canary_max_difference == max(map(abs, differs))
    else:
        assert (said.fatal, said.kind) == (True, FailureKind.CANARY)


@pytest.mark.parametrize("ends", ["right", "wrong", "in the canary"])
async def test_a_flip_that_outlives_its_learner_is_told_as_it_ended(ends: str) -> None:
    """A canary of the learner that is gone says nothing on the weights of the next one."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Target):
        async def flip(self, incarnation: int, version: int, expected: str) -> Flip:
            if ends != "in the canary":
                begun.set()
                await go_on.wait()
            if ends == "wrong":
                raise ProofFailed("other weights")
            return Flip(0.0, expected)

        async def canary(self, tokens: list[int]) -> CanaryRead:
            begun.set()
            await go_on.wait()
            return CanaryRead([9.0], [], False)

    target = Slow()
    client = WeightClient("node", target)  # type: ignore[arg-type]
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client.follow(f"tcp://127.0.0.1:{port}", 0)
        canary = messages.Canary([1, 2], [-1.0], tolerance=0.5) if ends == "in the canary" else None
        while not begun.is_set():
            await until_async(lambda: begun.is_set() or router.poll(0), "a message of the node, or its flip")
            if router.poll(0):
                identity, data = router.recv_multipart()
                for message in activation(canary).get(type(messages.decode_from_node(data)), ()):
                    router.send_multipart([identity, messages.encode(message)])
        assert client.state.flipping
        client.follow(f"tcp://127.0.0.1:{port}", 1)
        if ends != "in the canary":
            go_on.set()
        await until_async(lambda: not client.state.flipping, "the end of the flip")
        go_on.set()
        await client.close()
    assert (client.state.version, client.state.excluded) == ((-1, "other weights") if ends == "wrong" else (7, None))
    assert target.excluded == (client.state.excluded or "")


class HungEngine:
    """vLLM's engine whose workers never answer the call `hangs`, nor does it pause."""

    def __init__(self, hangs: str) -> None:
        self.hangs = hangs
        self.engine_core = self

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[bytes]:
        if method == self.hangs:
            await asyncio.Event().wait()
        return [b""]

    async def pause_scheduler_async(self, **_: Any) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("hangs", ["slipstream_handle", "slipstream_staging"])
async def test_an_engine_that_hangs_outside_a_flip_is_given_up(hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE_TIMEOUT_S", "PAUSE_TIMEOUT_S"):
        monkeypatch.setattr(engine_weights, name, 0.05)
    weights = EngineWeights(recompute=False)
    weights._llm = HungEngine(hangs)
    async with asyncio.timeout(60):
        client, said = await answer_to_an_activation(weights)
    assert (said.fatal, said.kind) == (True, FailureKind.ENGINE)
    assert "did not answer within 0.05 s" in (client.state.excluded or "")
