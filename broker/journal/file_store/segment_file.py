"""An append-only file written past the page cache, in whole blocks from one aligned buffer.

Direct writes cost a tenth of the CPU of buffered ones (docs/adr/0005-an-own-log.md). Where the file system
refuses them, the same blocks are written through the page cache.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from broker.journal.file_store.frames import BLOCK, padded

STAGE_BYTES = 4 << 20


class SegmentFile:
    """`size` is where the next write begins; a write that fails leaves it where it was and may be repeated.

    Set it back to write the same bytes again.
    """

    def __init__(self, path: Path, stage: mmap.mmap) -> None:
        """Create `path`, empty; `stage` is an aligned buffer of STAGE_BYTES for one file at a time. Raises OSError."""
        self.path = path
        self.size = self._end = 0
        self._direct = True
        self._handle = self._open(os.O_CREAT | os.O_TRUNC)
        self._stage = stage

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Append the concatenation of `parts` and zeros up to the next block. Raises OSError, changing nothing."""
        begun = self.size
        filled, offset = 0, begun
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    room = min(len(view), STAGE_BYTES - filled)
                    self._stage[filled : filled + room] = view[:room]
                    filled, view = filled + room, view[room:]
                    if filled == STAGE_BYTES:
                        self._flush(STAGE_BYTES, offset)
                        offset, filled = offset + STAGE_BYTES, 0
            if filled:
                end = padded(filled)
                self._stage[filled:end] = bytes(end - filled)
                self._flush(end, offset)
                offset += end
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, max(begun, self._end))  # bytes that are written again stay
            raise
        self.size = offset
        self._end = max(self._end, offset)

    def sync(self) -> None:
        """Wait until everything written is on the disk. Raises OSError."""
        os.fdatasync(self._handle)

    def close(self) -> None:
        os.close(self._handle)

    def _open(self, flags: int) -> int:
        common = os.O_RDWR | os.O_CLOEXEC | flags
        try:
            return os.open(self.path, common | (os.O_DIRECT if self._direct else 0), 0o644)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        self._direct = False
        return os.open(self.path, common, 0o644)

    def _flush(self, count: int, offset: int) -> None:
        assert count % BLOCK == 0
        with memoryview(self._stage) as view:
            done = 0
            while done < count:
                try:
                    written = os.pwrite(self._handle, view[done:count], offset + done)
                except OSError as error:
                    if not (self._direct and error.errno == errno.EINVAL):
                        raise
                    written = 0
                done += written
                if self._direct and (written % BLOCK or not written):  # the page cache takes any length
                    self._direct = False
                    old, self._handle = self._handle, self._open(0)
                    os.close(old)
