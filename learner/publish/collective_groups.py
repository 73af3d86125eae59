"""The collective groups of the weight plane: their epochs, their store, and the group that is kept for the next use."""

import itertools

from common.weights.collectives import Group, Store
from common.weights.messages import Epoch
from learner.publish.attempt import Attempt


class Groups:
    """Used by the control thread. The group of the last broadcast is used again while its members stay the same."""

    def __init__(self, address: str, transport: str, timeout_s: float) -> None:
        """Host the store on `address`, unless `transport` needs none; raises OSError when it cannot be bound."""
        self._transport, self._timeout_s = transport, timeout_s
        self._store = Store(address) if transport != "relay" else None
        self._numbers = itertools.count(1)
        self._kept: tuple[frozenset[bytes], Epoch, Group] | None = None

    def relay_epoch(self) -> Epoch:
        """A new epoch of one node that fetches; its source is added later."""
        return Epoch(next(self._numbers), 1, 2, "", 0, self._timeout_s, "relay")

    def take(self, members: list[bytes]) -> tuple[Epoch, Group | None]:
        """(epoch as rank 0, the kept group of exactly these members); None: a new group must be formed."""
        assert self._store is not None
        if self._kept is not None and self._kept[0] == frozenset(members):
            _, epoch, group = self._kept
            self._kept = None
            return epoch, group
        if self._kept is not None and not self._kept[0].isdisjoint(members):
            self.drop()  # those members leave the old group for the new one
        store, size = self._store, len(members) + 1
        epoch = Epoch(next(self._numbers), 0, size, store.host, store.port, self._timeout_s, self._transport)
        return epoch, None

    def give_back(self, attempt: Attempt, usable: bool) -> None:
        """The attempt is over: keep its group if it is `usable`, close it otherwise."""
        group = attempt.group
        if group is None:
            return
        if self._kept is not None and self._kept[2] is not group:
            if not usable:
                group.close()
                return
            self._kept[2].close()
        if usable:
            self._kept = (attempt.members, attempt.epoch, group)
        else:
            self._kept = None
            group.close()

    def left(self, member: bytes) -> None:
        """A node is gone, so its group cannot be used again."""
        if self._kept is not None and member in self._kept[0]:
            self.drop()

    def drop(self) -> None:
        """Keep no group."""
        if self._kept is not None:
            self._kept[2].close()
            self._kept = None
