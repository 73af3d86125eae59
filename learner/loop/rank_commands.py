"""The commands of the lead rank to all ranks, one per turn of the training loop.

While the lead waits for groups it broadcasts WAIT about once a second, so that no collective reaches its limit.
"""

import msgspec

from broker.contract import StoredGroup


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """No batch yet; ask again."""


class Train(msgspec.Struct, frozen=True, tag="train"):
    """Train step `step` on `groups`, which the lead has checked."""

    step: int
    groups: list[StoredGroup]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The job was asked to stop: checkpoint and leave."""


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """The lead cannot go on; every rank leaves with this error instead of waiting for it."""

    reason: str
    hopeless: bool = False  # a learner that is started again would fail again


Command = Wait | Train | Drain | Fail

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Command).decode
