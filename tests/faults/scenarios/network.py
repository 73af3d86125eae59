"""Connections that are cut, slow, silent, or fed with nonsense."""

import time

from tests.faults.scenario import scenario
from tests.rigs.fault_run import FaultRig
from tests.rigs.promise import LEASE_S


@scenario(
    fault="network: every connection is reset, again and again",
    recovered="three new steps, from the last cut on",
    bound="reconnection (50 ms) + repetition of the request (2 s) + 1 s",
    bound_s=1.5,
)
def connections_cut(rig: FaultRig) -> float:
    """Clients reconnect by themselves and repeat unanswered requests. A repeated request is answered like the
    first, and leases whose answer was lost go back.
    """
    proxy = rig.start_behind_proxy()
    for _ in range(10):
        proxy.cut()
        at_s = time.monotonic()
        rig.pause(0.05, 0.4)
    return rig.new_steps_s(at_s)


@scenario(
    fault="network: 100 ms and 200 kB/s in each direction, groups of 40 kB",
    recovered="three new steps (480 kB to the learner), from the slowdown on",
    bound="the time of the bytes and of ten round trips a step + 2 s",
    bound_s=10.0,
)
def slow_link(rig: FaultRig) -> float:
    """All processes continue more slowly; no lease is lost, because heartbeats have a connection of their own."""
    proxy = rig.start_behind_proxy(padding_tokens=2200)
    proxy.delay_s, proxy.bytes_per_s = 0.1, 200_000.0
    at_s = time.monotonic()
    recovery_s = rig.new_steps_s(at_s)
    assert rig.observer.status().lease_expiries == 0
    proxy.delay_s, proxy.bytes_per_s = 0.0, None
    return recovery_s


@scenario(
    fault="network: 400 kB/s in each direction, groups of 400 kB: a step takes twice the learner's deadline",
    recovered="three new steps (4.8 MB to the learner), from the slowdown on",
    bound="the time of the bytes, to the broker and to the learner + 8 s",
    bound_s=24.0,
)
def large_steps_on_a_slow_link(rig: FaultRig) -> float:
    """A take crosses the link once, longer than the learner's deadline, which the moving bytes extend."""
    proxy = rig.start_behind_proxy(padding_tokens=22_000, learner_deadline_s=2.0)
    proxy.bytes_per_s = 400_000.0
    at_s = time.monotonic()
    recovery_s = rig.new_steps_s(at_s)
    proxy.bytes_per_s = None
    return recovery_s


@scenario(
    fault="network: a black hole for longer than `broker.lease_s`, then it passes again",
    recovered="three new steps, from then on",
    bound="repetition of the request (2 s) + 1 s",
    bound_s=1.5,
)
def black_hole(rig: FaultRig) -> float:
    """Leases are lost and given again; delayed results under old leases are refused."""
    proxy = rig.start_behind_proxy()
    proxy.hold()
    time.sleep(2.5 * LEASE_S)
    proxy.release()
    return rig.new_steps_s(time.monotonic())


@scenario(
    fault="network: a connection is forgotten on the way (no bytes, no reset, for ever)",
    recovered="three new steps, from then on",
    bound="a wait for a task (15 s) + silence until a client connects anew (8 s) + 4 s",
    bound_s=27.0,
)
def connection_forgotten(rig: FaultRig) -> float:
    """An answer is due and nothing moves: the client connects anew and repeats its requests."""
    proxy = rig.start_behind_proxy(learner_deadline_s=60.0)
    proxy.lose()
    return rig.new_steps_s(time.monotonic())


@scenario(
    fault="network: one direction of every connection is closed",
    recovered="three new steps, from the last time on",
    bound="reconnection (50 ms) + repetition of the request (2 s) + 1 s",
    bound_s=1.5,
)
def half_closed(rig: FaultRig) -> float:
    """The side that reads the end closes the connection; clients connect anew."""
    proxy = rig.start_behind_proxy()
    for to_server in (True, False, True, False):
        proxy.half_close(to_server)
        at_s = time.monotonic()
        rig.pause(0.1, 0.4)
    return rig.new_steps_s(at_s)
