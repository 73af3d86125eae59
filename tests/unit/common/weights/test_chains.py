"""Chains: who fetches from whom, who is led around whom, and that no node waits for itself."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from common.weights.source import chains
from common.weights.source.chains import GRACE_S, HANDOVER_S, RESUME_S, STALE_S, Chain, Chains
from common.weights.source.nodes import NodeState, NodeView, Route
from common.weights.source.snapshot import Payload, Snapshot
from common.weights.wire.messages import Reroute, Serve, Stalled
from common.weights.wire.pieces import PartBuffer
from tests.unit.common.weights.node_views import address_of, make_parts, newcomer, settled, snapshot_of

ORIGIN, OTHER = "tcp://origin:1", "tcp://other:1"


class Server:
    """Notes what it offers instead of serving it."""

    offered: list[str] = []  # by all of them

    def __init__(self, host: str, password: str) -> None:
        self.address = ORIGIN
        self.closed = False

    def offer(self, buffer: PartBuffer) -> None:
        self.offered.append(buffer.part.name)

    def withdraw(self, *buffers: PartBuffer) -> None:
        for buffer in buffers:
            self.offered.remove(buffer.part.name)

    def close(self) -> None:
        self.closed = True


class Plane:
    """Chains, the nodes in them, and what they were told last."""

    def __init__(self, version: int = 4, origins: tuple[str, ...] = (ORIGIN,)) -> None:
        self.chains = Chains("127.0.0.1", 0, self.send)
        assert self.chains.origin() == ORIGIN
        self.sent: list[tuple[str, Any]] = []
        self.nodes: dict[str, NodeView] = {}
        self.epochs: dict[str, int] = {}
        self.sources: dict[str, list[str]] = {}  # as the nodes know them
        self.new_version(version, origins)

    def new_version(self, version: int, origins: tuple[str, ...] = (ORIGIN,)) -> Snapshot:
        self.snapshot = snapshot_of(version)
        make_parts(self.snapshot, *origins)
        self.payload = self.snapshot.full
        return self.snapshot

    def send(self, node: bytes, message: Any) -> None:
        name = node.decode()
        self.sent.append((name, message))
        if isinstance(message, Reroute):
            assert message.epoch == self.epochs[name]
            self.sources[name][message.part] = message.source

    def told(self) -> list[tuple[str, Any]]:
        """Messages since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def begin(self, name: str, **changes: Any) -> list[str]:
        """The node gets the payload from now on; the names of its sources by part, '' for where a part comes from."""
        self.nodes[name] = settled(name, **{"version": 3, "state": NodeState.STAGING, **changes})
        self.epochs[name] = self.epochs.get(name, 10 * len(self.nodes)) + 1
        everyone = self.nodes.values()
        epoch = self.epochs[name]
        began = self.chains.begin(self.snapshot, self.payload, self.nodes[name], epoch=epoch, everyone=everyone)
        self.sources[name] = began
        return [self.name(source) for source in began]

    def name(self, address: str) -> str:
        return address.removeprefix("tcp://").removesuffix(":7") if address not in (ORIGIN, OTHER) else ""

    def staged(self, name: str, now: float = 0.0) -> None:
        self.chains.staged(name.encode(), now, 2.0)

    def leave(self, name: str, failed: bool = False) -> None:
        self.chains.leave(name.encode(), failed)

    def stalls(self, name: str, *times: float, reason: str = "", part: int = 0, **changes: Any) -> None:
        """The node says at these times that nothing comes from its source."""
        said = {"epoch": self.epochs[name], "source": self.sources[name][part], "pieces": 0} | changes
        for now in times:
            self.chains.stalled(name.encode(), Stalled(name, part=part, reason=reason, **said), now)

    def goes_on_at(self, now: float) -> dict[str, str]:
        """The nodes that are rerouted by a look at this time, and where to."""
        self.told()
        self.chains.tick(now)
        return {name: self.name(message.source) for name, message in self.told() if isinstance(message, Reroute)}


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(chains, "RelayServer", Server)
    monkeypatch.setattr(Server, "offered", [])
    yield Server.offered


@pytest.fixture
def plane() -> Plane:
    return Plane()


@pytest.fixture
def abcd(plane: Plane) -> Plane:
    """A chain of four that has just begun."""
    assert [plane.begin(name) for name in "abcd"] == [[""], ["a"], ["b"], ["c"]]
    return plane


# ---------------------------------------------------------------- places


