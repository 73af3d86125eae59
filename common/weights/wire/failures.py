"""Why a version did not arrive at a node, or must not be used there: a kind to branch on, and a sentence for people."""

import re
from enum import StrEnum

import msgspec


class FailureKind(StrEnum):
    GIVEN_UP = "given_up"  # another transfer took its place, or this side closed
    LATE = "late"  # a deadline passed
    GROUP = "group"  # a collective failed, or its group did not form
    DAMAGED = "damaged"  # other bytes arrived than were sent
    MISMATCH = "mismatch"  # the announcement does not fit the node's layout, epoch or buffer
    ENGINE = "engine"  # the engine failed, or does not answer
    PROOF = "proof"  # the engine's parameters are not the published ones
    CANARY = "canary"  # the engine computes other log-probabilities than the learner
    SILENT = "silent"  # the node does not answer
    LEFT = "left"  # the node is gone
    OTHER = "other"  # an error of a library, or a kind of a later release


class Failure(msgspec.Struct, frozen=True):
    """A reason with its sentence."""

    kind: FailureKind
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure that an exception stands for; a library's is the first line, without gloo's path and advice."""
        if isinstance(error, WeightsError):
            return cls(error.kind, str(error))
        text = str(error).strip().split("\n")[0] or type(error).__name__
        text = re.sub(r"\[/[^\]]*\.cc:\d+\]\s*", "", text).split(". This is typically caused")[0]
        return cls(FailureKind.OTHER, text)

    @classmethod
    def told(cls, kind: str, text: str) -> "Failure":
        """A failure as a message has it; its sender may be of another release."""
        known = kind in FailureKind.__members__.values()
        return cls(FailureKind(kind) if known else FailureKind.OTHER, text)


class WeightsError(RuntimeError):
    """Something went wrong with weights on their way; `kind` says what, by default what its class says."""

    kind = FailureKind.OTHER

    def __init__(self, text: str = "", kind: FailureKind | None = None) -> None:
        super().__init__(text)
        self.kind = kind or self.kind


class GivenUp(WeightsError):
    kind = FailureKind.GIVEN_UP


class Late(WeightsError):
    kind = FailureKind.LATE


class GroupFailed(WeightsError):
    kind = FailureKind.GROUP


class Damaged(WeightsError):
    kind = FailureKind.DAMAGED


class Mismatch(WeightsError):
    kind = FailureKind.MISMATCH


class StagingFailed(WeightsError):
    """A version was not staged."""


class ProofFailed(WeightsError):
    """The engine must not generate with the weights that it has."""

    kind = FailureKind.PROOF
