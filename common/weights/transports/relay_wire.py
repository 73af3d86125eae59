"""What a relay's client (DEALER) and server (ROUTER) say to each other.

    client -> server  Get    these bytes of the payload `key`, please
    server -> client  Piece  here they are, as a second frame of end - start bytes
    server -> client  Gone   they are not to be had (any more) here, with the reason

The client has at most CREDIT pieces under way: that bounds what waits in any queue, at either end, whatever the two
speeds. Pieces come in the order in which they were asked for.
"""

from typing import Annotated

import msgspec

PIECE_BYTES = 1 << 20
CREDIT = 8  # pieces asked for and not yet taken in

Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
PayloadKey = Annotated[str, msgspec.Meta(max_length=256)]


class Get(msgspec.Struct, frozen=True):
    key: PayloadKey
    start: Offset
    end: Offset


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    start: Offset
    end: Offset


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_get = msgspec.msgpack.Decoder(Get).decode
decode_answer = msgspec.msgpack.Decoder(Piece | Gone).decode
