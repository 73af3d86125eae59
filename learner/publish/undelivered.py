"""Which nodes a published version has not reached yet, and what each of them still has to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they import torch
    from learner.publish.receiver_state import Receiver
    from learner.publish.snapshot import Snapshot

STAGES = {"joining": "queued", "idle": "queued", "flipping": "flipping"}  # by state; excluded nodes get nothing


@dataclass(frozen=True)
class Undelivered:
    """A node without the version that is meant for it.

    Attributes:
        stage: queued (an earlier broadcast is under way), receiving (not Staged yet), flipping (Staged, not Active).
        since: when the attempt began, or when the version was published; perf_counter seconds.
    """

    node_id: str
    version: int
    stage: str
    since: float


def undelivered(receivers: "Iterable[Receiver]", current: "Snapshot | None") -> tuple[Undelivered, ...]:
    """The longest-waiting first."""
    found: list[Undelivered] = []
    for receiver in receivers:
        attempt, stage = receiver.attempt, STAGES.get(receiver.state.value, "receiving")
        if attempt is not None:
            found.append(Undelivered(receiver.node_id, attempt.version, stage, attempt.started))
        elif stage == "queued" and current is not None and receiver.version != current.version:
            found.append(Undelivered(receiver.node_id, current.version, stage, current.started))
    return tuple(sorted(found, key=lambda one: one.since))
