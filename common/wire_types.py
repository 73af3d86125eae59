"""Types of fields that come from another process, with the limits that decoding holds them to.

Numbers stay within what the ledger's columns hold and are finite, and texts are short: a message that decodes cannot
leave something behind that a later, innocent request trips over. Limits cost nothing: the decoder checks them in C.
"""

from typing import Annotated

from msgspec import Meta

INT32_MAX = (1 << 31) - 1
TALLY_MAX = 1 << 53
SECONDS_MAX = 1e15

StepNumber = Annotated[int, Meta(ge=-1, le=INT32_MAX)]  # -1: none yet
Version = Annotated[int, Meta(ge=-1, le=INT32_MAX)]  # -1: none yet
Tally = Annotated[int, Meta(ge=0, le=TALLY_MAX)]  # what is summed up over nodes stays exact as a float too
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]  # NaN fails both
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
