"""The rollout process: connect, register, start the engine, run the node loop, leave."""

import asyncio
import hashlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from broker.connect import Access, NodeConnection, connect_node
from broker.contract import RunInfo
from common.config.schema import Config
from common.errors import EXIT_DONE, BrokerUnreachable, SlipstreamError, UsageError
from common.process.malloc_tuning import keep_freed_memory
from common.security.credentials import curve_credentials, load_credential
from rollout_fleet.driver_factory import build_driver
from rollout_fleet.environments.isolation.thread_host import EnvironmentHost
from rollout_fleet.episode.concurrency import AdaptiveLimit
from rollout_fleet.episode.group_runner import GroupRunner
from rollout_fleet.node.broker_timeout import Patience
from rollout_fleet.node.heartbeat import Heartbeat
from rollout_fleet.node.node import Node, NodeParts
from rollout_fleet.node.node_status import Board

if TYPE_CHECKING:
    from rollout_fleet.engine.engine import Engine

logger = logging.getLogger(__name__)

JOIN_WAIT_S = 12.0
CALL_DEADLINE_S = 10.0
BROKER_PATIENCE_S = 60.0


def run_node(config: Config, broker_address: str, node_id: str | None = None) -> int:
    """Serve the job at `broker_address` until it is done or SIGTERM or SIGINT asks for a drain.

    Args:
        config: the job's config.
        broker_address: tcp://HOST:PORT.
        node_id: unique in the job; None: host and process id.

    Returns:
        0 after a drain; 1 when this node was quarantined.

    Raises:
        UsageError: nobody answers at the address, or the environment cannot be used.
        SlipstreamError: the engine or the broker was lost; the message says why.
    """
    keep_freed_memory()
    return asyncio.run(_serve(config, broker_address, node_id or f"{socket.gethostname()}-{os.getpid()}"))


async def _serve(config: Config, address: str, node_id: str) -> int:
    from common.weights.transports.registry import require
    from rollout_fleet.engine.engine import Engine

    require(config.weights.transport)
    engine = Engine(config, seed=node_seed(config.run.seed, node_id))
    host = EnvironmentHost()
    driver = build_driver(config, engine, host)  # a config error shows before anything is started
    limit = config.broker.max_message_bytes
    credentials = config.broker.credentials
    access = Access(
        address=address,
        role="node",
        deadline_s=CALL_DEADLINE_S,
        max_message_bytes=limit,
        credentials=credentials,
        name=node_id,
    )
    connect = partial(connect_node, access)
    board = Board(node_id)
    async with AsyncExitStack() as stack:
        stack.callback(host.close)
        stack.push_async_callback(driver.close)
        broker = await stack.enter_async_context(connect())
        run = await _register(broker, board, address)
        board.arrival.reached("registered")
        logger.info("node %s joined job %r at %s", node_id, run.name, address)
        stack.push_async_callback(_leave, broker, board)
        heart = _Heart(connect, board, address, config.broker.heartbeat_s)
        heart.beat.start()
        stack.push_async_callback(heart.beat.stop)
        drain = _watch_signals(stack)
        if not await _start_engine(engine, drain, heart, stack):
            return EXIT_DONE
        board.arrival.reached("engine")
        from common.weights.transports.registry import receivable
        from rollout_fleet.weights.weight_client import WeightClient

        keys = curve_credentials(credentials)
        credential = load_credential(keys, "node", node_id) if keys else None
        transports = receivable(config.weights.transport)
        feed = WeightClient(node_id, engine.weights, credential, transports, board.arrival)
        stack.push_async_callback(feed.close)
        low, high = config.rollout.concurrency_bounds
        adapt = AdaptiveLimit(low, high, config.rollout.group_size, engine.holds) if low < high else None
        runner = GroupRunner(driver, adapt.limit if adapt else high, board.sample_failed)
        counters, beat_now = (lambda: engine.counters), heart.beat.beat_now
        node = Node(NodeParts(broker, feed, runner, board, heart.patience, counters, beat_now, adapt), run)
        heart.attach(node)
        drain.attach(node)
        code = await node.run()
        logger.info("node %s is finished with code %d; the engine stops", node_id, code)
        return code


async def _register(broker: NodeConnection, board: Board, address: str) -> RunInfo:
    try:
        return await asyncio.wait_for(broker.register(board.report()), JOIN_WAIT_S)
    except (BrokerUnreachable, TimeoutError) as error:
        reason = str(error) or f"no answer within {JOIN_WAIT_S:g} s"
        raise UsageError(f"cannot join a job at {address}: {reason}; is its broker running?") from error


async def _leave(broker: NodeConnection, board: Board) -> None:
    """Last figures, then goodbye; a broker that is gone needs neither."""
    try:
        await broker.heartbeat(board.report(), [])
        await broker.leave(board.node_id)
        logger.info("left the job")
    except SlipstreamError as error:
        logger.warning("left without a word: %s", error)


async def _start_engine(engine: "Engine", drain: "_Drain", heart: "_Heart", stack: AsyncExitStack) -> bool:
    """Start the engine unless a drain comes first; False in that case."""
    starting, stopping = asyncio.create_task(engine.start()), asyncio.create_task(drain.asked.wait())
    heart.on_failure = drain.asked.set
    stack.push_async_callback(engine.shutdown)
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        await starting
    if heart.error is not None:
        raise heart.error
    if drain.asked.is_set():
        await asyncio.wait({starting})
        return False
    return True


class _Heart:
    """The heartbeat, and where its news go before and after there is a node."""

    def __init__(self, connect: Callable[[], NodeConnection], board: Board, address: str, every_s: float) -> None:
        self.patience = Patience(BROKER_PATIENCE_S, address)
        self.error: SlipstreamError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._node: Node | None = None
        self.beat = Heartbeat(connect, board, self.patience, every_s, self._reply, self._lost)

    def attach(self, node: Node) -> None:
        """From here on the node hears of replies and failures."""
        self._node = node
        if self.error is not None:
            node.fail(self.error)
        self.beat.beat_now()

    def _reply(self, reply: object) -> None:
        if self._node is not None:
            self._node.on_heartbeat(reply)  # type: ignore[arg-type]

    def _lost(self, error: SlipstreamError) -> None:
        self.error = error
        self.on_failure()
        if self._node is not None:
            self._node.fail(error)


class _Drain:
    """The first signal asks for a drain, the second one gives running groups back at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._name, self._count = "", 0
        self._node: Node | None = None

    def attach(self, node: Node) -> None:
        """From here on the node hears of signals."""
        self._node = node
        if self._count:
            node.request_drain(self._name)

    def on_signal(self, number: signal.Signals) -> None:
        """SIGTERM or SIGINT came."""
        self._count += 1
        self._name = number.name
        self.asked.set()
        if self._node is not None:
            self._node.request_drain(number.name, abandon=self._count > 1)


def _watch_signals(stack: AsyncExitStack) -> _Drain:
    drain, loop = _Drain(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.on_signal, number)
        stack.callback(loop.remove_signal_handler, number)
    return drain


def node_seed(seed: int, node_id: str) -> int:
    """A sampler seed of its own for every node of a job, below 2**31."""
    digest = hashlib.sha256(f"{seed} {node_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
