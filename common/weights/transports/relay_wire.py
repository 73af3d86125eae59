"""Messages between a relay's client (DEALER) and its server (ROUTER).

    client -> server  Get    asks for a range of bytes of the payload `key`
    server -> client  Piece  has them as a second frame of end - start bytes
    server -> client  Gone   they are not, or no longer, offered here; with the reason

The client has at most CREDIT pieces under way, which bounds every queue at both ends. Pieces come in the order of the
requests.
"""

from typing import Annotated

import msgspec

PIECE_BYTES = 1 << 20
CREDIT = 8  # pieces asked for and not yet received

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
