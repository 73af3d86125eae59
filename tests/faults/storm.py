"""Harm of every kind, in random order."""

import time
from collections.abc import Sequence

from tests.faults.options import LEASE_S
from tests.faults.proxy import Proxy
from tests.faults.rig import Rig

FAULTS = 8


def rage(rig: Rig, proxy: Proxy, kinds: Sequence[str]) -> float:
    """Several faults, one after another; returns when the last one was over, monotonic seconds.

    Broker, node, learner and, on Redis, server are killed and started again. Each of them but the learner may be
    stopped for a while ('stop node'). 'cut' resets the proxy's connections. A kind listed twice comes more often.
    """
    at_s = 0.0
    for _ in range(FAULTS):
        kind = rig.random.choice(kinds)
        at_s = _harm(rig, proxy, kind)
        rig.pause()
    return at_s


def _harm(rig: Rig, proxy: Proxy, kind: str) -> float:
    name = rig.random.choice(sorted(rig.nodes))
    broker, learner, node = rig.broker_process, rig.learner_process, rig.nodes[name]
    assert broker is not None and learner is not None
    if kind == "cut":
        proxy.cut()
        return time.monotonic()
    if kind == "server":
        rig.redis.server.kill()
        rig.pause()
        rig.redis.server.start()
        return time.monotonic()
    if kind.startswith("stop "):
        stopped = {"broker": broker, "node": node}.get(kind.removeprefix("stop ")) or rig.redis.server.process
        return rig.stop_for(stopped, rig.random.uniform(0.1, 1.5 * LEASE_S))
    at_s = rig.kill({"broker": broker, "learner": learner, "node": node}[kind])
    if kind == "broker":
        rig.start_broker(wait=False)
    elif kind == "learner":
        rig.start_learner(proxy.address)
    else:
        rig.start_node(name, proxy.address)
    return at_s
