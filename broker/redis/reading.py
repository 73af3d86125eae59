"""What observers read: status, ledger and events, from one consistent MULTI each. Read-only."""

import math
import struct
from typing import Any

import msgspec

from broker.contract import (
    BrokerEvent,
    BrokerStatus,
    LearnerReport,
    LedgerEntry,
    NodeReport,
    NodeStatus,
    RunInfo,
    Waste,
)
from broker.delivery import waste
from broker.delivery.learner_fencing import LearnerRecord
from broker.delivery.nodes import reported
from broker.redis.keys import Keys
from broker.redis.moves import Command
from common.rollouts import GroupMeta


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A living task as delivery.lua packs it; `meta` is JSON, '' before there is a group."""

    attempts: int
    failures: int
    nodes: list[str]
    reason: str
    state: str
    token: str
    meta: str
    payload: str
    size: int
    step: int
    filtered: int
    leased_at: float
    failed_by: str = ""  # the first node that did
    others_failed: int = 0  # 1 when another one did too


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A finished task as delivery.lua appends it to the ledger; '' for what is not known."""

    serial: int
    state: str
    attempts: int
    nodes: list[str]
    step: int
    version_min: int | str
    version_max: int | str
    reward_mean: float | str
    reason: str
    filtered: int


_record = msgspec.msgpack.Decoder(Record)
_line = msgspec.msgpack.Decoder(Line)
open_step = msgspec.msgpack.Decoder(tuple[int, list[int]])  # groups that passed their place on, serials in order


def transaction(commands: list[Command]) -> list[Command]:
    """The same commands, at one moment; the last reply holds theirs."""
    return [("MULTI",), *commands, ("EXEC",)]


def status_commands(keys: Keys) -> list[Command]:
    """What `status` needs, before it knows the nodes."""
    return [
        ("TIME",),
        ("HGETALL", keys.state),
        ("ZCARD", keys.of("pending")),
        ("ZCARD", keys.of("ready")),
        ("HGETALL", keys.of("tasks")),
        ("HGETALL", keys.of("steps")),
        ("ZRANGE", keys.of("seen"), 0, -1, "WITHSCORES"),
        ("ZRANGE", keys.of("gone"), 0, -1, "WITHSCORES"),
    ]


def node_commands(keys: Keys, replies: list[Any]) -> list[Command]:
    """The nodes that `status_commands` found."""
    names: list[bytes] = [*replies[6][::2], *replies[7][::2]]
    return [("HGETALL", keys.of("node:") + name) for name in names]


def status(address: str, replies: list[Any], node_replies: list[Any]) -> BrokerStatus:
    """From the replies to `status_commands` and `node_commands`."""
    now_s = _seconds(replies[0])
    state = pairs(replies[1])
    run = msgspec.json.decode(state[b"run"], type=RunInfo)
    records = [_record.decode(x) for x in pairs(replies[4]).values()]
    leased = [r for r in records if r.state == "leased"]
    steps = [open_step.decode(x) for x in pairs(replies[5]).values()]
    seen = {**_scores(replies[6]), **_scores(replies[7])}
    alive = set(replies[6][::2])
    nodes: list[NodeStatus] = []
    generated, spent = _number(state, b"past_generated"), [_waste(state)]
    for (name, seen_ms), flat in zip(seen.items(), node_replies, strict=True):
        fields = pairs(flat)
        if not fields:
            continue  # it left between the two reads
        report = msgspec.json.decode(fields[b"report"], type=NodeReport)
        generated += max(report.tokens_generated, _number(fields, b"handed"))
        spent.append(waste.merged((_waste(fields), reported(report))))
        held = sum(r.nodes[-1] == report.node_id for r in leased)
        nodes.append(NodeStatus(report, held, name in alive, max(0.0, now_s - seen_ms / 1000), spent[-1]))
    total = waste.merged(spent)
    learner = LearnerRecord()
    if b"learner" in state:
        learner.accept(msgspec.json.decode(state[b"learner"], type=LearnerReport))
        learner.seen(int(state[b"l_seen"]) / 1000)
    return BrokerStatus(
        pid=_number(state, b"pid"),
        address=address,
        run=run,
        groups_pending=replies[2],
        groups_ready=replies[3],
        groups_leased=len(leased),
        groups_taken=sum(len(serials) for _, serials in steps),
        groups_committed=_number(state, b"committed_groups"),
        groups_dead=_number(state, b"dead"),
        bytes_held=_number(state, b"bytes"),
        lease_expiries=_number(state, b"expiries"),
        stale_results=_number(state, b"stale"),
        tokens_generated_total=generated,
        tokens_wasted_total=waste.tokens(total),
        learner=learner.status(now_s),
        learner_last_seen_s=learner.silent_s(now_s),
        nodes=sorted(nodes, key=lambda n: n.report.node_id),
        oldest_lease_s=max((now_s - r.leased_at / 1000 for r in leased), default=0.0),
        steps_taken=sum(len(serials) - passed >= run.groups_per_step for passed, serials in steps),
        groups_filtered=_number(state, b"filtered"),
        waste=total,
        full=_bytes_expected(state, len(leased)) > run.max_bytes,
    )


