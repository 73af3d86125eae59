"""A learner's publisher and nodes without engines on hosts of their own, with slow cables, and what may befall them.

The learner is on h1, the nodes are on h2, h3, ... in this order, further sources on the hosts behind. Nothing here
looks into a process: a rig reads its events and the bytes that its host's cable has carried.
"""

import itertools
import json
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.security.credentials import KeyFolder
from launch.keys import make
from tests.rigs import weight_processes
from tests.rigs.hosts import Host, hosts, missing, signal_to
from tests.rigs.waiting import LIMIT_S, until
from tests.rigs.weight_processes import value

EVERY_S = 0.002  # between two looks at a counter: 10 kB at 40 Mbit/s
# Collectives and a relay without keys may leave the machine only in a network that the config trusts.
TRUSTED = {"network": "trusted"}


class Worker:
    """A process of weight_processes.py on a host."""

    def __init__(self, kind: str, name: str, host: Host, folder: Path, options: dict[str, Any]) -> None:
        """`name` is that of its files in `folder`."""
        self.name, self.host, self.events = name, host, list[dict[str, Any]]()
        commands, said, self._log = (folder / f"{name}.{end}" for end in ("do", "said", "out"))
        os.mkfifo(commands)
        self._commands, self._said = os.open(commands, os.O_RDWR), said.open("w+b")
        self.process = host.fork(weight_processes.main, kind, str(folder), name, json.dumps(options), log=self._log)

    def tell(self, command: object) -> None:
        os.write(self._commands, json.dumps(command).encode() + b"\n")

    def heard(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """Every event of this kind so far that has these fields."""
        while (line := self._said.readline()).endswith(b"\n"):
            self.events.append(json.loads(line))
        self._said.seek(-len(line), os.SEEK_CUR)  # a line that is not all there yet
        return [e for e in self.events if e["event"] == event and all(e[k] == v for k, v in fields.items())]

    def wait(self, event: str, **fields: object) -> dict[str, Any]:
        """The first event of this kind with these fields, also one of before."""
        what = f"{event} {fields} of {self.name}"
        return until(lambda: self.heard(event, **fields), what, told=self.told, check=self.check, every_s=EVERY_S)[0]

    def check(self) -> None:
        """Raise AssertionError when the process has ended."""
        assert self.process.is_alive(), f"{self.name} has ended\n{self.told()}"

    def told(self) -> str:
        self.heard("")
        log = self._log.read_text(errors="replace")[-3000:]
        return f"{self.name}: {json.dumps(self.events[-20:], indent=1)}\n{log}"

    def kill(self) -> None:
        """It may stand still, or have ended already."""
        if self.process.is_alive():
            signal_to(self.process, signal.SIGKILL)
            self.process.join(LIMIT_S)

    def stop(self) -> None:
        signal_to(self.process, signal.SIGSTOP)

    def go(self) -> None:
        """Let a stopped process run again."""
        signal_to(self.process, signal.SIGCONT)

    def close(self) -> None:
        """After its host's end."""
        self.process.join(LIMIT_S)
        os.close(self._commands)
        self._said.close()


class NodeWorker(Worker):
    """A node; `id` stays when its process is replaced."""

    def __init__(self, node_id: str, name: str, host: Host, folder: Path, options: dict[str, Any]) -> None:
        super().__init__("node", name, host, folder, options | {"id": node_id})
        self.id = node_id

    def active(self, version: int, **fields: object) -> dict[str, Any]:
        """Wait until it runs the version, with its weights."""
        found = self.wait("active", version=version, **fields)
        assert found["value"] == value(version), self.told()
        return found

    def versions(self) -> list[int]:
        """All that it ever ran, in order."""
        return [event["version"] for event in self.heard("active")]


@dataclass(frozen=True)
class Publication:
    """A version on its way, and the bytes that the hosts had carried before it."""

    version: int
    size_bytes: int
    began: float  # unix seconds
    before: dict[str, tuple[int, int]]

    def received(self, host: Host) -> int:
        return host.carried()[0] - self.before[host.name][0]

    def sent(self, host: Host) -> int:
        return host.carried()[1] - self.before[host.name][1]

    def reaches(self, host: Host, share: float) -> None:
        """Wait until the host has received this share of the payload."""
        enough = share * self.size_bytes
        until(lambda: self.received(host) >= enough, f"{share:.0%} at {host.name}", every_s=EVERY_S)

    def seconds(self, nodes: Iterable[NodeWorker]) -> float:
        """From `publish` until the last of these nodes runs the version; waits for that."""
        return max(node.active(self.version)["time"] for node in nodes) - self.began


class WeightRig:
    """The hosts, a learner, and nodes that follow it. `close` ends everything."""

    def __init__(
        self,
        folder: Path,
        nodes: int | Sequence[int] = 3,
        rate_mbit: float = 40.0,
        transport: str = "relay",
        keys: bool = True,
        spare: int = 0,
        sources: int = 1,
        nodes_mbit: float | None = None,
        **weights: Any,
    ) -> None:
        """`nodes`: of each host, an int: one on each of so many. `spare`: more hosts. `weights`: keys of `weights`.

        `sources`: how many processes may send a part of a version, the learner included. `nodes_mbit`: rate of the
        nodes' cables; None: `rate_mbit`, as the learner's and the sources'.
        """
        assert not missing(), missing()
        self.folder, self.transport, self._stack = folder, transport, ExitStack()
        each = [1] * nodes if isinstance(nodes, int) else list(nodes)
        self._workers: list[Worker] = []
        self._stack.callback(self._close_workers)
        made = self._stack.enter_context(hosts(folder, len(each) + spare + sources))
        last = len(each) + spare + 1
        self.learner_host, self.hosts, self.source_hosts = made[0], made[1:last], made[last:]
        self.slow(rate_mbit, nodes_mbit)
        self._weights = {"transport": transport, "address": self.learner_host.address, "anchor_every": 0} | weights
        self._numbers, self._versions, self.incarnation = itertools.count(), itertools.count(1), -1
        places = [(host, f"{host.name}-{i}") for host, n in zip(self.hosts, each, strict=False) for i in range(n)]
        self.keys: KeyFolder | None = None
        if keys:
            self.keys = KeyFolder(folder / "keys")
            names = [f"{host.name}-{i}" for host in self.hosts for i in range(max(each))]
            make(self.keys, names)
        self.sources: list[Worker] = []
        self._sending: list[Worker] = []  # the sources in use
        self._source_options = dict[str, Any]()
        self._shared = False
        self.learner = self.start_learner()
        self.nodes = [self.start_node(*place) for place in places]
        self._leads: dict[str, str] = {}  # addresses of the publishers in use, by name
        self._following: list[NodeWorker] = []

    def slow(self, rate_mbit: float, nodes_mbit: float | None = None) -> None:
        """Limit every cable to this rate, each way; those of the nodes to `nodes_mbit`, if given."""
        self.rate_mbit = rate_mbit
        for host in self.all_hosts:
            rate = rate_mbit if nodes_mbit is None or host not in self.hosts else nodes_mbit
            host.slow(f"{rate:g}mbit", both_ways=True)

    @property
    def all_hosts(self) -> list[Host]:
        return [self.learner_host, *self.hosts, *self.source_hosts]

    # ---------------------------------------------------------------- processes

    def start_learner(self) -> Worker:
        """New processes of the learner and of its sources, without a publisher; the former ones are killed."""
        for former in [w for w in self._workers if not isinstance(w, NodeWorker)]:
            former.kill()
        places = [("learner", self.learner_host), *(("source", host) for host in self.source_hosts)]
        self.learner, *self.sources = (
            Worker(kind, f"{kind}-{next(self._numbers)}", host, self.folder, {}) for kind, host in places
        )
        self._workers += [self.learner, *self.sources]
        self._leads, self._sending = {}, []
        return self.learner

    def start_node(self, host: Host, node_id: str) -> NodeWorker:
        """A node's process that follows no learner yet and is not in `nodes`."""
        options = {"transport": self.transport}
        if self.keys is not None:
            options["credentials"] = str(self.keys.nodes / f"{node_id}.json")
        node = NodeWorker(node_id, f"{node_id}.{next(self._numbers)}", host, self.folder, options)
        self._workers.append(node)
        return node

    def lead(
        self,
        nodes: Sequence[NodeWorker] | None = None,
        star: bool = False,
        sources: int | None = None,
        **weights: Any,
    ) -> None:
        """Start a publisher under the next incarnation and let nodes follow it; returns when all have joined.

        `weights` are further keys. With `star` there is a publisher for each node. `sources`: how many send parts, the
        learner included; None: all. The former publishers close.
        """
        self._following = list(self.nodes if nodes is None else nodes)
        self.incarnation += 1
        self.close_publishers()
        self._sending, self._shared = self.sources[: None if sources is None else sources - 1], False
        names = [f"{self.incarnation}.{i}" for i in range(len(self._following) if star else 1)]
        credentials = str(self.keys.path) if self.keys is not None else None
        weights = self._weights | weights
        weights |= TRUSTED if weights["transport"] != "relay" or self.keys is None else {}
        self._source_options = {"weights": weights, "credentials": credentials}
        common = {"do": "start", "incarnation": self.incarnation, "credentials": credentials, "weights": weights}
        for name in names:
            self.learner.tell(common | {"name": name})
        self._leads = {name: self.learner.wait("listening", name=name)["address"] for name in names}
        for node in self._following:
            node.wait("up")
        for node, name in zip(self._following, itertools.cycle(names), strict=False):
            self.follow(node, name)
        for name in names:
            self.joined(1 if star else len(self._following), name)

    def close_publishers(self) -> None:
        if self._leads:
            options = {"names": list(self._leads)}
            self._all_ranks("close", "closed", options, **options)
        self._leads = {}

    def _all_ranks(self, command: str, event: str, options: dict[str, Any], **fields: object) -> list[dict[str, Any]]:
        """Tell the learner and the sources in use a command at once, and wait for the event of each."""
        ranks = [self.learner, *self._sending]
        for rank in ranks:
            rank.tell({"do": command} | options)
        return [rank.wait(event, **fields) for rank in ranks]

    def follow(self, node: NodeWorker, name: str | None = None) -> None:
        """Tell a node the address of a publisher, the first by default, as the broker would."""
        name = next(iter(self._leads)) if name is None else name
        node.tell([self._leads[name], self.incarnation])

    def stats(self, name: str | None = None) -> dict[str, Any]:
        """The newest figures of a publisher, the first by default."""
        found = self.learner.heard("stats", name=next(iter(self._leads)) if name is None else name)
        return found[-1] if found else {}

    def joined(self, count: int, name: str | None = None) -> None:
        """Wait until a publisher has so many nodes."""
        what = f"{count} nodes of the learner"
        until(lambda: self.stats(name).get("nodes") == count, what, told=self.told, check=self.learner.check)

    def told(self) -> str:
        return "\n".join(worker.told() for worker in self._workers)

    # ---------------------------------------------------------------- versions

    def publish(self, size_bytes: int, changed: float | None = None) -> Publication:
        """Publish the next version: random, or with this share of changed elements."""
        version = next(self._versions)
        ranks, given = [self.learner, *self._sending], {"size_bytes": size_bytes, "sources": 1 + len(self._sending)}
        if self._sending and not self._shared:
            self._share(given)
        for number, rank in enumerate(ranks):
            rank.tell({"do": "make", "version": version, "changed": changed, "number": number} | given)
        for rank in ranks:
            rank.wait("made", version=version)
        before = {host.name: host.carried() for host in self.all_hosts}
        options = {"names": list(self._leads), "version": version}
        began = min(e["time"] for e in self._all_ranks("publish", "published", options, version=version))
        return Publication(version, size_bytes, began, before)

    def _share(self, given: dict[str, Any]) -> None:
        """Let every source send a part of its own from the first version on."""
        (name,) = self._leads
        self.learner.tell({"do": "share", "name": name} | given)
        lead = self.learner.wait("shared", name=name)["lead"]
        for number, source in enumerate(self._sending, 1):
            weights = self._source_options["weights"] | {"address": source.host.address}
            options = self._source_options | {"weights": weights} | given
            source.tell({"do": "start", "number": number, "lead": lead} | options)
            source.wait("started", incarnation=self.incarnation)
        self._shared = True

    def spread(self, size_bytes: int, changed: float | None = None) -> Publication:
        """Publish the next version and wait until every node runs it, and the learner knows that."""
        found = self.publish(size_bytes, changed)
        found.seconds(self._following)
        for name in self._leads:
            told = f"version {found.version} to be active everywhere"
            until(lambda: self.stats(name).get("version_active") == found.version, told, told=self.told)  # noqa: B023
        return found

    def ideal_s(self, size_bytes: int) -> float:
        """Seconds in which a cable carries so many bytes, without headers."""
        return size_bytes * 8e-6 / self.rate_mbit

    # ---------------------------------------------------------------- faults

    def strike(self, fault: str, worker: Worker) -> None:
        """Do this to a node or a source: kill its process, stop it, or cut its host's cable."""
        {"kill": worker.kill, "stop": worker.stop, "cut": worker.host.cut}[fault]()

    def end(self, fault: str, worker: Worker) -> None:
        """End a stop or a cut."""
        {"stop": worker.go, "cut": worker.host.mend}[fault]()

    def heal(self, fault: str, node: NodeWorker) -> NodeWorker:
        """End the fault; a killed node is replaced by a new process, which joins. Returns the node of now."""
        if fault != "kill":
            self.end(fault, node)
            return node
        new = self.start_node(node.host, node.id)
        self.nodes[self.nodes.index(node)] = new
        self._following[self._following.index(node)] = new
        new.wait("up")
        self.follow(new)
        return new

    def close(self) -> None:
        self._stack.close()

    def _close_workers(self) -> None:
        for worker in self._workers:
            worker.close()
