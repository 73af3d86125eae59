"""Who fetches what from whom: a payload goes from node to node, and around those that fail.

Nodes that get the same payload form a chain: the learner, the first node, the second ... Every node passes pieces on
while the next ones arrive. Nodes of one machine are neighbours, so that one copy crosses its link; a newcomer hangs on
at an end. When a node is gone, those who fetch from it go on at its own source. A node that gets nothing, or not what
was sent, says so (Stalled) and is led around its source. Only the first of those who stand still is, since the others
wait for it.
"""

import heapq
import ipaddress
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec import structs

from common.process.local_address import host_and_port
from common.weights.source.nodes import NodeState, NodeView
from common.weights.source.snapshot import Payload, Snapshot
from common.weights.transports.relay import RelayServer
from common.weights.wire.layout import WORDS
from common.weights.wire.messages import LearnerMessage, Reroute, Serve, Stalled
from common.weights.wire.pieces import PartBuffer

logger = logging.getLogger(__name__)

GRACE_S = 0.5  # that a silent source has for saying that it waits itself.
STALE_S = 2.5  # until a Stalled that was not repeated is over; nodes repeat it every second.
RESUME_S = 3.5  # that the learner's own server may be silent before a node connects anew.
OWN_ATTEMPT = 2  # failed attempts at a version, after which a node gets it from the learner itself
HANDOVER_S = 2.0  # that a node with a version serves it to others before it gets the next one.

Send = Callable[[bytes, LearnerMessage], object]
Place = tuple[int, bool, int, bytes]  # the smallest of an end's is best; the last one is the node


@dataclass
class Standstill:
    since: float
    heard: float  # when the node said it last
    said: Stalled
    times: int = 1  # that the node said it

    def is_at(self, said: Stalled) -> bool:
        return (self.said.source, self.said.pieces) == (said.source, said.pieces)


@dataclass(eq=False)
class Link:
    """A node in a chain. `sources` are connections of other nodes by part; None: where the part comes from."""

    view: NodeView
    epoch: int
    sources: list[bytes | None]
    number: int = 0  # in the order in which they began
    done: float | None = None  # when it had everything, perf_counter seconds
    waiting: dict[int, Standstill] = field(default_factory=lambda: dict[int, Standstill]())
    rerouted: dict[int, float] = field(default_factory=lambda: dict[int, float]())  # by part: when it was led around
    avoided: set[bytes] = field(default_factory=lambda: set[bytes]())


@dataclass(eq=False)
class Chain:
    """The nodes that get one payload, in the order in which they began. Its calls take no time that grows with it."""

    snapshot: Snapshot
    payload: Payload
    late: set[str]  # ids of nodes that serve nothing before they have everything
    links: dict[bytes, Link] = field(default_factory=lambda: dict[bytes, Link]())  # only `add` and `remove` change it
    poor: set[bytes] = field(default_factory=lambda: set[bytes]())  # nodes that did not serve it well
    served: list[PartBuffer] = field(default_factory=lambda: list[PartBuffer]())  # by the learner
    failed: bool = False  # an attempt failed, and its node was blamed for those behind it
    standing: set[bytes] = field(default_factory=lambda: set[bytes]())  # nodes with parts that stand still
    open: int = 0  # nodes that do not have everything
    followers: dict[bytes, dict[bytes, None]] = field(default_factory=lambda: defaultdict(dict[bytes, None]))
    load: Counter[bytes] = field(default_factory=lambda: Counter[bytes]())  # how many open nodes fetch from a node
    # By machine, and of all: the ends of the chain, the best first, and places that nodes had before.
    _ends: dict[str | None, list[Place]] = field(default_factory=lambda: defaultdict(list[Place]))
    _began: int = 0

    def add(self, node: bytes, link: Link) -> None:
        self._began += 1
        link.number = self._began
        self.links[node] = link
        self._count(node, link, +1)

    def remove(self, node: bytes) -> Link | None:
        """A node fetches nothing more; the caller leads its followers elsewhere."""
        link = self.links.pop(node, None)
        if link is not None:
            self._count(node, link, -1)
        return link

    @contextmanager
    def changing(self, node: bytes) -> Generator[Link]:
        """Let a node have another source or, at last, everything."""
        link = self.links[node]
        self._count(node, link, -1)
        yield link
        self._count(node, link, +1)

    def end(self, machine: str) -> bytes | None:
        """An end of the chain for one more node, best of its own machine; None: there is none."""
        for ends in (self._ends[machine], self._ends[None]):
            while ends:
                if self._place(ends[0][-1]) == ends[0]:
                    return ends[0][-1]
                heapq.heappop(ends)
        return None

    def _count(self, node: bytes, link: Link, change: int) -> None:
        """Count a node here and at its sources (1), or no more (-1)."""
        sources = {source for source in link.sources if source is not None}
        for source in sources:
            if change > 0:
                self.followers[source][node] = None
            else:
                del self.followers[source][node]
            self.load[source] += change if link.done is None else 0
        self.open += change if link.done is None else 0
        for one in (*sources, node):
            if (place := self._place(one)) is not None:
                heapq.heappush(self._ends[self.links[one].view.machine], place)
                heapq.heappush(self._ends[None], place)

    def _place(self, node: bytes) -> Place | None:
        link = self.links.get(node)
        if link is None or not link.view.address or node in self.poor:
            return None
        if link.done is None and link.view.node_id in self.late:
            return None
        return self.load[node], link.done is None, -link.number, node

    def address(self, part: int, source: bytes | None) -> str:
        node = self.links[source].view.address if source is not None else None
        return node or self.payload.parts[part].origin

    def above(self, link: Link, part: int, source: bytes | None) -> bytes | None:
        """The first of `source` and its own sources that `link` can fetch from; None: where the part comes from."""
        for _ in range(len(self.links)):
            if source is None or source not in self.links:
                return None
            if source not in link.avoided | self.poor and not self.waits_for(source, part, link):
                return source
            source = self.links[source].sources[part]
        return None

    def waits_for(self, node: bytes | None, part: int, link: Link) -> bool:
        """Whether what `node` fetches comes from `link`, or it is that node itself."""
        for _ in range(len(self.links)):
            if node == link.view.identity:
                return True
            if node is None or node not in self.links or self.links[node].done is not None:
                return False
            node = self.links[node].sources[part]
        return False


