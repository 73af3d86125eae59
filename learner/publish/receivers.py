"""The nodes of the weight plane as the learner sees them, and which way their weights take."""

from collections.abc import Iterable
from dataclasses import dataclass

from learner.publish.transfer import Transfer

MAX_ATTEMPTS = 3  # of one version to one node by one way: then by relay; after as many by relay it is ejected
RETURN_AFTER, RETURN_AFTER_MOST = 4, 64  # publishes by relay before the collective is tried again, doubled each time


@dataclass
class Member:
    """A node; `version` is what it runs of this incarnation, -1: nothing.

    Attributes:
        base: the version that its staging buffer holds, which a delta may start from; -1: it was written since.
        transports: what it can receive over.
        settled: it became active on this connection; before, it is a newcomer, who may hold up nobody.
        attempts: at `attempted_version`, by the way that it takes now.
        relayed: collectives with it failed; it gets the relay.
        returns_at: number of the publish at which a relayed one is tried in the collective again.
        return_after: publishes until then, next time.
        serving: fetches of other nodes that it was asked to serve and that are not over.
        poor_source: a fetch from it failed.
    """

    identity: bytes
    node_id: str
    last_heard: float
    transports: tuple[str, ...] = ("gloo",)
    version: int = -1
    base: int = -1
    canary_version: int = -1  # newest version at which it compared a canary
    welcomed: bool = False
    settled: bool = False
    attempts: int = 0
    attempted_version: int = -1
    relayed: bool = False
    returns_at: int = 0
    return_after: int = RETURN_AFTER
    serving: int = 0
    poor_source: bool = False
    quarantined: str | None = None
    transfer: Transfer | None = None

    def needs(self, version: int) -> bool:
        """Whether this version is still to be brought here."""
        return self.quarantined is None and self.version != version

    def begins(self, version: int) -> None:
        """An attempt at `version` starts."""
        if self.attempted_version != version:
            self.attempts, self.attempted_version = 0, version

    def receives(self, transfer: Transfer) -> None:
        """It is sent a version now, and whatever becomes of that, its buffer may be half written."""
        self.transfer, self.base = transfer, -1

    def runs(self, version: int) -> None:
        """It became active with this version."""
        self.version = self.base = version
        self.attempts, self.settled, self.poor_source = 0, True, False

    def to_relay(self, published: int) -> None:
        """Collectives with this node fail: from here on by relay, and back on probation some publishes later."""
        self.relayed, self.attempts = True, 0
        self.returns_at = published + self.return_after
        self.return_after = min(2 * self.return_after, RETURN_AFTER_MOST)


@dataclass(frozen=True)
class Split:
    """Who gets the next version which way; `probation` is the one of `together` that is there on trial."""

    together: list[Member]
    relayed: list[Member]
    probation: Member | None = None


def split(idle: list[Member], everyone: Iterable[Member], transport: str, published: int) -> Split:
    """Divide the nodes that need the current version.

    By collective go those that have received before and can; by relay newcomers, unless nobody has anything yet,
    and those whom the collective does not reach. One of these at a time is given another chance.
    """
    waiting = {m.identity for m in idle}
    begun = any(m.version >= 0 or (m.transfer is not None and m.identity not in waiting) for m in everyone)
    together: list[Member] = []
    relayed: list[Member] = []
    probation: Member | None = None
    for member in idle:
        if transport == "relay" or transport not in member.transports or (begun and not member.settled):
            relayed.append(member)
        elif not member.relayed:
            together.append(member)
        elif probation is None and member.attempts == 0 and member.returns_at <= published:
            probation = member
        else:
            relayed.append(member)
    if probation is not None:
        together.append(probation)
    return Split(together, relayed, probation)


def after_failure(member: Member, transfer: Transfer, published: int) -> str:
    """Count a failed attempt of a node that still answers; returns why it must be ejected, '' when it need not."""
    on_trial = transfer.probation
    if on_trial is not None:
        if on_trial == member.identity:
            member.to_relay(published)
        return ""  # the others did well without that one
    member.attempts += 1
    if member.attempts < MAX_ATTEMPTS:
        return ""
    if transfer.relayed or "relay" not in member.transports:
        return f"version {transfer.snapshot.version} failed {member.attempts} times"
    member.to_relay(published)
    return ""
