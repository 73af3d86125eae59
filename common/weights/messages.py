"""Control messages of the weight plane, between the learner's publisher (ROUTER) and each node (DEALER).

One publish of version V to a set of nodes:

    learner -> node  Epoch      form the collective group `epoch` (rank, world_size, store)   [on change of membership]
    learner -> node  Publish    V, layout digest, bucket checksums: start receiving into staging
    node -> learner  Staged     every bucket arrived and its checksum is right: the only acknowledgement
    learner -> node  Activate   flip when ready; no barrier between nodes
    node -> learner  Active     flipped, and the engine's weights are proven; carries stall and canary figures
    node -> learner  Rejected   staging or proof failed, with the reason; that node does not generate

A newcomer sends Join. It gets Welcome, an epoch of its own, and the current version over the relay. That comes from the
learner or from a node that has it, which the learner asks first:

    learner -> node  Serve      may another node fetch V from your staging buffer?
    node -> learner  Serving    yes, here; or no, and why

Frames: [MessagePack of the tagged union], keyed structs, append-only fields.
"""

from typing import Annotated

import msgspec

from common.weights.layout import Layout
from common.wire_types import Finite, Name, Text, Version

Key = Annotated[str, msgspec.Meta(max_length=40)]  # a CURVE key, Z85; '' where there are no keys
Versions = Annotated[dict[Name, Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=16)]


class Canary(msgspec.Struct, frozen=True):
    """Tokens and the learner's log-probabilities of them at this version.

    `logprobs[i]` is the log-probability of `tokens[i + 1]` given `tokens[: i + 1]`, at temperature 1.
    """

    tokens: list[int]
    logprobs: list[float]
    tolerance: float


# node -> learner
class Join(msgspec.Struct, frozen=True, tag="join"):
    node_id: Name
    pid: int
    incarnation: int = -1  # that of the learner whose weights the node has; -1: none
    version: Version = -1
    transports: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ("gloo",)  # that the node can receive over
    versions: Versions = {}  # common.weights.transports.nccl.shared_versions(); {} from older nodes


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


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    node_id: Name


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    node_id: Name


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The answer to Serve: where the payload `key` can be fetched, or ('' as address) why not."""

    node_id: Name
    key: Name
    address: Text = ""
    public: Key = ""
    reason: Text = ""


# learner -> node
class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    incarnation: int
    layout: Layout


class Source(msgspec.Struct, frozen=True):
    """Where one payload can be fetched over the relay: at the learner, or at a node that has the version.

    The keys are made for this fetch alone and travel over the authenticated control socket; '' without credentials.
    """

    address: str
    key: str  # names the payload there
    server_public: Key = ""
    public: Key = ""
    secret: Key = ""


class Epoch(msgspec.Struct, frozen=True, tag="epoch"):
    """Form group `epoch` of `world_size` members over `transport`; the learner is rank 0."""

    epoch: int
    rank: int
    world_size: int
    store_host: str
    store_port: int
    timeout_s: float
    transport: str = "gloo"
    source: Source | None = None  # for the relay only


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
    encoding: str = "full"  # full: the buckets are the flat buffer; delta: they change `base_version` into it
    base_version: int = -1  # a version of this incarnation; -1: none needed
    payload_bytes: int = -1  # size of all buckets; -1: the layout's total_bytes
    sha256: str = ""  # SHA-256 of a payload from another node, where the fleet has keys; xxh3 finds accidents only


class Activate(msgspec.Struct, frozen=True, tag="activate"):
    incarnation: int
    version: int


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Let the holder of `client_public` ('': anyone) fetch a version that this node has, for `timeout_s`."""

    incarnation: int
    version: int
    key: str
    timeout_s: float
    reach: str  # HOST:PORT of the learner: serve on the interface that leads there
    client_public: Key = ""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    pass


class Eject(msgspec.Struct, frozen=True, tag="eject"):
    """The learner dropped this node from the group; it may Join again, unless that would fail for the same reason."""

    reason: str
    final: bool = False


NodeMessage = Join | Staged | Active | Rejected | Leave | Pong | Serving
LearnerMessage = Welcome | Epoch | Publish | Activate | Ping | Eject | Serve

encode = msgspec.msgpack.Encoder().encode
decode_from_node = msgspec.msgpack.Decoder(NodeMessage).decode
decode_from_learner = msgspec.msgpack.Decoder(LearnerMessage).decode
