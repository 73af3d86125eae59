"""Receivers of the weight plane: which event leads to which state, which way a version takes, and the figures."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from msgspec.structs import replace

from common.weights.source.attempt import Attempt
from common.weights.source.nodes import (
    LISTEN_WAIT_S,
    MAX_ATTEMPTS,
    READY,
    RETURN_AFTER,
    Action,
    DropNode,
    DropReason,
    FailAttempt,
    Figures,
    NodeState,
    NodeView,
    NoteActive,
    NoteStaged,
    Route,
    SendMessage,
    Step,
    Undelivered,
    begin,
    doubt,
    drop,
    greet,
    hear,
    release,
    split,
    tick,
    undelivered,
)
from common.weights.source.snapshot import Snapshot, VersionSchedule
from common.weights.wire import messages
from common.weights.wire.failures import Failure, FailureKind
from common.weights.wire.messages import BOTH, FROZEN, WHOLE, Canary
from tests.unit.common.weights.node_views import attempt_at, newcomer, settled, snapshot_of

S = NodeState
TIMEOUT_S, NOW = 8.0, 1.0  # so a node is silent after 2 s during an attempt
SNAPSHOT = snapshot_of(4)
BROADCAST = attempt_at(SNAPSHOT, "a", "b", epoch=7)
FETCH = attempt_at(SNAPSHOT, "a", epoch=8, transport="relay")
WELCOME = messages.Welcome(0, SNAPSHOT.layout, "127.0.0.1:1")
STAGED = messages.Staged("a", 0, 4, 0.1, 7)
ACTIVE = messages.Active("a", 0, 4, 0.1, SNAPSHOT.checksum)
REJECTED = messages.Rejected("a", 0, 4, "a bucket is wrong", epoch=7, kind=FailureKind.DAMAGED)
PROOF_FAILED = messages.Rejected("a", 0, 4, "the proof failed", fatal=True, kind=FailureKind.PROOF)
PROOF = Failure(FailureKind.PROOF, "the proof failed")
STALLED = messages.Stalled("a", 8, 0, "tcp://b:7", 3)
ACTIVATE = SendMessage(messages.Activate(0, 4))


def at(state: NodeState, attempt: Attempt | None = BROADCAST, **changes: object) -> NodeView:
    """A node that runs version 3, in `state`."""
    made = newcomer("a") if state is S.JOINING else settled("a")
    return replace(made, state=state, welcomed=0.0, attempt=None if state in READY else attempt, **changes)


def dropped(reason: DropReason, **details: float) -> tuple[Action, ...]:
    return (DropNode(reason, **details),)  # type: ignore[arg-type]


def failed(kind: FailureKind, text: str = "") -> tuple[Action, ...]:
    return (FailAttempt(Failure(kind, text)),)


def plain(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """The actions without the wording of failures."""
    return tuple(failed(a.failure.kind)[0] if isinstance(a, FailAttempt) else a for a in actions)


Event = Callable[[NodeView, float], Step]  # gets the time too


def told(message: messages.NodeMessage) -> Event:
    return lambda receiver, now: hear(receiver, message, now)


def known(receiver: NodeView, now: float) -> Step:
    return greet(receiver, WELCOME, now)


def time_passes(receiver: NodeView, now: float) -> Step:
    return tick(receiver, TIMEOUT_S, now)


def attempt_fails(receiver: NodeView, now: float) -> Step:
    return doubt(receiver)


def released(receiver: NodeView, now: float) -> Step:
    return release(receiver, 9)


def closes(receiver: NodeView, now: float) -> Step:
    return drop(receiver, DropNode(DropReason.CLOSED))


TABLE: list[tuple[str, NodeView, Event, float, NodeState, tuple[Action, ...]]] = [
    ("a version is staged", at(S.STAGING), told(STAGED), NOW, S.FLIPPING, (NoteStaged(), ACTIVATE)),
    ("it is staged after all", at(S.DOUBTED), told(STAGED), NOW, S.FLIPPING, (NoteStaged(), ACTIVATE)),
    ("also while others are waited for", at(S.ANSWERED), told(STAGED), NOW, S.FLIPPING, (NoteStaged(), ACTIVATE)),
    ("the flip is proven", at(S.FLIPPING), told(ACTIVE), NOW, S.IDLE, (NoteActive(None),)),
    ("an attempt fails", at(S.STAGING), attempt_fails, NOW, S.DOUBTED, ()),
    ("who staged is not concerned", at(S.FLIPPING), attempt_fails, NOW, S.FLIPPING, ()),
    ("a sign of life is enough", at(S.DOUBTED), told(messages.Pong("a")), NOW, S.ANSWERED, ()),
    ("a node rejects what came", at(S.STAGING), told(REJECTED), NOW, S.ANSWERED, failed(FailureKind.DAMAGED)),
    ("the layout is known", at(S.JOINING), known, NOW, S.JOINING, (SendMessage(WELCOME),)),
    ("it says where it serves", at(S.STAGING), told(messages.Listening("a", "tcp://b:7")), NOW, S.STAGING, ()),
    ("it waits for another source", at(S.STAGING, FETCH), told(STALLED), NOW, S.STAGING, ()),
    ("time is left", at(S.STAGING, heard=7.0), time_passes, 7.9, S.STAGING, ()),
    ("time is up", at(S.STAGING, heard=7.0), time_passes, 8.1, S.DOUBTED, failed(FailureKind.LATE)),
    ("silence during an attempt", at(S.STAGING), time_passes, 2.1, S.GONE, dropped(DropReason.SILENCE, version=4)),
    ("silence after a failure", at(S.DOUBTED), time_passes, 2.1, S.GONE, dropped(DropReason.SILENCE, version=4)),
    ("silence before it does not count", at(S.STAGING, heard=-3.0), time_passes, 1.9, S.STAGING, ()),
    ("silence in a flip", at(S.FLIPPING), time_passes, 2.1, S.FLIPPING, failed(FailureKind.SILENT)),
    ("a flip has time", at(S.FLIPPING, heard=15.0), time_passes, 15.9, S.FLIPPING, ()),
    ("but ends", at(S.FLIPPING, heard=15.0), time_passes, 16.1, S.GONE, dropped(DropReason.NEVER_ACTIVE, version=4)),
    ("an idle node may be silent", at(S.IDLE), time_passes, 7.9, S.IDLE, ()),
    ("for so long", at(S.IDLE), time_passes, 8.5, S.GONE, dropped(DropReason.IDLE_SILENCE, seconds=8.5)),
    ("a newcomer likewise", at(S.JOINING), time_passes, 8.5, S.GONE, dropped(DropReason.IDLE_SILENCE, seconds=8.5)),
    ("a connection closes", at(S.STAGING), closes, NOW, S.GONE, dropped(DropReason.CLOSED)),
    ("a failed group releases", at(S.ANSWERED), released, NOW, S.IDLE, ()),
    ("but not who flips", at(S.FLIPPING), released, NOW, S.FLIPPING, ()),
    ("an answer to an earlier attempt", at(S.STAGING, FETCH), told(STAGED), NOW, S.STAGING, ()),
    ("a rejection of an earlier attempt", at(S.STAGING, FETCH), told(REJECTED), NOW, S.STAGING, ()),
    ("active without a flip", at(S.STAGING), told(ACTIVE), NOW, S.STAGING, ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("receiver", "event", "now", "state", "actions"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_an_event_leads_to_its_state_and_actions(
    receiver: NodeView, event: Event, now: float, state: NodeState, actions: tuple[Action, ...]
) -> None:
    after, found = event(receiver, now)
    assert (after.state, plain(found)) == (state, actions)
    assert (after.attempt is None) == (state in READY | {S.GONE, S.EXCLUDED})


@pytest.mark.parametrize("state", [s for s in S if s is not S.GONE])
def test_in_every_state_a_message_counts_a_node_can_leave_and_one_whose_proof_failed_is_excluded(
    state: NodeState,
) -> None:
    assert hear(at(state), messages.Pong("a"), 5.0)[0].heard == 5.0, "every message is a sign of life"
    left, actions = hear(at(state), messages.Leave("a"), NOW)
    assert (left.state, actions) == (S.GONE, dropped(DropReason.LEFT))
    excluded, actions = hear(at(state), PROOF_FAILED, NOW)
    assert (excluded.state, excluded.excluded, excluded.attempt, actions) == (S.EXCLUDED, PROOF, None, ())


def test_an_attempt_begins_with_what_the_node_lacks() -> None:
    first, actions = begin(at(S.JOINING), BROADCAST, rank=2)
    assert (first.state, first.attempt) == (S.STAGING, BROADCAST)
    assert actions == (SendMessage(msgspec.structs.replace(BROADCAST.epoch, rank=2)), SendMessage(BROADCAST.publish))
    again, actions = begin(at(S.IDLE), BROADCAST)
    assert actions == (SendMessage(BROADCAST.publish),), "it is in the group"
    assert (again.version, again.base) == (3, -1), "its staging buffer may be half written from here on"


USABLE = ["tcp://10.0.0.1:7", "tcp://node-1.example:65535", "tcp://[fd00::1]:7"]
NOWHERE = [
    "",
    "tcp://10.0.0.1",
    "ipc:///somewhere",
    "tcp://10.0.0.1:7;tcp://b:7",
    "tcp://:7",
    "tcp://a:7 ",
    "10.0.0.1:7",
]


def test_a_node_that_was_told_the_layout_says_where_it_serves_or_has_a_moment_to() -> None:
    greeted, _ = greet(newcomer("a"), WELCOME, 5.0)
    assert greeted.welcomed == 5.0 and not newcomer("a").listens(99.0)
    assert not greeted.listens(5.0 + LISTEN_WAIT_S) and greeted.listens(5.1 + LISTEN_WAIT_S)
    for address in USABLE + NOWHERE:
        heard, _ = hear(greeted, messages.Listening("a", address), 5.0)
        assert heard.listens(5.0) and heard.address == (address if address in USABLE else "")


def test_an_active_node_is_settled_with_a_base_and_excluded_if_it_runs_other_weights_than_were_sent() -> None:
    flipping = replace(newcomer("a"), state=S.FLIPPING, attempt=BROADCAST, route=Route(2, 4))
    after, actions = hear(flipping, msgspec.structs.replace(ACTIVE, canary_max_difference=0.25), NOW)
    assert (after.settled, after.version, after.base, after.canary_version) == (True, 4, 4, 4)
    assert after.route.failures == 0 and actions == (NoteActive(0.25),)
    after, _ = hear(flipping, messages.Active("a", 0, 4, 0.1, "other"), NOW)
    assert after.state is S.EXCLUDED and after.excluded is not None and after.excluded.kind is FailureKind.PROOF
    assert tick(after, TIMEOUT_S, 1.0) == (after, ())


def failures(receiver: NodeView, attempt: Attempt, published: int = 10) -> list[tuple[NodeView, tuple[Action, ...]]]:
    """As many failed attempts as are allowed, one after the other."""
    found: list[tuple[NodeView, tuple[Action, ...]]] = []
    for _ in range(MAX_ATTEMPTS):
        answered = replace(receiver, state=S.ANSWERED, attempt=attempt)
        found.append(release(answered, published))
        receiver = found[-1][0]
    return found


def test_a_node_with_which_broadcasts_keep_failing_gets_the_relay_and_only_then_is_ejected() -> None:
    by_group = failures(at(S.IDLE), BROADCAST)
    assert [(after.state, actions) for after, actions in by_group] == [(S.IDLE, ())] * MAX_ATTEMPTS
    fetches = by_group[-1][0]
    assert fetches.route == Route(0, 4, True, 10 + RETURN_AFTER, 2 * RETURN_AFTER)
    by_relay = failures(fetches, FETCH)
    assert [after.state for after, _ in by_relay] == [S.IDLE, S.IDLE, S.GONE]
    assert by_relay[-1][1] == dropped(DropReason.FAILURES, version=4, count=3)


def test_failures_count_per_version_and_eject_a_node_without_the_relay() -> None:
    last = failures(at(S.IDLE, transports=("gloo",)), BROADCAST)[-1][1]
    assert last == dropped(DropReason.FAILURES, version=4, count=3)
    assert failures(newcomer("a"), BROADCAST)[0][0].state is S.JOINING, "a newcomer stays one"
    assert failures(at(S.IDLE, route=Route(2, 3)), BROADCAST)[0][0].route == Route(1, 4), "version 3 does not count"


def test_only_the_node_on_trial_is_blamed_for_a_failed_broadcast() -> None:
    trial = attempt_at(SNAPSHOT, "a", "b")
    trial.probation = b"b"
    fine = failures(at(S.IDLE), trial)[-1][0]
    assert fine.route == Route()
    relayed = Route(0, 3, True, 10, 2 * RETURN_AFTER)
    blamed = failures(settled("b", route=relayed), trial, published=14)[0][0]
    assert (blamed.route.relayed, blamed.route.returns_at) == (True, 14 + 2 * RETURN_AFTER)


# ---------------------------------------------------------------- routes


SENDING = attempt_at(snapshot_of(5), "a", "b")


def ways(
    ready: list[NodeView], *others: NodeView, transport: str = "gloo", published: int = 1
) -> tuple[str, str, NodeView | None]:
    """Names of the nodes for the group and for the relay, and the one on trial."""
    found = split(ready, [*ready, *others], transport=transport, published=published, version=4)
    names = [" ".join(node.node_id for node in nodes) for nodes in (found.together, found.relayed)]
    return names[0], names[1], found.probation


def test_newcomers_begin_together_and_go_by_relay_once_others_have_weights_or_receive_them() -> None:
    ready = [newcomer("new"), newcomer("back")]
    assert ways(ready) == ("new back", "", None)
    for other in (settled("x", 3), newcomer("x", attempt=SENDING)):
        assert ways(ready, other) == ways([ready[0], newcomer("back", version=2)], other) == ("", "new back", None)


def test_members_stay_together_and_those_without_the_transport_get_the_relay() -> None:
    ready = [settled("a"), settled("b"), settled("far", transports=("relay",)), settled("old", transports=("nccl",))]
    assert ways(ready) == ("a b", "far old", None)
    assert ways(ready, transport="relay") == ("", "a b far old", None)


def test_relayed_nodes_come_back_one_at_a_time_on_probation_and_not_after_a_failure() -> None:
    relayed, due = Route().to_relay(published=10), 10 + RETURN_AFTER
    ready = [settled("a"), settled("b", route=relayed), settled("c", route=relayed)]
    assert ways(ready, published=due - 1) == ("a", "b c", None)
    assert ways(ready, published=due) == ("a b", "c", ready[1])
    assert ways([ready[0], settled("b", route=relayed.failed(4))], published=due) == ("a", "b", None)


# ---------------------------------------------------------------- figures


EXCLUDED = settled("bad", 3, state=NodeState.EXCLUDED, excluded=PROOF)


def test_receiving_flipping_and_queued_nodes_are_told_apart_the_longest_waiting_first() -> None:
    targets = VersionSchedule()
    targets.current = cast(Snapshot, SimpleNamespace(version=6, started=12.0))
    sending = attempt_at(snapshot_of(5), "a", "b")
    receivers = [
        settled("c", 4),
        settled("b", 4, state=NodeState.FLIPPING, attempt=sending),
        settled("a", 4, state=NodeState.STAGING, attempt=sending),
        settled("new", 6),
        EXCLUDED,
    ]
    assert undelivered(receivers, targets) == (
        Undelivered("b", 5, "flipping", 0.0),
        Undelivered("a", 5, "receiving", 0.0),
        Undelivered("c", 6, "queued", 12.0),
    )
    assert undelivered([newcomer("a")], VersionSchedule()) == ()


@pytest.mark.parametrize(
    ("receivers", "owed"),
    [
        ([], False),
        ([settled("old", 2)], False),
        ([settled("compared", 4, canary_version=3)], False),
        ([settled("compared", 3, canary_version=3), settled("late", 4)], True),
    ],
)
def test_a_node_that_runs_a_canarys_version_or_a_later_one_without_comparing_it_is_owed_one(
    receivers: list[NodeView], owed: bool
) -> None:
    figures, offered = Figures(), snapshot_of(3)
    offered.canary = Canary([1, 2], [-0.5], tolerance=0.1)
    figures.offered(offered)
    figures.offered(snapshot_of(4))
    figures.describe(receivers, VersionSchedule())
    assert (figures.now.canary_owed, figures.now.published) == (owed, 2)


def test_the_versions_of_the_live_nodes_count_and_excluded_ones_tell_why_none_generates() -> None:
    figures = Figures()
    figures.describe([settled("a", 5), settled("b", 4), EXCLUDED], VersionSchedule())
    stats = figures.now
    assert (stats.nodes, stats.version_active, stats.fatal) == (2, 4, None)
    for last in ([EXCLUDED], []):  # the reason stays when the excluded node has left
        figures.describe(last, VersionSchedule())
        assert (figures.now.fatal, figures.now.version_active) == (PROOF.text, -1)
    figures.describe([newcomer("c")], VersionSchedule())
    assert figures.now.fatal is None


@pytest.mark.parametrize("reason", DropReason)
def test_every_reason_to_drop_a_node_makes_a_sentence(reason: DropReason) -> None:
    dropped = DropNode(reason, version=4, count=3, seconds=8.5)
    assert dropped.sentence and not set("{}") & set(dropped.sentence)
    assert dropped.ejected == (reason not in (DropReason.LEFT, DropReason.REJOINED))


@pytest.mark.parametrize(
    ("encoding", "kind", "way"),
    [
        ("adapter", FailureKind.MISMATCH, BOTH),
        ("adapter", FailureKind.OTHER, BOTH),
        ("both", FailureKind.OTHER, WHOLE),
        ("adapter", FailureKind.LATE, WHOLE),
        ("adapter", FailureKind.DAMAGED, FROZEN),
        ("full", FailureKind.OTHER, FROZEN),
    ],
)
def test_a_version_of_adapters_that_fails_comes_another_way(encoding: str, kind: FailureKind, way: int) -> None:
    attempt = attempt_at(SNAPSHOT, "a", epoch=7)
    attempt.publish = replace(attempt.publish, encoding=encoding)
    node = settled("a", state=S.STAGING, attempt=attempt, frozen=FROZEN)
    after, _ = hear(node, messages.Rejected("a", 0, 4, "why", epoch=7, kind=kind), NOW)
    assert after.frozen == way


def test_adapters_that_are_not_staged_in_time_lead_to_whole_versions() -> None:
    attempt = attempt_at(SNAPSHOT, "a", epoch=7)
    attempt.publish = replace(attempt.publish, encoding="adapter")
    late = attempt.deadline + 1
    after, _ = tick(settled("a", state=S.STAGING, attempt=attempt, frozen=FROZEN, heard=late), 1e6, late)
    assert (after.state, after.frozen) == (S.DOUBTED, WHOLE)
