"""The rollout process: connect, register, start the engine, run the node loop, leave."""

import asyncio
import hashlib
import itertools
import logging
import signal
from contextlib import AsyncExitStack
from functools import partial

from broker.connect import Access, connect_node
from broker.contract import RunInfo
from broker.messaging.client_methods import NodeBroker
from common.config.schema import Config
from common.errors import BrokerUnreachable, SlipstreamError, UsageError
from common.process.health import serving_health
from common.process.logs import log_path
from common.process.malloc_tuning import keep_freed_memory
from common.process.run_dir import RunDir
from common.security.credentials import curve_credentials, load_credential
from common.span_buffer import SPANS
from common.transcripts import FailedTranscripts
from rollout_fleet.driver_factory import build_driver
from rollout_fleet.environments.isolation.thread_host import EnvironmentHost
from rollout_fleet.episode.concurrency import AdaptiveLimit
from rollout_fleet.episode.group_runner import GroupRunner
from rollout_fleet.node.broker_timeout import BrokerTimeout
from rollout_fleet.node.heartbeat import Heartbeat
from rollout_fleet.node.node import Node
from rollout_fleet.node.node_status import OwnStatus
from rollout_fleet.node.running_groups import NodeParts

logger = logging.getLogger(__name__)

JOIN_WAIT_S = 12.0
CALL_DEADLINE_S = 10.0
BROKER_TIMEOUT_S = 60.0


def run_node(config: Config, broker_address: str, node_id: str, pool: str = "") -> int:
    """Serve the job at tcp://HOST:PORT until it is done or a signal asks for a drain; 1 when the node was excluded.
    A node of the `pool` eval takes held-out problems only.

    Raises UsageError without broker or for an unusable environment, SlipstreamError when engine or broker were lost.
    """
    keep_freed_memory()
    if config.telemetry.trace_mib:
        SPANS.open("starting")
    return asyncio.run(_serve(config, broker_address, OwnStatus(node_id, pool=pool)))


async def _serve(config: Config, address: str, status: OwnStatus) -> int:
    from common.weights.receive.node_client import WeightClient
    from common.weights.transports.groups import receivable, require
    from rollout_fleet.engine.engine import Engine
    from rollout_fleet.engine.profiling import record

    require(config.weights.transport)
    node_id, host = status.node_id, EnvironmentHost()
    telemetry = config.telemetry
    profiled = telemetry.profile_steps and node_id in telemetry.profile_nodes
    profiles = RunDir(config.run.dir).profiles if profiled else None
    engine = Engine(config, seed=_seed(config, node_id), profiles=profiles)
    driver = build_driver(config, engine, host)  # a config error shows before anything is started
    access = Access(
        address=address,
        role="node",
        deadline_s=CALL_DEADLINE_S,
        max_message_bytes=config.broker.max_message_bytes,
        credentials=config.broker.credentials,
        name=node_id,
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(serving_health(config.telemetry.health_port, status.signs))
        stack.callback(host.close)
        stack.push_async_callback(driver.close)
        broker = await stack.enter_async_context(connect_node(access))
        run = await _register(broker, status, address)
        status.joining.reached("registered")
        logger.info("node %s joined job %r at %s", node_id, run.name, address)
        stack.push_async_callback(_leave, broker, status)
        timeout = BrokerTimeout(BROKER_TIMEOUT_S, address)
        log = log_path(RunDir(config.run.dir).logs, "rollout", node_id)
        heartbeat = Heartbeat(partial(connect_node, access), status, timeout, config.broker.heartbeat_s, log)
        keys = curve_credentials(config.broker.credentials)
        credential = load_credential(keys, "node", node_id) if keys else None
        feed = WeightClient(
            node_id,
            engine.weights,
            credential=credential,
            transports=receivable(config.weights.transport),
            reached=status.joining.reached,
            pool=status.pool,
        )
        low, high = config.rollout.concurrency_bounds
        runner = GroupRunner(driver, high, status.sample_failed)
        line = FailedTranscripts(driver.renderer.text, node_id).line if telemetry.transcripts != "none" else None
        parts = NodeParts(broker, feed, runner, status, timeout, lambda: engine.counters, heartbeat.beat_now, line)

        def adaptive() -> AdaptiveLimit | None:
            return AdaptiveLimit(low, high, config.rollout.group_size, engine.holds) if low < high else None

        node = Node(parts, adaptive, config.rollout.drain_s)
        heartbeat.start(node.on_heartbeat, node.fail)
        stack.push_async_callback(heartbeat.stop)
        loop, count = asyncio.get_running_loop(), itertools.count()
        for number in (signal.SIGTERM, signal.SIGINT):  # the first asks for a drain, the second gives groups back
            loop.add_signal_handler(number, lambda by=number.name: node.request_drain(by, abandon=next(count) > 0))
            stack.callback(loop.remove_signal_handler, number)
        stack.push_async_callback(engine.shutdown)
        stack.push_async_callback(feed.close)
        if await _started(asyncio.create_task(engine.start()), node):
            status.joining.reached("engine")
            if profiles is not None:
                recording = asyncio.create_task(record(engine, feed, telemetry, node_id))
                stack.push_async_callback(asyncio.wait, [recording])
                stack.callback(recording.cancel)
        code = await node.run()
        logger.info("node %s is finished with code %d; the engine stops", node_id, code)
        return code


def _seed(config: Config, node_id: str) -> int:
    """Every node samples with its own seed."""
    digest = hashlib.sha256(f"{config.run.seed} {node_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


async def _register(broker: NodeBroker, status: OwnStatus, address: str) -> RunInfo:
    try:
        return await asyncio.wait_for(broker.register(status.report()), JOIN_WAIT_S)
    except (BrokerUnreachable, TimeoutError) as error:
        reason = str(error) or f"no answer within {JOIN_WAIT_S:g} s"
        raise UsageError(f"cannot join a job at {address}: {reason}; is its broker running?") from error


async def _leave(broker: NodeBroker, status: OwnStatus) -> None:
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
