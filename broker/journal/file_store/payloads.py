"""Payloads that lie in the store: read only when somebody wants them."""

import os
from pathlib import Path

from broker.journal.file_store.errors import PayloadUnreadable
from broker.journal.file_store.frames import Location, checksum
from broker.journal.stored_payload import KeptPayload


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:08d}.log"


class StoredPayload(KeptPayload):
    """A group's payload in the store; `location` is set once it has been written."""

    __slots__ = ("_folder", "_seed", "location")

    def __init__(self, folder: Path, seed: int, location: Location | None = None) -> None:
        self._folder, self._seed, self.location = folder, seed, location

    def read(self) -> bytes:
        """The payload, checked. Raises PayloadUnreadable."""
        place = self.location
        assert place is not None
        path = segment_path(self._folder, place.segment)
        try:
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), place.length, place.offset)
        except OSError as error:
            raise PayloadUnreadable(f"{path}: byte {place.offset}: a group cannot be read: {error}") from error
        if len(data) != place.length or checksum(data, self._seed) != place.checksum:
            raise PayloadUnreadable(
                f"{path}: byte {place.offset}: the group of {place.length} bytes that was stored there is damaged; "
                "restore the file from a copy, or start another run from the last checkpoint"
            )
        return data
