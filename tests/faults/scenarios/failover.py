"""Redis that fails over to a replica, and everything at once with Redis."""

import time

from tests.faults.scenario import scenario
from tests.faults.scenarios.redis import killed_under_load_s
from tests.rigs.fault_run import FaultRig, rage
from tests.rigs.promise import LEASE_S


@scenario(
    fault="Redis: `kill -9` of the primary; a replica that had followed takes over, and the address leads to it",
    recovered="three new steps, from the move of the address on",
    bound="pause of the broker (0.5 s) + 1 s",
    bound_s=2.0,
    redis="replica",
)
def redis_failover(rig: FaultRig) -> float:
    """The broker connects anew and repeats the batch; the replica has all acknowledged records."""
    rig.start_all(nodes=2)
    proxy = rig.redis.proxy
    assert proxy is not None and rig.learner_process is not None
    proxy.hold()  # no client is told anything that the replica does not get
    rig.redis.replica_in_step()
    at_s = rig.redis.fail_over()
    proxy.release()
    recovery_s = rig.new_steps_s(at_s)
    assert rig.learner_process.poll() is None
    return recovery_s


@scenario(
    fault="Redis: `kill -9` of the primary; a replica takes over that lacks acknowledged records",
    recovered="three new steps, from the move of the address on",
    bound="pause of the broker (0.5 s) + 1.5 s",
    bound_s=3.0,
    redis="replica",
)
def redis_failover_back_in_time(rig: FaultRig) -> float:
    """The log's sequence number does not match what the leader expects. It writes a snapshot of its whole state and
    the groups that it has in memory; no process starts again.
    """
    rig.start_all(nodes=2)
    assert rig.learner_process is not None
    rig.redis.replica_in_step()
    rig.redis.replica_falls_behind()
    rig.new_steps_s(time.monotonic(), steps=4)
    at_s = rig.redis.fail_over()
    recovery_s = rig.new_steps_s(at_s)
    assert rig.learner_process.poll() is None
    assert rig.events("store_rewritten"), "the broker noticed that records were missing"
    return recovery_s


@scenario(
    fault="Redis: the server gets `kill -9` under load, several times (`broker.durability: everysec`)",
    recovered="three new steps, from the start of the server on",
    bound="load of the AOF + pause of the broker (0.5 s) + 1 s",
    bound_s=5.0,
    redis="everysec",
)
def redis_killed_everysec(rig: FaultRig) -> float:
    """All acknowledged records had been written. If records are missing, the leader writes them again."""
    return killed_under_load_s(rig)


@scenario(
    fault="Redis: all at once: server, broker, nodes, learner killed, stopped, restarted, connections cut, in random "
    "order",
    recovered="three new steps, from the last fault on",
    bound="`broker.lease_s` + start of a process + pause of a client (1 s) + 3 s",
    bound_s=LEASE_S + 5.0,
    redis="always",
)
def redis_storm(rig: FaultRig) -> float:
    """Each fault is handled as it is alone."""
    proxy = rig.start_behind_proxy(nodes=3)
    kinds = ["server", "server", "stop server", "broker", "node", "learner", "stop node", "cut"]
    return rig.new_steps_s(rage(rig, proxy, kinds))
