"""The relay between hosts with slow cables: python bench/weight_chain.py [--mib 24] [--nodes 1 2 4 8] [--rounds 3].

Needs root and network namespaces, as tests/rigs/hosts.py does. Real publisher, sockets and node processes, each on a
host of its own; only the engine is a buffer. A relay has keys. In one run and in turns:

- runs: seconds from `publish` to the last node that runs the version, over size / rate. With one number of nodes there
  are also `gloo`, and `star`: the same relay with a publisher for each node, all at once, so that the learner sends a
  copy to each. These two and a larger size are measured in one round: their rounds differed by 2 %;
- deaths: a node in the middle gets SIGKILL or SIGSTOP when it has half of a version. Seconds until the last of the
  others receives again and until all of them run the version; bytes that a host received more than in a quiet publish.
  `bound_s` is the silence after which the learner ejects a node;
- deltas: 2 % of the elements change by one unit, as in docs/delta.md, against the whole version;
- sources: one source or several, each on a host of its own, and nodes with cables that are four times as fast.
  `over_one` is the time over that of one source in the same round.

Each figure is of a publisher's second version; the first one (`first`) also makes buffers. Writes
bench/results/weight_chain.json in about a quarter of an hour. Short mode: --mib 1 --nodes 1 2 --rounds 1 and so on.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import harness

from common.weights.transports.groups import silence_bound
from tests.rigs.waiting import until
from tests.rigs.weight_hosts import NodeWorker, Publication, WeightRig

CHANGED = 0.02  # share of the elements; docs/delta.md has 1.8 % at a learning rate of 1e-6
STEP_BYTES = 32 << 10  # progress at a host: pings are less, and 40 Mbit/s carry this in 7 ms
LOOK_S = 0.005
STALLED_S = 0.1  # a shorter gap is no stall: cables with a bucket of tokens carry in bursts
UNDER_WAY_S = 1.5  # in which a host still gets what its source sent before the fault
FASTER = 4  # rate of the nodes' cables over that of the sources'
FAULTS = {"SIGKILL": "kill", "SIGSTOP": "stop"}


def leading(rig: WeightRig, way: str, nodes: int, mib: int, sources: int = 1, **weights: Any) -> float:
    """Let the first nodes follow a new publisher; returns `weights.timeout_s`, ten times what a star would take."""
    timeout_s = max(20.0, 10 * nodes * rig.ideal_s(mib << 20))
    transport = "gloo" if way == "gloo" else "relay"
    rig.lead(rig.nodes[:nodes], way == "star", sources, transport=transport, timeout_s=timeout_s, **weights)
    return timeout_s


def spread(
    rig: WeightRig, way: str, nodes: int, mib: int, sources: int = 1, changed: float | None = None, **weights: Any
) -> dict[str, float]:
    """One publisher's first version and another one, in which this share of the elements changed; None: all."""
    leading(rig, way, nodes, mib, sources, **weights)
    size, ideal_s, fleet = mib << 20, rig.ideal_s(mib << 20), rig.nodes[:nodes]
    first, found = rig.spread(size), rig.spread(size, changed)
    sent = [found.sent(host) / size for host in (rig.learner_host, *rig.source_hosts)]
    return {
        "seconds": found.seconds(fleet),
        "over_ideal": found.seconds(fleet) / ideal_s,
        "first_over_ideal": first.seconds(fleet) / ideal_s,
        "learner_sent_over_size": sent[0],
        "most_sent_over_size": max(sent),
        "received_over_size": max(found.received(node.host) / size for node in fleet),
    }


