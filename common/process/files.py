"""Small things that are done to files in more than one place."""

import os
import shutil
from pathlib import Path

import msgspec


def sync(path: Path) -> None:
    """Force a file's content, or the names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(new: Path, path: Path) -> None:
    """Rename `new` to `path`; a folder that has this name already is removed. Raises OSError.

    A process that is killed in the middle leaves nothing torn under the name `path`. The next call removes what it
    had set aside.
    """
    aside = _set_aside(path)
    os.rename(new, path)
    shutil.rmtree(aside, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder, whose name goes first: a process that is killed in the middle leaves `.NAME.removed.tmp`."""
    shutil.rmtree(_set_aside(path), ignore_errors=True)


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f".{path.name}.removed.tmp")
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return aside


def pretty_json(value: object) -> bytes:
    """JSON for people, with a newline at its end, of anything that msgspec encodes."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def move_aside(path: Path) -> Path:
    """Rename to the first free of NAME-1, NAME-2, ..., before the suffix; returns the new path."""
    number = 1
    while (aside := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    return path.rename(aside)
