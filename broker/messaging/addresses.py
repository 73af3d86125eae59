"""The entries of broker.address that a client knows; one of these brokers leads."""

NOT_CONNECTED_S = 2.0  # without a connection for this long, the next entry is tried
SILENT_S = 8.0  # likewise without any answer
TURN_PAUSE_S = 0.2


class Addresses:
    """Shared by all connections of a client; they all use `current`.

    Args:
        text: one address, or several with commas between them.
    """

    def __init__(self, text: str) -> None:
        self.all = tuple(text.split(","))
        self.current = self.all[0]

    @property
    def several(self) -> bool:
        """Whether there is another one to try."""
        return len(self.all) > 1

    def turn(self, away_from: str, leader: str = "") -> str:
        """The address to try instead of `away_from`: the leader's where a standby broker named it, else the next."""
        if leader and leader not in self.all:
            self.all = (*self.all, leader)
        if self.current == away_from:
            self.current = leader or self.all[(self.all.index(away_from) + 1) % len(self.all)]
        return self.current