class Arrivals:
    """When each STEP_BYTES more had arrived at hosts."""

    def __init__(self, found: Publication, nodes: Sequence[NodeWorker]) -> None:
        self._found, self._nodes = found, nodes
        self._times = {node.id: list[float]() for node in nodes}

    def look_until(self, condition: Callable[[], object]) -> None:
        until(condition, check=self._look, every_s=LOOK_S)

    def _look(self) -> None:
        for node in self._nodes:
            times = self._times[node.id]
            times += [time.time()] * (self._found.received(node.host) // STEP_BYTES - len(times))

    def again_s(self, at_s: float) -> float:
        """Seconds from `at_s` until the last host received again; 0 when none was stalled.

        A host's stall is its longest gap of those that begin within UNDER_WAY_S: later ones are not the fault's.
        """
        ends = [0.0]
        for times in self._times.values():
            gaps = [(b - a, b) for a, b in itertools.pairwise(times) if b > at_s and a < at_s + UNDER_WAY_S]
            ends += [end - at_s for gap_s, end in sorted(gaps)[-1:] if gap_s > STALLED_S]
        return max(ends)


def death(rig: WeightRig, signal_name: str, nodes: int, mib: int) -> dict[str, float]:
    """A node that passes a version on dies when it has half of it."""
    bound_s = silence_bound(leading(rig, "relay", nodes, mib))
    size, fault, fleet = mib << 20, FAULTS[signal_name], rig.nodes[:nodes]
    rig.spread(size)
    quiet = rig.spread(size)
    usual = {host.name: (quiet.received(host), quiet.sent(host)) for host in (rig.learner_host, *rig.hosts)}
    forwarding = [node for node in fleet if usual[node.host.name][1] > size / 2] or fleet
    victim = forwarding[len(forwarding) // 2]
    others = [node for node in fleet if node is not victim]
    found = rig.publish(size)
    arrivals = Arrivals(found, others)
    arrivals.look_until(lambda: found.received(victim.host) >= size / 2)
    struck = time.time()
    rig.strike(fault, victim)
    arrivals.look_until(lambda: all(node.heard("active", version=found.version) for node in others))
    twice = max(found.received(node.host) - usual[node.host.name][0] for node in others)
    learner_more = found.sent(rig.learner_host) - usual[rig.learner_host.name][1]
    rig.heal(fault, victim).active(found.version)
    return {
        "receives_again_s": arrivals.again_s(struck),
        "bound_s": bound_s,
        "all_have_it_s": found.began + found.seconds(others) - struck,
        "seconds": found.seconds(others),
        "over_ideal": found.seconds(others) / rig.ideal_s(size),
        "twice_bytes": max(0, twice),
        "learner_more_bytes": max(0, learner_more),
    }


def one_source(args: Any, rig: WeightRig) -> dict[str, Any]:
    """Runs, deaths and deltas."""
    runs = [("relay", nodes, args.mib) for nodes in args.nodes]
    once = [(way, args.others_nodes, args.mib) for way in ("gloo", "star")]
    once += [("relay", nodes, args.large_mib) for nodes in args.large_nodes]
    deaths = [(name, args.death_nodes, args.mib) for name in FAULTS]
    deltas = [(encoding, args.delta_nodes, args.delta_mib) for encoding in ("full", "delta")]
    turns = range(args.rounds)
    found = harness.in_turns(runs, turns, lambda run, _: spread(rig, *run))
    found |= harness.in_turns(once, [0], lambda run, _: spread(rig, *run))
    died = harness.in_turns(deaths, turns, lambda run, _: death(rig, *run))
    rig.slow(args.delta_rate_mbit)
    sent = harness.in_turns(
        deltas, turns, lambda run, _: spread(rig, "relay", *run[1:], changed=CHANGED, encoding=run[0])
    )
    return {
        "runs": harness.rows(found, ("way", "nodes", "mib"), "seconds"),
        "deaths": harness.rows(died, ("signal", "nodes", "mib"), "receives_again_s"),
        "deltas": harness.rows(sent, ("encoding", "nodes", "mib"), "seconds"),
    }


def several_sources(args: Any, rig: WeightRig) -> list[dict[str, Any]]:
    """Every round's time is compared with that of the first number of sources, which is one."""
    runs = [(sources, args.source_nodes, args.mib) for sources in args.sources]
    found = harness.in_turns(runs, range(args.rounds), lambda run, _: spread(rig, "relay", *run[1:], sources=run[0]))
    for i, one_s in enumerate([figures["seconds"] for figures in found[runs[0]]]):
        for rounds in found.values():
            rounds[i]["over_one"] = rounds[i]["seconds"] / one_s
    return harness.rows(found, ("sources", "nodes", "mib"), "over_one")


@harness.script(
    mib=24, nodes=[1, 2, 4, 8], large_mib=100, large_nodes=[1, 8], others_nodes=4, rate_mbit=40.0, rounds=3,
    death_nodes=4, delta_nodes=8, delta_mib=100, delta_rate_mbit=100.0, sources=[1, 2, 4], source_nodes=2,
    source_rate_mbit=20.0,
)  # fmt: skip
def main(args: harness.Options) -> harness.Figures:
    result: dict[str, Any] = {"rounds": args.rounds}
    most = max(*args.nodes, *args.large_nodes, args.others_nodes, args.death_nodes, args.delta_nodes)
    slow, fast = args.source_rate_mbit, FASTER * args.source_rate_mbit
    several = {"nodes": args.source_nodes, "rate_mbit": slow, "sources": max(args.sources), "nodes_mbit": fast}
    # Nodes of a gloo job can use the relay, too.
    with tempfile.TemporaryDirectory() as path, closing(WeightRig(Path(path), most, args.rate_mbit, "gloo")) as rig:
        result |= one_source(args, rig)
    with tempfile.TemporaryDirectory() as path, closing(WeightRig(Path(path), **several)) as rig:
        result["sources"] = several_sources(args, rig)
    return result
