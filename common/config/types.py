"""The types of config values: ranges on every number, and the base of every config struct."""

from typing import Annotated

import msgspec
from msgspec import Meta

# Bounds keep every number finite, and every integer exact where it travels as a float. Messages leave them out.
MOST_INTEGER = 1 << 53
MOST_FLOAT = 1e300
Integer = Annotated[int, Meta(ge=-MOST_INTEGER, le=MOST_INTEGER)]
AboveOne = Annotated[float, Meta(gt=1, le=MOST_FLOAT)]
Positive = Annotated[int, Meta(ge=1, le=MOST_INTEGER)]
Natural = Annotated[int, Meta(ge=0, le=MOST_INTEGER)]
Number = Annotated[float, Meta(ge=-MOST_FLOAT, le=MOST_FLOAT)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]  # more than a billion overflows clocks
CollectiveSeconds = Annotated[float, Meta(ge=10, le=1e9)]  # ticks between ranks and calls to the broker must fit in
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0, le=MOST_FLOAT)]
NonNegative = Annotated[float, Meta(ge=0, le=MOST_FLOAT)]
Text = Annotated[str, Meta(min_length=1)]
Scalar = str | Integer | Number | bool
AddressSpace = Annotated[int, Meta(ge=32, le=MOST_INTEGER)]  # MiB; a Python process does not start with 24


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every config struct."""
