"""The messages on the broker's sockets: frames [header][payload...].

The header is MessagePack of one of the tagged structs below. Payloads (encoded groups) are separate frames, which the
broker neither decodes nor copies. Every request has an id that its reply repeats. A client without a reply sends the
same request again with the same id, so requests are idempotent or remembered. Replies without payloads that a client
gets at the same time come in one message, a Batch.

Structs are keyed; fields are only appended and have defaults. SCHEMA changes when an old reader would misread one.
"""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from broker.contract import (
    BrokerEvent,
    BrokerStatus,
    HeartbeatReply,
    LearnerReport,
    Lease,
    LedgerEntry,
    NodeReport,
    RunInfo,
)
from common.rollouts import GroupMeta, Task
from common.wire_types import Name, Seconds, StepNumber, Tally, Version

SCHEMA = 1
Token = Annotated[str, Meta(max_length=256)]
Tokens = Annotated[list[Token], Meta(max_length=1 << 14)]
Tasks = Annotated[list[Task], Meta(max_length=1 << 13)]
Serials = Annotated[list[int], Meta(max_length=1 << 20)]
Reason = Annotated[str, Meta(max_length=1 << 16)]
WaitSeconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]


class WireError(ValueError):
    """A message that cannot be used; `request_id` is -1 when not even that could be read."""

    def __init__(self, reason: str, request_id: int = -1) -> None:
        super().__init__(reason)
        self.request_id = request_id


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    id: int
    schema: int = SCHEMA


class LearnerRequest(Request, frozen=True, kw_only=True):
    incarnation: int | None = None  # the sender's, once it has attached
    instance: str = ""  # likewise


class Attach(LearnerRequest, frozen=True, kw_only=True, tag="attach"):
    report: LearnerReport


class Offer(LearnerRequest, frozen=True, kw_only=True, tag="offer"):
    tasks: Tasks


class Take(LearnerRequest, frozen=True, kw_only=True, tag="take"):
    step: StepNumber
    count: Count
    wait_s: WaitSeconds
    in_order: bool = False


class Regenerate(LearnerRequest, frozen=True, kw_only=True, tag="regenerate"):
    step: StepNumber
    serials: Serials


class Filter(LearnerRequest, frozen=True, kw_only=True, tag="filter"):
    step: StepNumber
    serials: Serials
    most_replaced: Annotated[int, Meta(ge=0)]


class Commit(LearnerRequest, frozen=True, kw_only=True, tag="commit"):
    step: StepNumber


class Report(LearnerRequest, frozen=True, kw_only=True, tag="report"):
    report: LearnerReport


class Register(Request, frozen=True, kw_only=True, tag="register"):
    report: NodeReport


class AskLease(Request, frozen=True, kw_only=True, tag="lease"):
    node_id: Name
    version: Version
    max_groups: Count
    wait_s: WaitSeconds


class Cancel(Request, frozen=True, kw_only=True, tag="cancel"):
    """The sender no longer wants the answer to its request `target`."""

    target: int


class Heartbeat(Request, frozen=True, kw_only=True, tag="heartbeat"):
    report: NodeReport
    tokens: Tokens


class Complete(Request, frozen=True, kw_only=True, tag="complete"):
    """Followed by one payload frame."""

    node_id: Name
    token: Token
    meta: GroupMeta


class Fail(Request, frozen=True, kw_only=True, tag="fail"):
    node_id: Name
    token: Token
    reason: Reason
    tokens: Tally = 0
    seconds: Seconds = 0.0


class Release(Request, frozen=True, kw_only=True, tag="release"):
    node_id: Name
    tokens: Tokens


class Leave(Request, frozen=True, kw_only=True, tag="leave"):
    node_id: Name


class AskStatus(Request, frozen=True, kw_only=True, tag="status"):
    pass


class AskLedger(Request, frozen=True, kw_only=True, tag="ledger"):
    pass


class AskEvents(Request, frozen=True, kw_only=True, tag="events"):
    after: int


AnyRequest = (
    Attach
    | Offer
    | Take
    | Regenerate
    | Filter
    | Commit
    | Report
    | Register
    | AskLease
    | Cancel
    | Heartbeat
    | Complete
    | Fail
    | Release
    | Leave
    | AskStatus
    | AskLedger
    | AskEvents
)


class Reply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    id: int
    schema: int = SCHEMA


