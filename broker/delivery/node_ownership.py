"""Which credential speaks for which node id."""

from collections.abc import Callable

MOST_OWNERS = 4096  # then those whose nodes are gone are forgotten


class NodeOwners:
    """Node id -> public key. The first credential that names an id speaks for it."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def get(self, node_id: str) -> str | None:
        """The public key that speaks for `node_id`; None: nobody has named it."""
        return self.keys.get(node_id)

    def bind(self, node_id: str, public: str, alive: Callable[[str], bool]) -> None:
        """From now on `public` speaks for `node_id`; `alive`: whether a node lives."""
        if len(self.keys) >= MOST_OWNERS:
            self.keys = {known: key for known, key in self.keys.items() if alive(known)}
        self.keys[node_id] = public
