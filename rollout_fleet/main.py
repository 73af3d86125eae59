"""The rollout process: connect, register, start the engine, run the node loop, leave."""

import asyncio
import hashlib
import itertools
import logging
import signal
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from broker.client.calls import NodeBroker
from broker.client.connect import Access, connect_node
from common.config.schema import Config
from common.errors import BrokerUnreachable, SlipstreamError, UsageError
from common.process.health import serving_health
from common.process.lifecycle import keep_freed_memory, stop_signals
from common.process.logs import log_path
from common.process.run_dir import RunDir
from common.security.credentials import curve_credentials, load_credential
from common.span_buffer import SPANS
from common.transcripts import FailedTranscripts
from rollout_fleet.driver_factory import build_drivers
from rollout_fleet.environments.isolation.thread_backend import EnvironmentThread
from rollout_fleet.episode.concurrency import AdaptiveLimit
from rollout_fleet.node.heartbeat import BrokerTimeout, Heartbeat
from rollout_fleet.node.node import Node
from rollout_fleet.node.node_status import NodeStatusTracker
from rollout_fleet.node.running_groups import NodeParts

if TYPE_CHECKING:  # importing them takes torch, and vLLM's settings must be in the environment before
    from common.weights.receive.weight_client import WeightClient
    from rollout_fleet.engine.engine import Engine

logger = logging.getLogger(__name__)

JOIN_WAIT_S = 12.0
CALL_DEADLINE_S = 10.0
BROKER_TIMEOUT_S = 60.0


def run_node(config: Config, broker_address: str, node_id: str, pool: str = "", run_id: str = "") -> int:
    """Serve the job at tcp://HOST:PORT until it is done or a signal asks for a drain; 1 when the node was excluded.
    A node of the `pool` eval takes held-out problems only. `run_id`: the run whose config it is, '' where unknown.

    Raises UsageError without broker or for an unusable environment, SlipstreamError when engine or broker were lost:
    BrokerError when another run's broker has taken the address.
    """
    keep_freed_memory()
    if config.telemetry.trace_mib:
        SPANS.open("starting")
    from rollout_fleet.engine.engine import import_ahead

    import_ahead(config)
    status = NodeStatusTracker(node_id, pool=pool)
    status.belongs_to(run_id)  # checks and downloads took their time, in which another run's broker may have come
    return asyncio.run(_serve(config, broker_address, status))


async def _serve(config: Config, address: str, status: NodeStatusTracker) -> int:
    from common.weights.transports.groups import require
    from rollout_fleet.engine.engine import Engine, record_profiles

    require(config.weights.transport)
    folder = RunDir(config.run.dir)
    profiled = config.telemetry.profile_steps and status.node_id in config.telemetry.profile_nodes
    engine = Engine(config, seed=_seed(config, status.node_id), profiles=folder.profiles if profiled else None)
    thread = EnvironmentThread()
    drivers = build_drivers(config, engine, thread)  # a config error shows before anything is started
    access = _access(config, address, status.node_id)
    timeout = BrokerTimeout(BROKER_TIMEOUT_S, address)
    log = log_path(folder.logs, "rollout", status.node_id)
    heartbeat = Heartbeat(partial(connect_node, access), status, timeout, config.broker.heartbeat_s, log)
    low, high = config.rollout.concurrency_bounds

    def adaptive() -> AdaptiveLimit | None:
        return AdaptiveLimit(low, high, config.rollout.group_size, engine.holds) if low < high else None

    # The stack closes in reverse order: a node leaves the job when its engine and its heartbeats have ended.
    async with AsyncExitStack() as stack:
        port, credentials = config.telemetry.health_port, config.broker.credentials
        stack.enter_context(serving_health(port, status.signs, credentials))
        stack.callback(thread.close)
        for driver in drivers.values():
            stack.push_async_callback(driver.close)
        broker = await stack.enter_async_context(connect_node(access))
        await _register(broker, status, address)
        stack.push_async_callback(_leave, broker, status)
        feed = _weight_client(config, engine, status)
        transcripts = FailedTranscripts(next(iter(drivers.values())).renderer.text, status.node_id)
        parts = NodeParts(
            broker=broker,
            feed=feed,
            drivers=drivers,
            concurrency=high,
            status=status,
            timeout=timeout,
            counters=engine.counters,
            beat_now=heartbeat.beat_now,
            transcribe=transcripts.line if config.telemetry.transcripts != "none" else None,
        )
        node = Node(parts, adaptive, config.rollout.drain_s)
        heartbeat.start(node.on_heartbeat, node.fail)
        stack.push_async_callback(heartbeat.stop)
        _drain_on_signals(stack, node)
        stack.push_async_callback(engine.shutdown)
        stack.push_async_callback(feed.close)
        if await _started(asyncio.create_task(engine.start()), node):
            status.joining.reached("engine")
            if profiled:
                recording = asyncio.create_task(record_profiles(engine, feed, config.telemetry, status.node_id))
                stack.push_async_callback(asyncio.wait, [recording])
                stack.callback(recording.cancel)
        code = await node.run()
        logger.info("node %s is finished with code %d; the engine stops", status.node_id, code)
        return code