def test_nodes_that_are_near_each_other_are_neighbours(plane: Plane) -> None:
    places = ["tcp://[fd00::1]:7", "tcp://10.0.0.10:7", "tcp://10.0.0.9:9", "", "tcp://10.0.0.9:8", "tcp://node:1"]
    nodes = [newcomer(str(n), address=place, machine="zyxwvu"[n]) for n, place in enumerate(places)]
    order = plane.chains.in_order([*nodes, newcomer("late")])
    assert [r.node_id for r in order] == ["late", "3", "4", "2", "1", "5", "0"]


def test_nodes_of_a_payload_form_one_chain_whose_first_part_is_offered_once(plane: Plane, offered: list[str]) -> None:
    assert [plane.begin(name) for name in "abc"] == [[""], ["a"], ["b"]]
    assert plane.sources["a"] == [ORIGIN] and plane.sources["c"] == [address_of("b")]
    assert offered == ["v4p0"]
    plane.payload = Payload(plane.snapshot.flat, 64, [], parts=plane.payload.parts)
    assert plane.begin("d") == [""], "another payload has a chain of its own"


def test_nodes_of_one_machine_are_neighbours_and_a_newcomer_hangs_on_at_an_end(plane: Plane) -> None:
    assert plane.begin("a", machine="m") == [""]
    assert plane.begin("x", machine="n") == ["a"]
    assert plane.begin("b", machine="m") == ["a"]
    assert plane.begin("c", machine="m") == ["b"]
    assert plane.begin("y", machine="o") == ["c"], "the newest of those from whom nobody fetches"
    for name in ("x", "y"):
        plane.staged(name)
    assert plane.begin("late", machine="p") == ["y"], "rather where everything is"
    assert plane.begin("later", machine="p") == ["late"]
    assert plane.begin("last", machine="q") == ["x"]


def test_nobody_fetches_from_a_node_that_serves_nowhere(plane: Plane) -> None:
    assert plane.begin("a", address=None) == plane.begin("b", address="") == plane.begin("c") == [""]
    assert plane.begin("d") == ["c"]


def test_a_node_that_failed_at_this_version_gets_it_from_the_learner_and_others_may_fetch_from_it(plane: Plane) -> None:
    plane.begin("a")
    assert plane.begin("b", route=Route(2, 4)) == [""]
    assert plane.begin("c", route=Route(1, 3)) == ["b"], "failures at another version do not count"


def test_an_idle_node_with_that_very_version_is_told_to_serve_it_without_the_digests(plane: Plane) -> None:
    idle = settled("idle", 4)
    plane.nodes = {
        r.node_id: r
        for r in [
            *(settled(state.name, 4, state=state) for state in NodeState if state is not NodeState.IDLE),
            *(settled("old", 3), settled("written", 4, base=-1), settled("mute", 4, address=""), idle),
        ]
    }
    assert plane.begin("new") == ["idle"]
    [(node, serve)] = plane.told()
    part = plane.payload.parts[0]
    assert (node, serve) == ("idle", Serve(0, 4, serve.part))
    assert (serve.part.name, serve.part.size, serve.part.key, serve.part.digests) == (part.name, part.size, b"", b"")
    assert plane.begin("next") == ["new"] and not plane.told(), "it is in the chain now"
    plane.stalls("new", 0.0, reason="not what was sent")
    assert plane.goes_on_at(0.0) == {"new": ""}
    for name in ("next", "new"):
        plane.leave(name)
    assert plane.begin("later") == [""] and not plane.told(), "it did not serve well"


def test_a_node_cannot_serve_a_delta_that_it_did_not_get_and_never_itself(plane: Plane) -> None:
    plane.nodes["idle"] = settled("idle", 4)
    assert plane.begin("idle", state=NodeState.IDLE, version=4, base=4) == [""]
    whole = plane.payload
    plane.payload = Payload(whole.flat, 64, [], 3, parts=whole.parts)
    plane.nodes["other"] = settled("other", 4)
    assert plane.begin("a") == [""] and not plane.told()


def test_a_node_of_the_same_machine_is_the_better_one_to_serve(plane: Plane) -> None:
    for name in "pq":
        plane.nodes[name] = settled(name, 4, machine=name)
    assert plane.begin("new", machine="q") == ["q"]


# ---------------------------------------------------------------- nodes that go


