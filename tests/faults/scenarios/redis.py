"""The same job with `broker.store: redis` and an AOF with fsync: server and connections."""

import signal
import time

from tests.faults.scenario import scenario
from tests.rigs.fault_run import FaultRig
from tests.rigs.promise import LEASE_S


@scenario(
    fault="Redis: the server gets `kill -9` under load and is started again, several times",
    recovered="three new steps, from the start of the server on",
    bound="load of the AOF + pause of the broker (0.5 s) + 1 s",
    bound_s=2.5,
    redis="always",
)
def redis_killed(rig: FaultRig) -> float:
    """Everything acknowledged is in the append-only file. The broker repeats unanswered batches, and its replies
    wait meanwhile. Leases are in the broker's memory and do not expire because of it.
    """
    return killed_under_load_s(rig)


@scenario(
    fault="Redis: SIGSTOP of the server for longer than `broker.lease_s`, then SIGCONT",
    recovered="three new steps, from SIGCONT on",
    bound="`broker.lease_s` + 2 s",
    bound_s=LEASE_S + 2.0,
    redis="always",
)
def redis_stopped(rig: FaultRig) -> float:
    """The broker acknowledges nothing until Redis answers again; it continues to give leases and take heartbeats."""
    rig.start_all(nodes=2)
    rig.redis.server.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5 * LEASE_S)
    rig.redis.server.process.send_signal(signal.SIGCONT)
    return rig.new_steps_s(time.monotonic())


@scenario(
    fault="Redis: every connection is reset, again and again",
    recovered="three new steps, from the last cut on",
    bound="pause of the broker (0.5 s) + 1 s",
    bound_s=2.0,
    redis="replica",
)
def redis_connections_cut(rig: FaultRig) -> float:
    """redis-py connects anew and repeats the batch; the fenced append finds that it was applied."""
    rig.start_all(nodes=2)
    proxy = rig.redis.proxy
    assert proxy is not None
    at_s = 0.0
    for _ in range(5):
        rig.pause()
        at_s = time.monotonic()
        proxy.cut()
    return rig.new_steps_s(at_s)


def killed_under_load_s(rig: FaultRig) -> float:
    """The server is killed and started again, three times; the longest recovery from a start."""
    rig.start_all(nodes=2)
    worst = 0.0
    for _ in range(3):
        rig.redis.server.kill()
        rig.pause(0.1, 1.0)
        at_s = time.monotonic()
        rig.redis.server.start()
        worst = max(worst, rig.new_steps_s(at_s))
        rig.pause()
    return worst