def ledger_commands(keys: Keys) -> list[Command]:
    """What `ledger` needs."""
    return [("HGETALL", keys.of("tasks")), ("GET", keys.of("ledger"))]


def ledger(replies: list[Any]) -> list[LedgerEntry]:
    """Every task ever offered, ascending by serial; one that was finished between the two reads is finished."""
    entries = [_living(int(serial), _record.decode(packed)) for serial, packed in pairs(replies[0]).items()]
    data: bytes = replies[1] or b""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        entries.append(_finished(_line.decode(data[at + 4 : at + 4 + size])))
        at += 4 + size
    return list({entry.serial: entry for entry in sorted(entries, key=lambda e: e.serial)}.values())


def events_command(keys: Keys, after: int) -> Command:
    """Those with an index greater than `after`."""
    return ("XRANGE", keys.of("events"), f"{max(after, -1) + 2}-0", "+")


def events(reply: list[Any]) -> list[BrokerEvent]:
    """From the reply to `events_command`."""
    found: list[BrokerEvent] = []
    for name, flat in reply:
        fields = pairs(flat)
        detail = msgspec.json.decode(fields[b"d"], type=dict[str, str | int | float])
        index = int(name.partition(b"-")[0]) - 1
        found.append(BrokerEvent(index, float(fields[b"t"]), fields[b"k"].decode(), detail))
    return found


def pairs(flat: list[Any]) -> dict[bytes, bytes]:
    """A flat reply of names and values as a dictionary."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def decode_meta(meta: bytes | str) -> GroupMeta:
    """From the JSON of a record, in which a mean reward that is no number is null."""
    fields: dict[str, Any] = msgspec.json.decode(meta)
    if fields.get("reward_mean") is None:
        fields["reward_mean"] = math.nan
    return msgspec.convert(fields, GroupMeta)


def _living(serial: int, r: Record) -> LedgerEntry:
    meta = decode_meta(r.meta) if r.meta else None
    return LedgerEntry(
        serial=serial,
        state=r.state,
        attempts=r.attempts,
        nodes=r.nodes,
        step=r.step if r.step >= 0 else None,
        version_min=meta.version_min if meta else None,
        version_max=meta.version_max if meta else None,
        reward_mean=meta.reward_mean if meta else None,
        reason=r.reason,
        filtered=bool(r.filtered),
    )


def _finished(line: Line) -> LedgerEntry:
    def number(value: Any) -> Any:
        return None if value == "" else value

    return LedgerEntry(
        serial=line.serial,
        state=line.state,
        attempts=line.attempts,
        nodes=line.nodes,
        step=line.step if line.step >= 0 else None,
        version_min=number(line.version_min),
        version_max=number(line.version_max),
        reward_mean=number(line.reward_mean),
        reason=line.reason,
        filtered=bool(line.filtered),
    )


def _waste(fields: dict[bytes, bytes]) -> dict[str, Waste]:
    found: dict[str, Waste] = {}
    for name, value in fields.items():
        if name.startswith(b"wt:"):
            waste.add(found, name[3:].decode(), tokens=int(value))
        elif name.startswith(b"ws:"):
            waste.add(found, name[3:].decode(), seconds=float(value))
    return found


def _seconds(time_reply: list[bytes]) -> float:
    return int(time_reply[0]) + int(time_reply[1]) / 1e6


def _scores(flat: list[bytes]) -> dict[bytes, float]:
    return {name: float(score) for name, score in zip(flat[::2], flat[1::2], strict=True)}


def _bytes_expected(state: dict[bytes, bytes], leased: int) -> float:
    """What is held and on the way, as `admits` of delivery.lua counts it."""
    accepted = max(1, _number(state, b"acc_groups"))
    return _number(state, b"bytes") + leased * _number(state, b"acc_bytes") / accepted


def _number(state: dict[bytes, bytes], name: bytes) -> int:
    return int(state.get(name, 0))
