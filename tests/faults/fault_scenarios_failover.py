"""Redis that fails over to a replica or loses its newest second, and everything at once on Redis."""

import time

from fault_options import LEASE_S
from fault_promise import trained_lines
from fault_rig import Rig
from fault_scenario import scenario
from fault_scenarios_redis import killed_under_load_s
from fault_storm import rage

FROM_ITS_CHECKPOINT = (
    "said by everybody, never silent; in the weights that go on every group was trained once, and no prompt is skipped"
)


@scenario(
    fault="Redis: `kill -9` of the primary; a replica that had followed takes over, and the address leads to it",
    recovered="three new steps, from the move of the address on",
    bound="pause of a client (1 s) + 1 s",
    bound_s=2.0,
    redis="replica",
)
def redis_failover(rig: Rig) -> float:
    """Clients connect anew and repeat the call; the replica has all that was acknowledged. Nobody starts again."""
    rig.start_all(nodes=2)
    proxy = rig.redis.proxy
    assert proxy is not None and rig.learner_process is not None
    proxy.hold()  # nobody is told anything that the replica does not hear of
    rig.redis.replica_in_step()
    at_s = rig.redis.fail_over()
    proxy.release()
    recovery_s = rig.new_steps_s(at_s)
    assert rig.learner_process.poll() is None and not rig.start_again_if_moves_were_lost()
    return recovery_s


@scenario(
    fault="Redis: `kill -9` of the primary; a replica takes over that lacks acknowledged moves of the learner",
    recovered="three new steps, from the move of the address on",
    bound="pause of a client (1 s) + start of a process + replay of the steps since its checkpoint + 1 s",
    bound_s=5.0,
    promise=FROM_ITS_CHECKPOINT,
    redis="replica",
)
def redis_failover_back_in_time(rig: Rig) -> float:
    """Whoever calls knows a higher epoch than the replica has: the store is marked as lost, every call is refused with
    that reason, the learner ends with it. The keeper begins a new store; the next learner resumes from its checkpoint
    and offers again what that had not consumed."""
    rig.start_all(nodes=2)
    assert rig.learner_process is not None
    rig.redis.replica_in_step()
    rig.redis.replica_falls_behind()
    rig.new_steps_s(time.monotonic(), steps=4)
    at_s = rig.redis.fail_over()
    assert rig.learner_process.wait(60) == 1, rig.log_of("learner")
    steps = [line.step for line in trained_lines(rig.run_dir) if line.at_s > at_s + 0.2]
    assert len(steps) <= 1, f"after the failover it trained {steps}, from groups that it had not taken before"
    assert rig.start_again_if_moves_were_lost()
    recovery_s = rig.new_steps_s(at_s)
    assert "has lost moves of run faults" in rig.log_of("broker"), "the keeper says it too"
    return recovery_s


@scenario(
    fault="Redis: the server gets `kill -9` under load, several times (`broker.durability: everysec`)",
    recovered="three new steps, from the start of the server on",
    bound="load of the AOF + pause of a client (1 s) + start of a process + 1 s",
    bound_s=5.0,
    promise="every group in exactly one committed step; should the file lack the newest moves, as after a failover",
    redis="everysec",
)
def redis_killed_everysec(rig: Rig) -> float:
    """What was acknowledged had been written, so it is there; only while an fsync hangs may Redis be up to 2 s behind.
    Then the learner ends and starts again from its checkpoint."""
    return killed_under_load_s(rig, rig.goes_on_or_starts_again_s)


@scenario(
    fault="Redis: all at once: server, keeper, nodes, learner killed, stopped, restarted, connections cut, in random "
    "order",
    recovered="three new steps, from the last fault on",
    bound="`broker.lease_s` + start of a process + pause of a client (1 s) + 3 s",
    bound_s=LEASE_S + 5.0,
    redis="always",
)
def redis_storm(rig: Rig) -> float:
    """Each fault is met as it is alone."""
    proxy = rig.start_behind_proxy(nodes=3)
    kinds = ["server", "server", "stop server", "broker", "node", "learner", "stop node", "cut"]
    return rig.new_steps_s(rage(rig, proxy, kinds))
