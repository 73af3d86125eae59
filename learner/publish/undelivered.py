"""Which nodes a published version has not reached yet, and what each of them still has to do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # they bring torch
    from learner.publish.snapshot import Snapshot
    from learner.publish.transfer import Transfer


@dataclass(frozen=True)
class Undelivered:
    """A node without the version that is meant for it.

    Attributes:
        stage: queued (an earlier broadcast is under way), receiving (not Staged yet), flipping (Staged, not Active).
        since: when the broadcast to it began, or was asked for; perf_counter seconds.
    """

    node_id: str
    version: int
    stage: str
    since: float


class Receiver(Protocol):
    """What is asked of a member."""

    node_id: str
    version: int
    quarantined: str | None
    transfer: "Transfer | None"


def undelivered(
    members: Mapping[bytes, Receiver], transfers: "Iterable[Transfer]", current: "Snapshot | None"
) -> tuple[Undelivered, ...]:
    """The longest-waiting first."""
    found: list[Undelivered] = []
    for transfer in transfers:
        for stage, identities in (("receiving", transfer.receiving), ("flipping", transfer.flipping)):
            found += [
                Undelivered(members[i].node_id, transfer.snapshot.version, stage, transfer.started)
                for i in identities
                if i in members
            ]
    if current is not None:
        found += [
            Undelivered(m.node_id, current.version, "queued", current.started)
            for m in members.values()
            if m.transfer is None and m.quarantined is None and m.version != current.version
        ]
    return tuple(sorted(found, key=lambda one: one.since))
