"""Follow a file of JSON lines that another process writes: only what was added is read again."""

import os
from pathlib import Path
from typing import Any

from common.json_lines import lines_of

READ_BYTES = 1 << 24  # at once; a longer line is passed over


class LineTail:
    """The whole lines of a file that are JSON objects; other lines are passed over."""

    def __init__(self, path: Path, offset: int = 0, inode: int = -1) -> None:
        """`offset` and `inode`: where an earlier reader of this file was, its own fields."""
        self.path, self.offset, self.inode = path, offset, inode

    def read(self, limit: int = READ_BYTES) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the file was replaced, so that earlier lines are void; the new lines). Raises OSError.

        At most `limit` bytes are read, and as many again while they have no such line. So there may be more lines when
        some are returned. A file that does not exist has none.
        """
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                replaced = self.inode != -1 and (stat.st_ino != self.inode or stat.st_size < self.offset)
                self.offset, self.inode = 0 if replaced else self.offset, stat.st_ino
                while True:
                    file.seek(self.offset)
                    data = file.read(limit)
                    whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == limit else b"")
                    self.offset += len(whole)
                    lines = list(lines_of(whole, dict[str, Any]))
                    if lines or not whole:
                        return replaced, lines
        except FileNotFoundError:
            return False, []