class Chains:
    """Used by the control thread; times are perf_counter seconds."""

    def __init__(self, host: str, incarnation: int, send: Send, password: str = "") -> None:
        """`send` brings a message to a node. The learner's own server starts with the first payload."""
        self._host = host
        self._incarnation = incarnation
        self._send = send
        self._password = password
        self._server: RelayServer | None = None
        self._chains: list[Chain] = []
        self._unreached: set[bytes] = set()  # nodes from which another one never got anything
        self._late: set[str] = set()  # ids of nodes that kept those behind them from a version; they go last
        self._now = 0.0  # at the last tick
        self.rate = 0.0  # bytes/s at which the newest payload arrived

    def origin(self) -> str:
        """Where the learner serves its parts; raises zmq.ZMQError when no port can be bound."""
        if self._server is None:
            self._server = RelayServer(self._host, self._password)
        return self._server.address

    def begin(
        self, snapshot: Snapshot, payload: Payload, view: NodeView, *, epoch: int, everyone: Iterable[NodeView]
    ) -> list[str]:
        """A node's place in the payload's chain: where it fetches every part from."""
        self.leave(view.identity)  # its buffer is written from now on
        chain = next((c for c in self._chains if c.payload is payload), None)
        if chain is None:
            chain = Chain(snapshot, payload, self._late, poor=set(self._unreached))
            self._chains.append(chain)
            for part, own in zip(payload.parts, payload.in_host, strict=False):  # those of other sources come later
                if self._server is not None and part.origin == self._server.address:
                    chain.served.append(PartBuffer(structs.replace(part, start=0), own))
                    self._server.offer(chain.served[-1])
        source = None
        if view.route.failures_at(snapshot.version) < OWN_ATTEMPT:
            source = chain.end(view.machine) or self._holder(chain, view, everyone)
        chain.add(view.identity, Link(view, epoch, [source] * len(payload.parts)))
        return [chain.address(part, source) for part in range(len(payload.parts))]

    def _holder(self, chain: Chain, view: NodeView, everyone: Iterable[NodeView]) -> bytes | None:
        """An idle node that has the whole version from elsewhere and is told to serve it; None: there is none."""
        version = chain.snapshot.version
        fit = [
            r for r in everyone
            if r.state is NodeState.IDLE and (r.version, r.base) == (version, version) and r.address
            and r.identity != view.identity and r.identity not in chain.poor
        ]  # fmt: skip
        if not fit or chain.payload is not chain.snapshot.full or chain.snapshot.layout.checksums == WORDS:
            return None  # no node serves from device memory
        holder = min(fit, key=lambda r: r.machine != view.machine)
        for part in chain.payload.parts:
            self._send(holder.identity, Serve(self._incarnation, version, structs.replace(part, digests=b"")))
        chain.remove(holder.identity)
        chain.add(holder.identity, Link(holder, -1, [None] * len(chain.payload.parts), done=float("-inf")))
        return holder.identity

    def staged(self, node: bytes, now: float, receive_s: float) -> None:
        """A node has everything; it stays a source."""
        for chain in self._chains:
            if (link := chain.links.get(node)) is not None and link.done is None:
                with chain.changing(node):
                    link.done = now
                link.waiting.clear()
                self.rate = chain.payload.size / max(receive_s, 1e-6)

    def leave(self, node: bytes, failed: bool = False) -> None:
        """A node has the payload no more, or its attempt failed. The first to fail delayed those behind it."""
        for chain in self._chains:
            gone = chain.remove(node)
            if gone is None:
                continue
            if failed:
                chain.poor |= {s for s in gone.sources if s in chain.links and chain.links[s].done is not None}
                if not chain.failed:
                    chain.failed = True
                    self._late.add(gone.view.node_id)
            for follower in list(chain.followers[node]):
                link = chain.links[follower]
                for part, source in enumerate(link.sources):
                    if source == node:
                        self._reroute(chain, link, part, gone.sources[part])

    def stalled(self, node: bytes, said: Stalled, now: float) -> None:
        for chain in self._chains:
            link = chain.links.get(node)
            if link is None or link.done is not None or link.epoch != said.epoch or said.part >= len(link.sources):
                continue
            chain.standing.add(node)
            old = link.waiting.get(said.part)
            if old is not None and now - old.heard < STALE_S and old.is_at(said):
                link.waiting[said.part] = Standstill(since=old.since, heard=now, said=said, times=old.times + 1)
            else:
                link.waiting[said.part] = Standstill(since=now, heard=now, said=said)

    def tick(self, now: float) -> None:
        """Lead the nodes that stand still around their sources."""
        self._now = now
        for chain in self._chains:
            chain.standing = {n for n in chain.standing if n in chain.links and chain.links[n].waiting}
            for link in sorted((chain.links[node] for node in chain.standing), key=lambda link: link.number):
                for part, waiting in list(link.waiting.items()):
                    if now - waiting.heard > STALE_S:
                        del link.waiting[part]
                    else:
                        self._look(chain, link, part, waiting, now)

    def _look(self, chain: Chain, link: Link, part: int, waiting: Standstill, now: float) -> None:
        source = link.sources[part]
        if waiting.said.source != chain.address(part, source):
            if waiting.times > 1:  # it does not know its source; else the message about that is on its way
                self._reroute(chain, link, part, source)
            return
        if source is None:
            if now - waiting.since > (RESUME_S if not waiting.said.reason else STALE_S):
                holders = (n for n, one in chain.links.items() if one.done is not None and one.view.address)
                usable = (node for node in holders if chain.above(link, part, node) == node)
                self._reroute(chain, link, part, next(usable, None))
            return
        if waiting.said.reason:
            chain.poor.add(source)
        elif now - waiting.since < GRACE_S or part in chain.links[source].waiting:
            return
        elif now - chain.links[source].rerouted.get(part, float("-inf")) < STALE_S:
            return  # its source was led around another one, and has pieces soon
        if not (waiting.said.reason or waiting.said.pieces):
            self._unreached.add(source)
        link.avoided.add(source)
        told = waiting.said
        why = told.reason or "silent"
        logger.warning("node %s gets nothing from %s (%s); it continues elsewhere", link.view.node_id, told.source, why)
        self._reroute(chain, link, part, source)

    def _reroute(self, chain: Chain, link: Link, part: int, source: bytes | None) -> None:
        """Let a node fetch a part from `source`, or from the first above it that serves."""
        source = chain.above(link, part, source)
        with chain.changing(link.view.identity):
            link.sources[part] = source
        if link.done is None:
            link.waiting.pop(part, None)
            link.rerouted[part] = self._now
            self._send(link.view.identity, Reroute(link.epoch, part, chain.address(part, source)))

    def in_order(self, nodes: Iterable[NodeView]) -> list[NodeView]:
        """By network address and machine, so that neighbours are near each other; those that were late before last."""
        return sorted(nodes, key=lambda view: (view.node_id in self._late, *place(view)))

    def busy(self, node: bytes, now: float) -> bool:
        """Whether it has a version since a moment ago that others still fetch from it."""
        links = ((chain, link) for chain in self._chains if (link := chain.links.get(node)) is not None)
        return any(link.done is not None and now - link.done < HANDOVER_S and chain.load[node] for chain, link in links)

    def tidy(self, current: Snapshot) -> set[int]:
        """Withdraw payloads of older versions that no node fetches; returns the versions that are still served."""
        for chain in list(self._chains):
            if chain.snapshot is not current and not chain.open:
                self._chains.remove(chain)
                if self._server is not None and chain.served:
                    self._server.withdraw(*chain.served)
        return {chain.snapshot.version for chain in self._chains}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def place(view: NodeView) -> tuple[int, bytes, str]:
    """Where a node is; places that are near each other sort together."""
    address = view.address or ""
    try:
        packed = ipaddress.ip_address(host_and_port(address)[0]).packed
    except ValueError:
        packed = address.encode()
    return len(packed), packed, view.machine
