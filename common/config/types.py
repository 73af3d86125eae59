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

# ---------------------------------------------------------------- names that anybody may extend
IMPORT_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"  # 'module:function'


def one_of(*names: str) -> Meta:
    """One of our names, or 'module:function' of anybody's; loading.py reads our names back for its messages."""
    return Meta(pattern=f"^(?:{'|'.join((*names, IMPORT_PATH))})$")


def names_in(pattern: str | None) -> list[str]:
    """The names of `one_of` in the pattern of a type; [] in any other."""
    head, found, _ = (pattern or "").partition(f"|{IMPORT_PATH})$")
    return head.removeprefix("^(?:").split("|") if found else []


# The parts of the loss; docs/losses.md. Their functions are in learner/loss/.
ObjectiveName = Annotated[
    str, one_of("ppo_clip", "cispo", "gspo", "gmpo", "sapo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "m2po")
]
AdvantageName = Annotated[
    str, one_of("grpo", "dr_grpo", "rloo", "reinforce_pp", "opo", "maxrl", "pass_at_k", "gdpo", "gae")
]
CorrectionName = Annotated[str, one_of("none", "tis", "icepop", "mis")]
ReductionName = Annotated[str, one_of("token_mean", "sequence_mean", "fixed_length")]
KlEstimatorName = Annotated[str, one_of("k1", "k2", "k3")]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every config struct."""
