"""Types of fields that come from another process, with limits that the decoder checks.

Numbers are finite and fit the columns of the ledger, and texts are short. So no message that decodes can make a later,
correct request fail. Limits cost nothing, because the decoder checks them in C.
"""

from typing import Annotated

from msgspec import Meta

INT32_MAX = (1 << 31) - 1
TALLY_MAX = 1 << 53
SECONDS_MAX = 1e15

StepNumber = Annotated[int, Meta(ge=-1, le=INT32_MAX)]  # -1: none yet
Version = Annotated[int, Meta(ge=-1, le=INT32_MAX)]  # -1: none yet
Tally = Annotated[int, Meta(ge=0, le=TALLY_MAX)]  # a sum over nodes stays exact as a float too
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]  # NaN fails both
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
