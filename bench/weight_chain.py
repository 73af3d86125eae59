"""The relay between hosts with slow cables: python bench/weight_chain.py [--mib 24] [--nodes 1 2 4 8] [--rounds 3].

Needs root and network namespaces, as tests/cluster/hosts.py does. Real publisher, sockets and node processes, each on a
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
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

from common.weights.collectives import silence_bound
from tests.cluster.weight_rig import Publication, WeightRig
from tests.cluster.weight_workers import NodeWorker

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


def publish(rig: WeightRig, way: str, nodes: int, mib: int) -> dict[str, float]:
    """One publisher's first and second version."""
    leading(rig, way, nodes, mib)
    size, ideal_s = mib << 20, rig.ideal_s(mib << 20)
    first, found = rig.spread(size), rig.spread(size)
    return {
        "seconds": found.seconds(rig.nodes[:nodes]),
        "over_ideal": found.seconds(rig.nodes[:nodes]) / ideal_s,
        "first_over_ideal": first.seconds(rig.nodes[:nodes]) / ideal_s,
        "learner_sent_over_size": found.sent(rig.learner_host) / size,
        "received_over_size": max(found.received(node.host) / size for node in rig.nodes[:nodes]),
    }


class Arrivals:
    """When each STEP_BYTES more had arrived at hosts; a thread looks until `end`."""

    def __init__(self, found: Publication, nodes: Sequence[NodeWorker]) -> None:
        self._found, self._nodes, self._ended = found, nodes, threading.Event()
        self._times: dict[str, list[float]] = {node.id: [] for node in nodes}
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            for node in self._nodes:
                times, now = self._times[node.id], time.time()
                times += [now] * (self._found.received(node.host) // STEP_BYTES - len(times))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def again_s(self, at_s: float) -> float:
        """Seconds from `at_s` until the last host received again; 0 when none was stalled.

        A host's stall is its longest gap of those that begin within UNDER_WAY_S: later ones are not the fault's.
        """
        ends = [0.0]
        for times in self._times.values():
            pairs = [(a, b) for a, b in itertools.pairwise(times) if b > at_s and a < at_s + UNDER_WAY_S]
            longest, end = max(((b - a, b) for a, b in pairs), default=(0.0, at_s))
            ends.append(end - at_s if longest > STALLED_S else 0.0)
        return max(ends)


def death(rig: WeightRig, signal_name: str, nodes: int, mib: int) -> dict[str, float]:
    """A node that passes a version on dies when it has half of it."""
    bound_s = silence_bound(leading(rig, "relay", nodes, mib))
    size, fault = mib << 20, FAULTS[signal_name]
    rig.spread(size)
    quiet, fleet = rig.spread(size), rig.nodes[:nodes]
    usual = {host.name: (quiet.received(host), quiet.sent(host)) for host in (rig.learner_host, *rig.hosts)}
    forwarding = [node for node in fleet if usual[node.host.name][1] > size / 2] or fleet
    victim = forwarding[len(forwarding) // 2]
    others = [node for node in fleet if node is not victim]
    found = rig.publish(size)
    arrivals = Arrivals(found, others)
    try:
        found.reaches(victim.host, 0.5)
        struck = time.time()
        rig.strike(fault, victim)
        all_have_it_s = found.began + found.seconds(others) - struck
    finally:
        arrivals.end()
    twice = max(found.received(node.host) - usual[node.host.name][0] for node in others)
    learner_more = found.sent(rig.learner_host) - usual[rig.learner_host.name][1]
    rig.heal(fault, victim).active(found.version)
    return {
        "receives_again_s": arrivals.again_s(struck),
        "bound_s": bound_s,
        "all_have_it_s": all_have_it_s,
        "seconds": found.seconds(others),
        "over_ideal": found.seconds(others) / rig.ideal_s(size),
        "twice_bytes": max(0, twice),
        "learner_more_bytes": max(0, learner_more),
    }


def encoded(rig: WeightRig, encoding: str, nodes: int, mib: int) -> dict[str, float]:
    """A version in which few elements changed."""
    leading(rig, "relay", nodes, mib, encoding=encoding)
    size = mib << 20
    rig.spread(size)
    found = rig.spread(size, changed=CHANGED)
    return {
        "seconds": found.seconds(rig.nodes[:nodes]),
        "over_ideal": found.seconds(rig.nodes[:nodes]) / rig.ideal_s(size),
        "learner_sent_over_size": found.sent(rig.learner_host) / size,
    }


def shared(rig: WeightRig, sources: int, nodes: int, mib: int) -> dict[str, float]:
    """A version that the sources send together, each its own part."""
    leading(rig, "relay", nodes, mib, sources)
    size = mib << 20
    rig.spread(size)
    found = rig.spread(size)
    return {
        "seconds": found.seconds(rig.nodes[:nodes]),
        "over_ideal": found.seconds(rig.nodes[:nodes]) / rig.ideal_s(size),
        "learner_sent_over_size": found.sent(rig.learner_host) / size,
        "most_sent_over_size": max(found.sent(host) for host in (rig.learner_host, *rig.source_hosts)) / size,
    }


def over_one(found: dict[Any, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """The rows of `shared`. Every round's time is compared with that of the first row, which has one source."""
    one = [figures["seconds"] for figures in next(iter(found.values()))]
    for rounds in found.values():
        for figures, seconds in zip(rounds, one, strict=True):
            figures["over_one"] = figures["seconds"] / seconds
    ratios = [[figures["over_one"] for figures in rounds] for rounds in found.values()]
    return [
        row | {"over_one_least": round(min(each), 4), "over_one_most": round(max(each), 4)}
        for row, each in zip(rows(found, ("sources", "nodes", "mib")), ratios, strict=True)
    ]


def rows(found: dict[Any, list[dict[str, float]]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each way: its names, medians, and the best and worst `seconds` of the rounds."""
    return [
        {
            **dict(zip(names, way, strict=True)),
            **{name: round(statistics.median(r[name] for r in rounds), 4) for name in rounds[0]},
            "best_s": round(min(r["seconds"] for r in rounds), 4),
            "worst_s": round(max(r["seconds"] for r in rounds), 4),
            "rounds_s": [round(r["seconds"], 4) for r in rounds],
        }
        for way, rounds in found.items()
    ]


def one_source(args: Any) -> dict[str, Any]:
    """Runs, deaths and deltas."""
    runs = [("relay", nodes, args.mib) for nodes in args.nodes]
    once = [(way, args.others_nodes, args.mib) for way in ("gloo", "star")]
    once += [("relay", nodes, args.large_mib) for nodes in args.large_nodes]
    deaths = [(name, args.death_nodes, args.mib) for name in FAULTS]
    deltas = [(encoding, args.delta_nodes, args.delta_mib) for encoding in ("full", "delta")]
    most = max(*args.nodes, *args.large_nodes, args.others_nodes, args.death_nodes, args.delta_nodes)
    turns, result = range(args.rounds), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        rig = WeightRig(Path(folder), most, args.rate_mbit, transport="gloo")  # nodes that can use the relay, too
        try:
            found = harness.in_turns(runs, turns, lambda run, _: publish(rig, *run))
            found |= harness.in_turns(once, [0], lambda run, _: publish(rig, *run))
            result["runs"] = rows(found, ("way", "nodes", "mib"))
            found = harness.in_turns(deaths, turns, lambda run, _: death(rig, *run))
            result["deaths"] = rows(found, ("signal", "nodes", "mib"))
            rig.slow(args.delta_rate_mbit)
            found = harness.in_turns(deltas, turns, lambda run, _: encoded(rig, *run))
            result["deltas"] = rows(found, ("encoding", "nodes", "mib"))
        finally:
            rig.close()
    return result


def several_sources(args: Any) -> list[dict[str, Any]]:
    runs, rates = [(sources, args.source_nodes, args.mib) for sources in args.sources], args.source_rate_mbit
    with tempfile.TemporaryDirectory() as folder:
        rig = WeightRig(Path(folder), args.source_nodes, rates, sources=max(args.sources), nodes_mbit=FASTER * rates)
        try:
            return over_one(harness.in_turns(runs, range(args.rounds), lambda run, _: shared(rig, *run)))
        finally:
            rig.close()


def main() -> None:
    args = harness.parser(
        __doc__, mib=24, nodes=[1, 2, 4, 8], large_mib=100, large_nodes=[1, 8], others_nodes=4, rate_mbit=40.0,
        rounds=3, death_nodes=4, delta_nodes=8, delta_mib=100, delta_rate_mbit=100.0, sources=[1, 2, 4],
        source_nodes=2, source_rate_mbit=20.0,
    ).parse_args()  # fmt: skip
    result = {"rounds": args.rounds, "changed": CHANGED, **one_source(args), "sources": several_sources(args)}
    harness.save("weight_chain", args, result, ("torch", "pyzmq"))


if __name__ == "__main__":
    main()
