"""Control messages of the weight plane, between the learner's publisher (ROUTER) and each node (DEALER).

One publish of version V to a set of nodes:

    learner -> node  Epoch      form the collective group `epoch` (rank, world_size, store)   [on change of membership]
    learner -> node  Publish    V, layout digest, bucket checksums: start receiving into staging
    node -> learner  Staged     every bucket arrived and its checksum is right: the only acknowledgement
    learner -> node  Activate   flip when ready; no barrier between nodes
    node -> learner  Active     flipped, what the engine now holds is proven; carries stall and canary figures
    node -> learner  Rejected   staging or proof failed, with the reason; that node does not generate

A newcomer says Join and gets Layout, its own two-member epoch and the current version at once.
Frames: [MessagePack of the tagged union], keyed structs, append-only fields.
"""

import msgspec

from common.bounds import Finite, Name, Text, Version
from common.weights.layout import Layout


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
    incarnation: int = -1  # of the learner whose weights the node holds; -1: none
    version: Version = -1


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    node_id: Name
    incarnation: int
    version: Version
    receive_s: Finite
    epoch: int = -1  # of the publish that it answers: a retry has another one


class Active(msgspec.Struct, frozen=True, tag="active"):
    node_id: Name
    incarnation: int
    version: Version
    stall_s: Finite  # generation paused for the flip
    checksum: Text  # of what the engine holds, in layout order
    canary_max_difference: Finite | None = None  # None: no canary with this publish


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    node_id: Name
    incarnation: int
    version: Version
    reason: Text
    fatal: bool = False  # the node quarantines itself (proof failed); False: the transfer failed, retry
    epoch: int = -1  # as in Staged


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    node_id: Name


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    node_id: Name


# learner -> node
class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    incarnation: int
    layout: Layout


class Epoch(msgspec.Struct, frozen=True, tag="epoch"):
    """Form group `epoch` of `world_size` members; the learner is rank 0."""

    epoch: int
    rank: int
    world_size: int
    store_host: str
    store_port: int
    timeout_s: float


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    incarnation: int
    version: int
    epoch: int
    layout_digest: str
    bucket_bytes: int
    bucket_checksums: list[str]
    checksum: str  # of the whole buffer
    timeout_s: float
    canary: Canary | None = None


class Activate(msgspec.Struct, frozen=True, tag="activate"):
    incarnation: int
    version: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    pass


class Eject(msgspec.Struct, frozen=True, tag="eject"):
    """The learner dropped this node from the group; it may Join again."""

    reason: str


NodeMessage = Join | Staged | Active | Rejected | Leave | Pong
LearnerMessage = Welcome | Epoch | Publish | Activate | Ping | Eject

encode = msgspec.msgpack.Encoder().encode
decode_from_node = msgspec.msgpack.Decoder(NodeMessage).decode
decode_from_learner = msgspec.msgpack.Decoder(LearnerMessage).decode