def test_those_behind_a_node_that_leaves_go_on_at_its_source(abcd: Plane) -> None:
    abcd.leave("b")
    assert abcd.told() == [("c", Reroute(abcd.epochs["c"], 0, address_of("a")))]
    abcd.leave("a")
    assert abcd.told() == [("c", Reroute(abcd.epochs["c"], 0, ORIGIN))]
    abcd.staged("d")
    abcd.leave("c")
    assert not abcd.told(), "d has everything"
    abcd.leave("stranger")
    assert abcd.begin("b") == ["d"]


def test_a_node_that_gets_the_next_version_serves_the_last_one_no_more(abcd: Plane) -> None:
    for name in "ab":
        abcd.staged(name)
    abcd.new_version(5)
    assert abcd.begin("b") == [""]
    assert abcd.sources["c"] == [address_of("a")]


def test_a_whole_source_of_a_node_that_failed_is_not_used_again(abcd: Plane) -> None:
    abcd.staged("b")
    abcd.leave("c", failed=True)
    assert abcd.sources["d"] == [address_of("a")], "b may be what was wrong"
    abcd.leave("d")
    assert abcd.begin("f") == ["a"]


def test_the_first_node_to_fail_goes_last_from_then_on_and_serves_only_what_it_has(abcd: Plane) -> None:
    for name in "abcd":  # all of them ran out of time
        abcd.leave(name, failed=True)
    nodes = abcd.chains.in_order([abcd.nodes[name] for name in "abcd"])
    assert [node.node_id for node in nodes] == ["b", "c", "d", "a"]
    assert [abcd.begin(name, route=Route(1, 4)) for name in "bcdae"] == [[""], ["b"], ["c"], ["d"], ["d"]]
    abcd.staged("a")
    assert abcd.begin("f") == ["a"]


# ---------------------------------------------------------------- nodes that stand still


def test_only_the_first_of_those_who_stand_still_is_led_around_its_silent_source(abcd: Plane) -> None:
    for name in "cd":
        abcd.stalls(name, 10.0)
    assert abcd.goes_on_at(10.0 + GRACE_S / 2) == {}, "b may say that it waits itself"
    assert abcd.goes_on_at(10.0 + GRACE_S) == {"c": "a"}
    assert abcd.goes_on_at(10.1 + GRACE_S) == {}, "d waited for c, which goes on"


def test_a_silent_source_that_waits_itself_is_not_blamed(abcd: Plane) -> None:
    for name in "bcd":
        abcd.stalls(name, 10.0, 11.0)
    assert abcd.goes_on_at(11.0) == {"b": ""}


def test_a_node_from_which_another_never_got_anything_serves_no_later_version(abcd: Plane) -> None:
    abcd.stalls("b", 0.0, 1.0, pieces=3)
    abcd.stalls("c", 10.0, 11.0)
    assert abcd.goes_on_at(1.0) | abcd.goes_on_at(11.0) == {"b": "", "c": ""}
    abcd.new_version(5)
    began = [abcd.begin(name) for name in "abcd"]
    assert began == [[""], ["a"], ["a"], ["c"]], "b gave c nothing, a gave b three pieces"


def test_a_silent_source_is_avoided_by_that_node_alone(abcd: Plane) -> None:
    abcd.stalls("b", 0.0, 1.0)
    assert abcd.goes_on_at(1.0) == {"b": ""}
    for name in "bcd":
        abcd.leave(name)
    assert abcd.begin("e") == ["a"]


@pytest.mark.parametrize("reason", ["checksum mismatch in piece 3 of 9", "this version is not served here any more"])
def test_a_source_that_refuses_or_sends_something_else_is_left_at_once_by_everybody(abcd: Plane, reason: str) -> None:
    abcd.stalls("c", 10.0, reason=reason)
    assert abcd.goes_on_at(10.0) == {"c": "a"}
    abcd.leave("c")
    assert abcd.sources["d"] == [address_of("a")]
    abcd.leave("d")
    assert abcd.begin("e") == ["a"]


def test_a_node_that_names_another_source_twice_is_told_its_source_again(abcd: Plane) -> None:
    abcd.stalls("c", 10.0, source=ORIGIN)
    assert abcd.goes_on_at(10.9) == {}, "the message about it may be on its way"
    abcd.stalls("c", 11.0, source=ORIGIN)
    assert abcd.goes_on_at(11.0) == {"c": "b"}


