"""What the lead rank tells the others at the top of every turn of the training loop.

One broadcast per turn, at least every few seconds, so that no rank sits in a collective while the lead waits for
groups: WAIT keeps them in step with it.
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
    """Somebody asked the job to stop: checkpoint and leave."""


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """The lead cannot go on; every rank leaves with this error instead of waiting for it."""

    reason: str
    hopeless: bool = False  # a learner that is started again would fail again


Command = Wait | Train | Drain | Fail

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Command).decode
