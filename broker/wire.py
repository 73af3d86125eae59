"""The messages on the broker's sockets: frames [header][payload...].

The header is MessagePack of one of the tagged structs below. Payloads (encoded groups) are separate frames, which the
broker neither decodes nor copies. Every request has an id that its reply repeats. A client without a reply sends the
same request again with the same id once another connection stands, so requests are idempotent or remembered. Replies
without payloads that a client gets at the same time come in one message, a Batch.

`Request[R]` is answered with an R (broker/server/handlers.py).
Structs are keyed; fields are only appended and have defaults. SCHEMA changes when an old reader would misread one.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast, get_args

import msgspec
from msgspec import Meta

from broker import contract
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import GroupMeta, Task
from common.spans import SpanBatch
from common.transcripts import FAILED_BYTES
from common.wire_types import Name, Seconds, StepNumber, Tally, Text, Version

SCHEMA = 2
MAX_REASON_CHARS = 2000
Token = Annotated[str, Meta(max_length=256)]
Tokens = Annotated[list[Token], Meta(max_length=1 << 14)]
Tasks = Annotated[list[Task], Meta(max_length=1 << 13)]
HeldTokens = Annotated[list[Token], Meta(max_length=1 << 20)]
Serials = Annotated[list[int], Meta(max_length=1 << 20)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
TranscriptData = Annotated[bytes, Meta(max_length=FAILED_BYTES)]
WaitSeconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]

R = TypeVar("R")
_ids = itertools.count()


class WireError(ValueError):
    """A message that cannot be used; `request_id` is -1 when not even that could be read."""

    def __init__(self, reason: str, request_id: int = -1) -> None:
        super().__init__(reason)
        self.request_id = request_id


class Request(msgspec.Struct, Generic[R], frozen=True, kw_only=True, gc=False):
    """A request that is answered with an R."""

    id: int = msgspec.field(default_factory=_ids.__next__)
    schema: int = SCHEMA
    payloads: ClassVar[int] = 0  # frames that follow the header
    once: ClassVar[bool] = False  # a repetition gets the first answer again, because the move would be made twice
    durable: ClassVar[bool] = False  # the answer waits until the move is as durable as broker.durability says

    @property
    def promised(self) -> bool:
        return self.durable

    def read(self, value: msgspec.Raw, payloads: Sequence[bytes]) -> R:
        """The answer from a reply's value. Raises WireError when it cannot be read."""
        if payloads:
            raise WireError(f"the answer to {type(self).__name__} came with {len(payloads)} payload frames", self.id)
        try:
            return cast(R, _values[type(self)].decode(value))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"the answer to {type(self).__name__} does not decode: {error}", self.id) from error


class LearnerRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    durable: ClassVar[bool] = True
    incarnation: int | None = None  # the sender's, once it has attached
    instance: str = ""  # likewise
    position: contract.LogPosition | None = None  # likewise: the one in the newest answer that the sender got


class Attach(LearnerRequest[contract.Attached], frozen=True, kw_only=True, tag="attach"):
    report: contract.LearnerReport


class Offer(LearnerRequest[int], frozen=True, kw_only=True, tag="offer"):
    once: ClassVar[bool] = True
    tasks: Tasks
    changes: list[contract.WeightChange] = []  # weights as these tasks have them; the first is number `first_change`
    first_change: Tally = 0


class Take(LearnerRequest[list[contract.StoredGroup] | None], frozen=True, kw_only=True, tag="take"):
    """Answered with the groups, whose payloads follow as frames unless the sender has them; None: not ready."""

    step: StepNumber
    count: Count
    wait_s: WaitSeconds
    in_order: bool = False
    held: HeldTokens = []  # tokens of groups whose payload the sender has
    look: bool = False  # some of the oldest ready groups that it lacks, at once; nothing is recorded

    def read(self, value: msgspec.Raw, payloads: Sequence[bytes]) -> list[contract.StoredGroup] | None:
        groups = super().read(value, ())
        sent = [group for group in groups or () if not group.held]
        if len(payloads) != len(sent):
            raise WireError(f"{len(sent)} groups came with {len(payloads)} payload frames", self.id)
        for group, payload in zip(sent, payloads, strict=True):
            msgspec.structs.force_setattr(group, "payload", payload)  # no other code has seen this group yet
        return groups


class Regenerate(LearnerRequest[None], frozen=True, kw_only=True, tag="regenerate"):
    step: StepNumber
    serials: Serials


