"""Control messages of the weight plane, between the learner's publisher (ROUTER) and each node (DEALER).

One publish of version V to a set of nodes:

    learner -> node  Epoch      form the collective group `epoch` (rank, world_size)   [on change of membership]
    both ways        StoreEntries       entries of the store over which the members of that group meet
    learner -> node  Publish    V, layout digest, checksums: start receiving into staging
    node -> learner  Staged     everything arrived and its checksums are right: the only acknowledgement
    learner -> node  Activate   flip when ready; no barrier between nodes
    node -> learner  Active     flipped, and the engine's weights are proven; carries stall and canary figures
    node -> learner  Rejected   staging or proof failed, with the reason; that node does not generate

A newcomer sends Join. It gets Welcome, answers with Listening, and gets an epoch of its own over the relay. There a
version travels in parts, and every part from node to node:

    learner -> node  Publish    also has the parts and where to fetch each of them
    node -> learner  Stalled    nothing comes from there, or not what was sent
    learner -> node  Reroute    fetch the rest of it elsewhere
    learner -> node  Serve      serve a part of the version that you have

Other ranks of the learner that send parts of their own are connected to the same socket:

    source -> learner  PartReady  V is copied here, whole and as a delta to these versions
    learner -> source  SealPart      make the part of it that travels, in pieces of this size
    source -> learner  PartSealed    that part, which the source serves from now on
    learner -> source  Keep      the versions that are still needed

PartReady is repeated while the source has V, and SealPart until it is answered, since connections may lose messages.

Frames: [MessagePack of the tagged union], keyed structs, append-only fields.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from common.weights.wire.layout import AdapterLayout, Layout
from common.wire_types import Finite, Name, Text, Version

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
SCHEMA = 1  # changes when a release would misread another's messages
MOST_KEYS = 4096
# As base versions, of nodes for which a version may come as adapters: they have the frozen weights, need these, too, or
# get versions whole.
FROZEN, BOTH, WHOLE = -2, -3, -4
ADAPTERS = ("adapter", "both")  # their encodings
Entries = Annotated[dict[Name, Annotated[bytes, msgspec.Meta(max_length=1 << 16)]], msgspec.Meta(max_length=MOST_KEYS)]
Versions = Annotated[dict[Name, Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=16)]


class Canary(msgspec.Struct, frozen=True):
    """Tokens and the learner's log-probabilities of them at this version.

    `logprobs[i]` is the log-probability of `tokens[i + 1]` given `tokens[: i + 1]`, at temperature 1.
    """

    tokens: list[int]
    logprobs: list[float]
    tolerance: float


class Part(msgspec.Struct, frozen=True):
    """One source's share of a payload. Its pieces are sealed once; nodes pass them on as they came.

    Every piece but the last has `piece_bytes` bytes before it is sealed.
    """

    name: str  # at every place that serves it; cannot be guessed
    origin: str  # where its source serves it
    start: int  # in the payload
    size: int
    piece_bytes: int
    digests: bytes  # BLAKE3 of each opened piece (32 bytes each); without a key xxh3 (16)
    key: bytes = b""  # for AES-256-GCM; b'': the pieces travel as they are


# node -> learner
class Join(msgspec.Struct, frozen=True, tag="join"):
    node_id: Name
    pid: int
    incarnation: int = -1  # that of the learner whose weights the node has; -1: none
    version: Version = -1
    transports: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ("gloo",)  # that the node can receive over
    versions: Versions = {}  # common.weights.transports.nccl.shared_versions()
    machine: Text = ""  # from common.process.local_address.this_machine(); its nodes share a copy over the link
    pool: Text = ""  # eval: it gets evaluated versions only
    frozen: Text | None = None  # checksum of the frozen weights that it keeps, '' without; None: it merges no adapters
    schema: Count = SCHEMA


class OfVersion(msgspec.Struct, frozen=True):
    node_id: Name
    incarnation: int
    version: Version


class Staged(OfVersion, frozen=True, tag="staged"):
    receive_s: Finite
    epoch: int = -1  # epoch of the Publish that it answers; a retry has another one


class Active(OfVersion, frozen=True, tag="active"):
    stall_s: Finite  # generation paused for the flip
    checksum: Text  # checksum of the engine's weights, in layout order
    canary_max_difference: Finite | None = None  # None: no canary with this publish


class Rejected(OfVersion, frozen=True, tag="rejected"):
    reason: Text
    fatal: bool = False  # the node excludes itself (proof failed); False: the transfer failed, retry
    epoch: int = -1  # as in Staged
    kind: Text = ""  # a FailureKind


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    node_id: Name


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    node_id: Name


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The answer to Welcome: where other nodes can fetch from this one; '' if nowhere."""

    node_id: Name
    address: Text = ""


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """A part stands still at its piece `pieces`; repeated while it does. The node waits for a Reroute."""

    node_id: Name
    epoch: int
    part: Count
    source: Text
    pieces: Count
    reason: Text = ""  # '' for silence


