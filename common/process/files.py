"""Small things that are done to files in more than one place."""

import os
from pathlib import Path

import msgspec


def sync(path: Path) -> None:
    """Force a file's content, or the names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def pretty_json(value: object) -> bytes:
    """JSON for people, with a newline at its end, of anything that msgspec encodes."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def move_aside(path: Path) -> Path:
    """Rename to the first free of NAME-1, NAME-2, ..., before the suffix; returns the new path."""
    number = 1
    while (aside := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    return path.rename(aside)