def test_a_report_that_is_not_repeated_is_over_and_one_of_other_pieces_is_a_new_one(abcd: Plane) -> None:
    abcd.stalls("c", 10.0)
    assert abcd.goes_on_at(10.1 + STALE_S) == {} == abcd.goes_on_at(10.2 + STALE_S)
    abcd.stalls("c", 20.0)
    abcd.stalls("c", 20.0 + GRACE_S, pieces=1)
    assert abcd.goes_on_at(20.0 + GRACE_S) == {}
    abcd.staged("c")
    assert abcd.goes_on_at(20.0 + 2 * GRACE_S) == {}, "it has everything"


def test_reports_of_another_attempt_of_unknown_parts_and_of_strangers_do_not_count(abcd: Plane) -> None:
    abcd.stalls("c", 10.0, epoch=abcd.epochs["c"] - 1)
    abcd.chains.stalled(b"c", Stalled("c", abcd.epochs["c"], 1, address_of("b"), 0), 10.0)
    abcd.chains.stalled(b"stranger", Stalled("stranger", 1, 0, ORIGIN, 0), 10.0)
    assert abcd.goes_on_at(10.0 + GRACE_S) == {}


def test_a_node_that_hears_nothing_from_the_learner_itself_connects_anew_or_goes_where_everything_is(
    abcd: Plane,
) -> None:
    abcd.stalls("a", 10.0, 11.0, 12.0, 13.0)
    assert abcd.goes_on_at(10.0 + RESUME_S) == {}
    assert abcd.goes_on_at(10.1 + RESUME_S) == {"a": ""}
    abcd.stalls("a", 20.0, 21.0, 22.0, reason="refused")
    assert abcd.goes_on_at(20.1 + STALE_S) == {"a": ""}
    abcd.begin("x", route=Route(2, 4))
    abcd.staged("x")
    abcd.stalls("a", 30.0, 31.0, 32.0, 33.0)
    assert abcd.goes_on_at(30.1 + RESUME_S) == {"a": "x"}


def test_a_node_that_went_to_one_that_had_its_pieces_from_it_goes_to_the_learner_when_that_leaves(abcd: Plane) -> None:
    """A last report is in force for a while after the node got the rest and b got it from there."""
    abcd.stalls("a", 10.0, 11.0, 12.0, 13.0)
    abcd.staged("b")
    assert abcd.goes_on_at(10.1 + RESUME_S) == {"a": "b"}, "b has everything"
    abcd.leave("b")
    assert (abcd.sources["a"], abcd.sources["c"]) == ([ORIGIN], [address_of("a")])


def test_a_way_around_two_nodes_that_were_each_others_source_ends_at_the_learner(abcd: Plane) -> None:
    abcd.stalls("a", 10.0, 11.0, 12.0, 13.0)
    abcd.staged("b")
    assert abcd.goes_on_at(10.1 + RESUME_S) == {"a": "b"}
    abcd.staged("a")
    for now, onwards in ((20.0, "a"), (21.0, "")):
        abcd.stalls("c", now, reason="not what was sent")
        assert abcd.goes_on_at(now) == {"c": onwards}


def test_a_node_whose_one_holder_is_of_no_use_goes_to_another_one(plane: Plane) -> None:
    for name in "xya":
        plane.begin(name, route=Route(2, 4))
    for name in "xy":
        plane.staged(name)
    plane.stalls("a", 0.0, 1.0, 2.0, 3.0)
    assert plane.goes_on_at(0.1 + RESUME_S) == {"a": "x"}
    plane.stalls("a", 5.0, reason="this version is not served here any more")
    assert plane.goes_on_at(5.0) == {"a": ""}
    plane.stalls("a", 10.0, 11.0, 12.0, 13.0)
    assert plane.goes_on_at(10.1 + RESUME_S) == {"a": "y"}


def test_two_parts_have_sources_of_their_own() -> None:
    plane = Plane(origins=(ORIGIN, OTHER))
    assert [plane.begin(name) for name in "abc"] == [["", ""], ["a", "a"], ["b", "b"]]
    assert plane.sources["a"] == [ORIGIN, OTHER] and Server.offered == ["v4p0"], "the other source offers its own"
    plane.stalls("c", 0.0, 1.0, part=1)
    plane.stalls("b", 0.0, 1.0, part=0)
    assert plane.goes_on_at(1.0) == {"c": "a", "b": ""}
    assert plane.sources == {
        "a": [ORIGIN, OTHER], "b": [ORIGIN, address_of("a")], "c": [address_of("b"), address_of("a")],
    }  # fmt: skip
    plane.leave("a")
    assert plane.sources["b"] == [ORIGIN, OTHER] and plane.sources["c"] == [address_of("b"), OTHER]


