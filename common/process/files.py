"""File operations that several packages share."""

import errno
import os
import shutil
from pathlib import Path

import msgspec

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errno of an OSError that ends when there is room again


def sync(path: Path) -> None:
    """Force a file's content, or the names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(new: Path, path: Path) -> None:
    """Rename `new` to `path`; a folder that has this name already is removed. Raises OSError.

    A process that is killed between the two renames leaves no folder at `path`, and the old one as
    `.NAME.removed.tmp`. A folder at `path` is always whole. The next call removes what was set aside.
    """
    aside = _renamed(path)
    os.rename(new, path)
    shutil.rmtree(aside, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so a killed process leaves `.NAME.removed.tmp`, never half a folder."""
    shutil.rmtree(_renamed(path), ignore_errors=True)


def _renamed(path: Path) -> Path:
    aside = path.with_name(f".{path.name}.removed.tmp")
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return aside


def pretty_json(value: object) -> bytes:
    """JSON for people, with a newline at its end, of anything that msgspec encodes."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def move_aside(path: Path) -> Path:
    """Rename FILE.EXT to the first free one of FILE-1.EXT, FILE-2.EXT, ...; returns the new path."""
    number = 1
    while (aside := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    return path.rename(aside)
