"""What can be wrong with a store on disk."""

from pathlib import Path

from common.errors import BrokerError, UsageError


class StoreCorrupt(UsageError):
    """What was once synced cannot be read any more; the message names the file and the offset."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        self.path, self.offset = path, offset
        super().__init__(
            f"{path}: byte {offset}: {reason}; what the broker had acknowledged is damaged there. Restore the "
            "file from a copy, or start another run from the last checkpoint"
        )


class PayloadUnreadable(BrokerError):
    """A group that the store holds cannot be read back; the request that wants it is refused."""


class StoreFailed(BrokerError):
    """The disk refused a write for good; nothing after it was acknowledged."""