class Refused(Reply, frozen=True, kw_only=True, tag="refused"):
    """The request changed nothing; id -1 when it could not be read."""

    reason: str


class Waiting(Reply, frozen=True, kw_only=True, tag="waiting"):
    """The request arrived; its answer takes longer, for `reason`. The sender continues to wait."""

    reason: str


class NotLeading(Reply, frozen=True, kw_only=True, tag="not_leading"):
    """This broker stands by; `leader` is the address of the one that leads, '' while there is none."""

    leader: str = ""


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    pass


class Attached(Reply, frozen=True, kw_only=True, tag="attached"):
    next_serial: int
    store_id: str = ""
    committed_step: int = -1


class Offered(Reply, frozen=True, kw_only=True, tag="offered"):
    new: int


class TakenGroup(msgspec.Struct, frozen=True, gc=False):
    serial: int
    node_id: str
    meta: GroupMeta


class Taken(Reply, frozen=True, kw_only=True, tag="taken"):
    """Followed by one payload frame per group; None: not ready in time."""

    groups: list[TakenGroup] | None


class Registered(Reply, frozen=True, kw_only=True, tag="registered"):
    run: RunInfo


class Leased(Reply, frozen=True, kw_only=True, tag="leased"):
    leases: list[Lease]


class Beaten(Reply, frozen=True, kw_only=True, tag="beaten"):
    reply: HeartbeatReply


class Completed(Reply, frozen=True, kw_only=True, tag="completed"):
    accepted: bool


class StatusReply(Reply, frozen=True, kw_only=True, tag="status"):
    status: BrokerStatus


class LedgerReply(Reply, frozen=True, kw_only=True, tag="ledger"):
    entries: list[LedgerEntry]


class EventsReply(Reply, frozen=True, kw_only=True, tag="events"):
    events: list[BrokerEvent]


SingleReply = (
    Refused
    | Done
    | Attached
    | Offered
    | Taken
    | Registered
    | Leased
    | Beaten
    | Completed
    | StatusReply
    | LedgerReply
    | EventsReply
    | Waiting
    | NotLeading
)


class Batch(Reply, frozen=True, kw_only=True, tag="batch"):
    """Several replies without payloads to one client, `id` -1."""

    replies: list[SingleReply]


AnyReply = SingleReply | Batch


class _Envelope(msgspec.Struct, frozen=True):
    """The fields of every schema version."""

    id: int = -1
    schema: int = -1


_Message = TypeVar("_Message", bound=Request | Reply)
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(AnyRequest)
_replies = msgspec.msgpack.Decoder(AnyReply)
_envelopes = msgspec.msgpack.Decoder(_Envelope)


def encode(message: Request | Reply) -> bytes:
    """Header bytes of a message."""
    return _encoder.encode(message)


def decode_request(header: bytes | memoryview, payloads: int) -> AnyRequest:
    """Header bytes to a request that `payloads` frames follow.

    Raises:
        WireError: when the bytes, the schema version or the number of payload frames are not right.
    """
    request = _decode(header, _requests)
    expected = 1 if isinstance(request, Complete) else 0
    if payloads != expected:
        raise WireError(f"{type(request).__name__} came with {payloads} payload frames, not {expected}", request.id)
    return request


def decode_reply(header: bytes | memoryview, payloads: int) -> AnyReply:
    """The same for replies."""
    reply = _decode(header, _replies)
    expected = len(reply.groups or ()) if isinstance(reply, Taken) else 0
    if payloads != expected:
        raise WireError(f"{type(reply).__name__} came with {payloads} payload frames, not {expected}", reply.id)
    return reply


def singles(reply: AnyReply) -> "list[SingleReply]":
    """The replies that a message brought."""
    return reply.replies if isinstance(reply, Batch) else [reply]


def _decode(header: bytes | memoryview, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    try:
        message = decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        envelope = _envelope(header)
        if envelope.schema not in (-1, SCHEMA):
            raise WireError(_schema_reason(envelope.schema), envelope.id) from error
        raise WireError(f"does not decode: {error}", envelope.id) from error
    if message.schema != SCHEMA:
        raise WireError(_schema_reason(message.schema), message.id)
    return message


def _envelope(header: bytes | memoryview) -> _Envelope:
    try:
        return _envelopes.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Envelope()


def _schema_reason(schema: int) -> str:
    return f"message schema {schema}, this side speaks {SCHEMA}; use the same slipstream release on both"
