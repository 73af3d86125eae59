"""A learner of two machines and a spare one: machines, ranks, launchers and cables that fail while it trains."""

import signal
import time

from broker.delivery.learner_machines import LOST_S
from tests.faults.scenario import scenario
from tests.rigs.hosts import signal_to
from tests.rigs.machines import EVERY, TIMEOUT_S, MachineRig
from tests.rigs.waiting import until

START_S = 25.0  # a learner starts: imports, rendezvous, model, checkpoint
MACHINES = {"rig": MachineRig, "cluster": True}
LOST_MACHINE = {"bound": "35 s + a start of the learner", "bound_s": LOST_S + START_S, **MACHINES}


@scenario(
    fault="learner's machine: `kill -9` to everything on it, first the rendezvous', then the other first machine",
    recovered="a step is trained that no round before had trained, from the kill on",
    **LOST_MACHINE,
)
def machine_killed(rig: MachineRig) -> float:
    """The other ranks end, and the spare machine takes its place; booted again, it is the next spare one."""
    rig.start_all()
    worst = 0.0
    for _ in range(2):
        first, _ = rig.members()
        at_s = time.monotonic()
        first.kill()
        worst = max(worst, rig.new_round_s(at_s, without=first))
        first.boot()
        rig.launch(first)
        rig.steps_beyond(rig.version() + EVERY)
    return worst


@scenario(
    fault="learner: SIGSTOP of one rank",
    recovered="a step is trained that no round before had trained, from the signal on",
    bound="`learner.timeout_s` + a start of the learner",
    bound_s=TIMEOUT_S + START_S,
    **MACHINES,
)
def rank_stopped(rig: MachineRig) -> float:
    """The other ranks end after `learner.timeout_s`, the launchers kill theirs, and the next round begins."""
    rig.start_all()
    _, second = rig.members()
    (rank,) = rig.ranks(second)
    at_s = time.monotonic()
    rank.send_signal(signal.SIGSTOP)
    recovered_s = rig.new_round_s(at_s)
    until(lambda: rank.pid not in [left.pid for left in rig.ranks(second)], "the end of the stopped rank")
    return recovered_s


@scenario(
    fault="learner's machine: its cable is cut",
    recovered="a step is trained that no round before had trained, from the cut on",
    **LOST_MACHINE,
)
def machine_cut_off(rig: MachineRig) -> float:
    """Its launcher kills its ranks when the broker is silent for 30 s; after that the spare machine takes its place."""
    rig.start_all()
    first, _ = rig.members()
    at_s = time.monotonic()
    first.cut()
    recovered_s = rig.new_round_s(at_s, without=first)
    assert not rig.ranks(first)
    first.mend()
    until(lambda: "waiting" in {m.state for m in rig.status().machines}, "the machine to come back as a spare one")
    return recovered_s


@scenario(
    fault="learner's launcher: `kill -9`; it is started again",
    recovered="a step is trained that no round before had trained, from the kill on",
    **LOST_MACHINE,
)
def launcher_killed(rig: MachineRig) -> float:
    """Its ranks end with it, and the others are told."""
    rig.start_all()
    first, _ = rig.members()
    at_s = time.monotonic()
    signal_to(rig.launchers[first.name], signal.SIGKILL)
    rig.launchers.pop(first.name).wait()
    until(lambda: not rig.ranks(first), "the ranks to end with their launcher")
    recovered_s = rig.new_round_s(at_s, without=first)
    rig.launch(first)
    return recovered_s


@scenario(
    fault="broker of a learner of two machines: `kill -9`; it is started again",
    recovered="a step is trained that was not trained before, from the kill on",
    bound="start of the broker + 5 s",
    bound_s=8.0,
    **MACHINES,
)
def broker_of_machines_killed(rig: MachineRig) -> float:
    """It learns of the running round from the launchers. No rank ends, and no restart is used up."""
    rig.start_all()
    before = rig.members(), [rank.pid for host in rig.hosts for rank in rig.ranks(host)]
    version, at_s = rig.version(), time.monotonic()
    signal_to(rig.broker, signal.SIGKILL)
    rig.broker.wait()
    rig.start_broker()
    recovered_s = rig.steps_beyond(version + 1) - at_s
    until(lambda: len(rig.members()) == 2, "both launchers to report to the new broker", told=rig.logs)
    assert (rig.members(), [rank.pid for host in rig.hosts for rank in rig.ranks(host)]) == before
    return recovered_s