class Filter(LearnerRequest[None], frozen=True, kw_only=True, tag="filter"):
    step: StepNumber
    serials: Serials
    most_replaced: Annotated[int, Meta(ge=0)]


class Commit(LearnerRequest[int], frozen=True, kw_only=True, tag="commit"):
    step: StepNumber


class Evaluate(LearnerRequest[contract.Evaluated], frozen=True, kw_only=True, tag="evaluate"):
    durable: ClassVar[bool] = False
    order: EvaluationOrder | None  # None: no round is under way
    tasks: Tasks = []  # held-out problems of the round
    stored: Serials = []  # results that need not be sent again
    shared: bool = False


class Report(LearnerRequest[contract.HeartbeatReply | None], frozen=True, kw_only=True, tag="report"):
    report: contract.LearnerReport
    log: Text | None = None  # the end of the log that the last answer asked for
    log_rank: int = -1

    @property
    def promised(self) -> bool:
        """Only a learner's last report, because nodes leave because of it."""
        return self.report.state in contract.LEARNER_ENDED


class Gather(Request[contract.RendezvousOrder], frozen=True, kw_only=True, tag="gather"):
    report: contract.MachineReport
    log: Text | None = None  # as in Report
    log_rank: int = -1


class Stop(Request[contract.BrokerStatus], frozen=True, kw_only=True, tag="stop"):
    """Asks every role to leave; needs the learner's key. A broker that starts anew has forgotten it."""


class SetWeights(Request[int], frozen=True, kw_only=True, tag="set_weights"):
    """Asks the learner for other weights of sources; needs the learner's key. Answered with the next task's serial."""

    durable: ClassVar[bool] = True
    request: contract.WeightRequest


class NodeRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    @property
    def node(self) -> str | None:
        """The node id that the request speaks for."""
        return None

    @property
    def run(self) -> str:
        """The run_id of the run that the node belongs to; '' while it does not say."""
        return ""


class NodeReportRequest(NodeRequest[R], Generic[R], frozen=True, kw_only=True):
    report: contract.NodeReport

    @property
    def node(self) -> str | None:
        return self.report.node_id

    @property
    def run(self) -> str:
        return self.report.run_id


class NamedNodeRequest(NodeRequest[R], Generic[R], frozen=True, kw_only=True):
    node_id: Name
    run_id: Text = ""  # as NodeReport's

    @property
    def node(self) -> str | None:
        return self.node_id

    @property
    def run(self) -> str:
        return self.run_id


class Register(NodeReportRequest[contract.RunInfo], frozen=True, kw_only=True, tag="register"):
    pass


class AskLease(NamedNodeRequest[list[contract.Lease]], frozen=True, kw_only=True, tag="lease"):
    once: ClassVar[bool] = True
    version: Version
    max_groups: Count
    wait_s: WaitSeconds


class Cancel(NodeRequest[None], frozen=True, kw_only=True, tag="cancel"):
    """The sender no longer wants the answer to its request `target`."""

    target: int


class Heartbeat(NodeReportRequest[contract.HeartbeatReply], frozen=True, kw_only=True, tag="heartbeat"):
    tokens: Tokens
    log: Text | None = None  # the end of the log that the last answer asked for
    spans: SpanBatch | None = None  # at most as many bytes as the answers allow


class Complete(NamedNodeRequest[bool], frozen=True, kw_only=True, tag="complete"):
    """The group follows as one payload frame."""

    payloads: ClassVar[int] = 1
    durable: ClassVar[bool] = True
    token: Token
    meta: GroupMeta


class CompleteEvaluation(NamedNodeRequest[bool], frozen=True, kw_only=True, tag="complete_evaluation"):
    token: Token
    result: EvaluationResult


class Fail(NamedNodeRequest[None], frozen=True, kw_only=True, tag="fail"):
    token: Token
    reason: Reason
    tokens: Tally = 0
    seconds: Seconds = 0.0
    transcript: TranscriptData = b""  # JSON of a Transcript of its longest sample; b'': none


class Release(NamedNodeRequest[None], frozen=True, kw_only=True, tag="release"):
    tokens: Tokens


class Leave(NamedNodeRequest[None], frozen=True, kw_only=True, tag="leave"):
    pass


class ReportService(NodeRequest[contract.ServiceOrder], frozen=True, kw_only=True, tag="report_service"):
    """Sent by a scorer, with a node's key: the rule for node ids is that for its name."""

    report: contract.ServiceReport
    log: Text | None = None  # as in Heartbeat

    @property
    def node(self) -> str | None:
        return self.report.name


class ObserverRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    pass


class AskStatus(ObserverRequest[contract.BrokerStatus], frozen=True, kw_only=True, tag="status"):
    pass


class AskLedger(ObserverRequest[list[contract.LedgerEntry]], frozen=True, kw_only=True, tag="ledger_page"):
    """Answered with at most contract.LEDGER_LINES lines, from the task `first` on; none: that was all."""

    first: Tally = 0
    unfinished: bool = False  # neither committed nor dead


class AskEvents(ObserverRequest[list[contract.BrokerEvent]], frozen=True, kw_only=True, tag="events"):
    after: int


class AskLog(ObserverRequest[str | None], frozen=True, kw_only=True, tag="log"):
    """The end of a role's log, which may have prompts and secrets in it; None: the role has been asked, ask again."""

    role: Name


LearnerMessage = Attach | Offer | Take | Regenerate | Filter | Commit | Evaluate | Report
LauncherMessage = Gather | Stop | SetWeights
NodeMessage = (
    Register | AskLease | Cancel | Heartbeat | Complete | CompleteEvaluation | Fail | Release | Leave | ReportService
)
ObserverMessage = AskStatus | AskLedger | AskEvents | AskLog
AnyRequest = LearnerMessage | LauncherMessage | NodeMessage | ObserverMessage


class Reply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    id: int
    schema: int = SCHEMA


class Refused(Reply, frozen=True, kw_only=True, tag="refused"):
    """The request changed nothing; id -1 when it could not be read."""

    reason: str
    store_changed: bool = False  # the log does not contain the sender's position


class Waiting(Reply, frozen=True, kw_only=True, tag="waiting"):
    """The request arrived; its answer takes longer, for `reason`. The sender continues to wait."""

    reason: str


class NotLeading(Reply, frozen=True, kw_only=True, tag="not_leading"):
    """This broker stands by; `leader` is the address of the one that leads, '' while there is none."""

    leader: str = ""


class Answer(Reply, Generic[R], frozen=True, kw_only=True, tag="answer"):
    """The request was carried out, or had nothing to do."""

    value: R
    position: contract.LogPosition | None = None  # in promised answers to a learner: where the log is when it gets this


def value_of(reply: Reply) -> Any:
    return cast("Answer[Any]", reply).value if isinstance(reply, Answer) else None


AnyAnswer = Answer[msgspec.Raw]
SingleReply = Refused | Waiting | NotLeading | AnyAnswer


class Batch(Reply, frozen=True, kw_only=True, tag="batch"):
    """Several replies without payloads to one client, `id` -1."""

    replies: list[SingleReply]


AnyReply = SingleReply | Batch


class _Envelope(msgspec.Struct, frozen=True):
    """The fields of every schema version."""

    id: int = -1
    schema: int = SCHEMA


_Message = TypeVar("_Message", bound=Request[Any] | Reply)
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)
_envelopes = msgspec.msgpack.Decoder(_Envelope)
encode: Callable[[Request[Any] | Reply], bytes] = msgspec.msgpack.Encoder().encode
_values = {  # for each request R of Request[R]
    kind: msgspec.msgpack.Decoder(get_args(kind.__orig_bases__[0])[0]) for kind in get_args(AnyRequest)
}


def decode_request(header: bytes | memoryview, payloads: int) -> AnyRequest:
    """Header bytes to a request that `payloads` frames follow. Raises WireError."""
    request = _decode(header, _requests)
    if payloads != request.payloads:
        found = f"{type(request).__name__} came with {payloads} payload frames, not {request.payloads}"
        raise WireError(found, request.id)
    return request


def decode_reply(header: bytes | memoryview) -> AnyReply:
    """Header bytes to a reply; the request reads an answer's value. Raises WireError."""
    return _decode(header, _replies)


def _decode(header: bytes | memoryview, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    unreadable = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    try:
        message = found = decoder.decode(header)
        reason = ""
    except unreadable as error:
        message = None
        found = _Envelope()
        reason = f"does not decode: {error}"
        with contextlib.suppress(*unreadable):
            found = _envelopes.decode(header)
    if found.schema != SCHEMA:
        reason = f"message schema {found.schema}, this side speaks {SCHEMA}; use the same slipstream release on both"
    if message is None or reason:
        raise WireError(reason, found.id)
    return message
