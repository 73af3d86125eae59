"""The training loop's interface to the weight plane; learner/publish/publisher.py implements it.

main.py builds it on the lead rank only: `learner.publish.publisher.create_publisher(config, incarnation) -> Publisher`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.weights.messages import Canary


@dataclass(frozen=True)
class PublishReceipt:
    """A version was copied into the flat buffer; the parameters may change again.

    Attributes:
        version: policy version of the snapshot.
        payload_bytes: size of the flat buffer, what one node receives.
        snapshot_s: seconds that `publish` took in the training loop, the wait for an earlier publish included.
    """

    version: int
    payload_bytes: int
    snapshot_s: float


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


@dataclass(frozen=True)
class PublishStats:
    """The weight plane so far.

    Attributes:
        published: versions handed to `publish`.
        version_sent: newest version that every live node staged; -1 before the first.
        publish_s: seconds from `publish` to the last Staged of the newest finished publish.
        publish_bytes: bytes sent for it, over all nodes.
        broadcast_s: seconds of `publish_s` from the announcement to the nodes on; the rest is the copy and its hash.
        seconds_to_active: from `publish` to the last Active of it.
        nodes: live members of the receiving group.
        ejections: nodes dropped so far because they died, stalled or failed.
        canary_max_difference: largest |difference| of a canary log-probability at the newest comparison, in nats.
        fatal: why no node may generate (every node's proof failed); None while any is fine.
        crashed: `fatal` is a crash of the publisher itself.
        version_active: oldest version that a live node runs now; -1 when one has none, or there is no node.
        canary_owed: a live node never compared the newest canary: it joined later, or skipped that version.
        undelivered: nodes that the version meant for them has not reached yet, the longest-waiting first.
    """

    published: int = 0
    version_sent: int = -1
    publish_s: float = 0.0
    publish_bytes: int = 0
    broadcast_s: float = 0.0
    seconds_to_active: float = 0.0
    nodes: int = 0
    ejections: int = 0
    canary_max_difference: float = 0.0
    fatal: str | None = None
    crashed: bool = False
    canary_owed: bool = False
    undelivered: tuple[Undelivered, ...] = ()
    version_active: int = -1


class Publisher(Protocol):
    """Sends policy versions to the nodes; lives on the lead rank, never blocks on a slow node."""

    def start(self) -> str:
        """Bind the control endpoint and start the sending thread; returns the endpoint's address."""
        ...

    def publish(self, version: int, named: Iterable[tuple[str, Tensor]], canary: Canary | None) -> PublishReceipt:
        """Copy `named` (Hugging Face name, full tensor) into the flat buffer, return, and send in the background.

        Consumes `named` to its end, because every rank must take part in producing it. May wait for an
        earlier publish to finish, at most `weights.timeout_s`.
        """
        ...

    def stats(self) -> PublishStats:
        """Figures so far; cheap, callable from any thread."""
        ...

    def close(self) -> None:
        """Stop sending and release the endpoint; a publish under way is finished or cut after `weights.timeout_s`."""
        ...