class StoreEntries(msgspec.Struct, frozen=True, tag="meet"):
    """New entries of the store of group `epoch`, from the sender or, from the learner, of another member."""

    epoch: int
    entries: Entries


# another rank of the learner -> learner
class PartReady(msgspec.Struct, frozen=True, tag="offering"):
    """Source `number` has its part of a version; `sizes`: bytes of its payloads by base version, -1 the whole part."""

    number: Count
    incarnation: int
    version: Version
    checksum: Text
    sizes: dict[int, Count]


class PartSealed(msgspec.Struct, frozen=True, tag="sealed"):
    """Its part of a payload; `start` is 0. Without a part the source failed, for this reason."""

    number: Count
    incarnation: int
    version: Version
    base: int
    part: Part | None = None
    reason: Text = ""


# learner -> node
class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    incarnation: int
    layout: Layout
    # Serve on the interface that leads to this HOST:PORT; '': do not serve.
    learner_endpoint: str = msgspec.field(default="", name="reach")
    password: str = ""  # that all servers of parts ask for
    adapters: AdapterLayout | None = None  # None: versions never come as adapters


class Epoch(msgspec.Struct, frozen=True, tag="epoch"):
    """Form group `epoch` of `world_size` members over `transport`; the learner is rank 0."""

    epoch: int
    rank: int
    world_size: int
    timeout_s: float
    transport: str = "gloo"
    # Form the group on the interface that leads to this HOST:PORT.
    learner_endpoint: str = msgspec.field(default="", name="reach")


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    incarnation: int
    version: int
    epoch: int
    layout_digest: str
    bucket_bytes: int
    bucket_checksums: list[str]
    checksum: str  # checksum of the whole buffer
    timeout_s: float
    canary: Canary | None = None
    # With full the buckets are the flat buffer; with delta they change `base_version` into it. With adapter they are
    # the adapters, with both the frozen weights and, behind these, the adapters.
    encoding: str = "full"
    base_version: int = -1  # a version of this incarnation; -1: none needed
    payload_bytes: int = -1  # size of all buckets; -1: the layout's total_bytes
    parts: list[Part] = []  # over the relay
    sources: list[str] = []  # where to fetch each of them first
    frozen: str = ""  # checksum of the frozen weights that this needs, brings or is; '': none of these


class Activate(msgspec.Struct, frozen=True, tag="activate"):
    incarnation: int
    version: int


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Let other nodes fetch this part of a version that this node has; its digests may be missing."""

    incarnation: int
    version: int
    part: Part


class Reroute(msgspec.Struct, frozen=True, tag="reroute"):
    epoch: int
    part: int
    source: str


class SealPart(msgspec.Struct, frozen=True, tag="seal"):
    version: int
    base: int
    piece_bytes: int


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """Forget all versions that are older than the newest of these and not among them."""

    versions: list[int]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    pass


class EjectCode(StrEnum):
    NOT_MEMBER = "not_member"  # its message came without a Join
    DROPPED = "dropped"  # it was silent, or failed too often
    MALFORMED = "malformed"  # its message does not decode
    REVOKED = "revoked"  # its key is no longer allowed
    ROLE = "role"  # its key does not allow this message
    NODE_ID = "node_id"  # its key does not allow this node id
    VERSIONS = "versions"  # it has another NCCL or Slipstream than the learner


class Eject(msgspec.Struct, frozen=True, tag="eject"):
    """The learner dropped this node from the group; it may Join again, unless that would fail for the same reason."""

    reason: str
    final: bool = False
    code: str = ""  # an EjectCode


NodeMessage = Join | Staged | Active | Rejected | Leave | Pong | Listening | Stalled | StoreEntries
SourceMessage = PartReady | PartSealed
LearnerMessage = Welcome | Epoch | Publish | Activate | Ping | Eject | Serve | Reroute | StoreEntries | SealPart | Keep

encode = msgspec.msgpack.Encoder().encode
decode_from_node = msgspec.msgpack.Decoder(NodeMessage | SourceMessage).decode
decode_from_learner = msgspec.msgpack.Decoder(LearnerMessage).decode