# ---------------------------------------------------------------- what is over


def test_a_node_is_left_for_a_moment_to_those_who_still_fetch_from_it(abcd: Plane) -> None:
    assert not abcd.chains.busy(b"a", 10.0)
    abcd.staged("a", 10.0)
    assert abcd.chains.busy(b"a", 10.0 + HANDOVER_S / 2) and not abcd.chains.busy(b"a", 10.0 + HANDOVER_S)
    abcd.staged("b", 10.0)
    assert not abcd.chains.busy(b"a", 10.0) and not abcd.chains.busy(b"stranger", 10.0)
    assert abcd.chains.rate == abcd.payload.size / 2.0


def test_a_payload_is_served_while_it_is_current_or_fetched(plane: Plane, offered: list[str]) -> None:
    plane.begin("a")
    current = plane.new_version(5)
    plane.begin("b")
    assert plane.chains.tidy(current) == {4, 5} and offered == ["v4p0", "v5p0"]
    plane.staged("a")
    plane.staged("b")
    assert plane.chains.tidy(current) == {5} and offered == ["v5p0"]
    plane.leave("b")
    assert plane.chains.tidy(current) == {5}
    assert plane.chains.tidy(snapshot_of(6)) == set() and offered == []


def best_end(chain: Chain, machine: str) -> bytes | None:
    """The end that `Chain.end` should name, found by a look at every node."""
    load = Counter(s for link in chain.links.values() if link.done is None for s in set(link.sources))
    fit = [
        (link.view.machine != machine, load[node], link.done is None, -number, node)
        for number, (node, link) in enumerate(chain.links.items())
        if link.view.address and node not in chain.poor
        and (link.done is not None or link.view.node_id not in chain.late)
    ]  # fmt: skip
    assert chain.open == sum(link.done is None for link in chain.links.values())
    assert all(chain.load[node] == load[node] for node in chain.links)
    return min(fit)[-1] if fit else None


@pytest.mark.parametrize("seed", range(40))
def test_whatever_nodes_do_following_the_sources_ends_where_everything_is(seed: int) -> None:
    luck, plane, now, done = random.Random(seed), Plane(origins=(ORIGIN, OTHER)), 0.0, set[str]()

    def reaches_the_end(name: str, part: int) -> bool:
        seen: set[str] = set()
        while name and name not in done:
            assert name not in seen and name in plane.nodes, f"{name} waits for itself or for nobody: {plane.sources}"
            seen.add(name)
            name = plane.name(plane.sources[name][part])
        return True

    def may_be_done(name: str) -> bool:
        return all(source in {"", *done} for source in map(plane.name, plane.sources[name]))

    for _ in range(120):
        name, part = luck.choice("abcdefgh"), luck.randrange(2)
        match luck.choice(["begin", "stage", "leave", "silence", "refusal", "wait"]):
            case "begin" if name not in plane.nodes:
                plane.begin(name, machine=luck.choice("mn"), address=luck.choice([address_of(name)] * 5 + [""]))
            case "stage" if name in plane.nodes and name not in done and may_be_done(name):
                done.add(name)
                plane.staged(name, now)
            case "leave" if name in plane.nodes:
                plane.nodes.pop(name)
                done.discard(name)
                plane.leave(name, failed=luck.random() < 0.3)
            case "silence" if name in plane.nodes and name not in done:
                plane.stalls(name, now, now + 1, part=part)
            case "refusal" if name in plane.nodes and name not in done:
                plane.stalls(name, now, part=part, reason="not what was sent")
            case "wait":
                now += luck.choice([0.1, GRACE_S, 1.0, RESUME_S])
            case _:
                continue
        plane.chains.tick(now)
        assert all(reaches_the_end(one, p) for one in plane.nodes for p in range(2))
        [chain] = plane.chains._chains or [None]
        assert chain is None or all(chain.end(machine) == best_end(chain, machine) for machine in "mnx")


def test_the_server_ends_with_the_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[Server] = []

    def started(host: str, password: str) -> Server:
        servers.append(Server(host, password))
        return servers[-1]

    monkeypatch.setattr(chains, "RelayServer", started)
    Chains("127.0.0.1", 0, lambda node, message: None).close()
    assert servers == [], "none was needed"
    made = Chains("127.0.0.1", 0, lambda node, message: None)
    made.origin()
    made.close()
    assert [server.closed for server in servers] == [True]
