"""Which way a version takes to which node: the group's broadcast, or a fetch over the relay."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learner.publish.receiver_state import Receiver

MAX_ATTEMPTS = 3  # attempts at one version in the group, then as many by relay; after those the node is ejected
RETURN_AFTER, RETURN_AFTER_MOST = 4, 64  # publishes by relay before the group is tried again; doubled each time


@dataclass(frozen=True)
class Route:
    """The way to one node, as earlier attempts determined it."""

    failures: int = 0  # failed attempts at `version` by the present way
    version: int = -1
    relayed: bool = False  # broadcasts with this node failed, so it fetches
    returns_at: int = 0  # number of the publish at which a relayed node is tried in the group again
    return_after: int = RETURN_AFTER  # publishes until then, next time

    def failures_at(self, version: int) -> int:
        """Failed attempts at `version`; those at other versions do not count."""
        return self.failures if self.version == version else 0

    def failed(self, version: int) -> "Route":
        """One more attempt at `version` failed."""
        return replace(self, failures=self.failures_at(version) + 1, version=version)

    def to_relay(self, published: int) -> "Route":
        """Fetch from now on; the group is tried again some publishes later."""
        longer = min(2 * self.return_after, RETURN_AFTER_MOST)
        return Route(0, self.version, True, published + self.return_after, longer)


def split(
    ready: "list[Receiver]", everyone: "Iterable[Receiver]", transport: str, published: int, version: int
) -> "tuple[list[Receiver], list[Receiver], Receiver | None]":
    """(nodes for the group, nodes for the relay, the member of the group that is on trial) for `version`.

    The group takes nodes that were active before and can receive over `transport`. The relay takes newcomers, unless
    no node has weights yet, and nodes that the group does not reach. One of the latter at a time gets another trial.
    """
    waiting = {r.identity for r in ready}
    begun = any(r.version >= 0 or (r.attempt is not None and r.identity not in waiting) for r in everyone)
    together: list[Receiver] = []
    relayed: list[Receiver] = []
    probation: Receiver | None = None
    for receiver in ready:
        route = receiver.route
        if transport == "relay" or transport not in receiver.transports or (begun and not receiver.settled):
            relayed.append(receiver)
        elif not route.relayed:
            together.append(receiver)
        elif probation is None and route.failures_at(version) == 0 and route.returns_at <= published:
            probation = receiver
        else:
            relayed.append(receiver)
    if probation is not None:
        together.append(probation)
    return together, relayed, probation