def _access(config: Config, address: str, node_id: str) -> Access:
    return Access(
        address=address,
        role="node",
        deadline_s=CALL_DEADLINE_S,
        max_message_bytes=config.broker.max_message_bytes,
        credentials=config.broker.credentials,
        name=node_id,
    )


def _weight_client(config: Config, engine: "Engine", status: NodeStatusTracker) -> "WeightClient":
    from common.weights.receive.weight_client import WeightClient
    from common.weights.transports.groups import receivable

    keys = curve_credentials(config.broker.credentials)
    credential = load_credential(keys, "node", status.node_id) if keys else None
    return WeightClient(
        status.node_id,
        engine.weights,
        credential=credential,
        transports=receivable(config.weights.transport),
        reached=status.joining.reached,
        pool=status.pool,
    )


def _drain_on_signals(stack: AsyncExitStack, node: Node) -> None:
    """The first signal asks for a drain, the second, unless it is a SIGHUP, gives running groups back."""
    loop = asyncio.get_running_loop()
    count = itertools.count()

    def drain(number: signal.Signals) -> None:
        node.request_drain(number.name, abandon=next(count) > 0 and number != signal.SIGHUP)

    for number in stop_signals():
        loop.add_signal_handler(number, drain, number)
        stack.callback(loop.remove_signal_handler, number)


def _seed(config: Config, node_id: str) -> int:
    """Every node samples with its own seed."""
    digest = hashlib.sha256(f"{config.run.seed} {node_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


async def _register(broker: NodeBroker, status: NodeStatusTracker, address: str) -> None:
    try:
        run = await asyncio.wait_for(broker.register(status.report()), JOIN_WAIT_S)
    except (BrokerUnreachable, TimeoutError) as error:
        reason = str(error) or f"no answer within {JOIN_WAIT_S:g} s"
        raise UsageError(f"cannot join a job at {address}: {reason}; is its broker running?") from error
    status.belongs_to(run.run_id)
    status.joining.reached("registered")
    logger.info("node %s joined job %r at %s", status.node_id, run.name, address)


async def _leave(broker: NodeBroker, status: NodeStatusTracker) -> None:
    try:
        SPANS.close()
        await broker.heartbeat(status.report(), [], spans=SPANS.batch(status.node_id))
        await broker.leave(status.node_id)
        logger.info("left the job")
    except SlipstreamError as error:
        logger.warning("could not tell the broker that this node leaves: %s", error)


async def _started(starting: asyncio.Task[None], node: Node) -> bool:
    """Whether the engine is up; False when the node has to stop before."""
    stopping = asyncio.create_task(node.stopping.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        await starting
        return True
    await asyncio.wait({starting})
    return False
