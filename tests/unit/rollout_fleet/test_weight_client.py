"""The node's side of the weight plane, where it leaves a learner."""

import asyncio
import logging

import pytest
import zmq

from common.weights import messages
from rollout_fleet.weights.engine_weights import EngineWeights
from rollout_fleet.weights.weight_client import WeightClient
from tests.waiting import until_async

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
