"""Folders that are either complete and on disk, or not there."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from common.process.files import replace_folder, sync


def staging_path(path: Path) -> Path:
    """Where the content of `path` is written before it is published; in the same folder, so a rename is atomic."""
    return path.with_name(f".{path.name}.partial")


def prepare(path: Path) -> Path:
    """An empty staging folder for `path`."""
    staging = staging_path(path)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def publish(path: Path, unsynced: Iterable[Path] | None = None) -> None:
    """Flush the staging folder to disk and rename it to `path`, replacing a folder that stands there.

    Args:
        path: the folder to be.
        unsynced: files of the staging folder that are not on the disk yet; None: all of them.
    """
    staging = staging_path(path)
    for file in sorted(staging.rglob("*")) if unsynced is None else unsynced:
        if file.is_file():
            sync(file)
    sync(staging)
    replace_folder(staging, path)
    sync(path.parent)
