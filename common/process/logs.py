"""Logging of a role: RUN/logs/ROLE-ID.log and stderr, one line per record with time, role, level and module."""

import logging
import os
import sys
import time
import unicodedata
from pathlib import Path

FORMAT = "%(asctime)s %(role)s %(levelname)-7s %(name)s: %(message)s"


class RecordFormatter(logging.Formatter):
    """Escapes as `visible` and indents further lines: models and environments may have written parts of a message.

    So only the first line of a record begins like a record. Tabs stay.
    """

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), kept="\n\t").rstrip("\n").replace("\n", "\n    ")


def setup_logging(role: str, role_id: str, logs_dir: Path | None, level: str = "info") -> None:
    """Send this process's log records to `logs_dir`/ROLE-ID.log and to stderr; None: to stderr only.

    Calling it again replaces the earlier handlers. When stderr already is that file (a supervisor redirected
    it), records are written once.
    """
    formatter = RecordFormatter(FORMAT, "%Y-%m-%dT%H:%M:%SZ", defaults={"role": f"{role}-{role_id}"})
    formatter.converter = time.gmtime  # logs of several machines are read side by side
    handlers: list[logging.Handler] = []
    if logs_dir is not None:
        logs_dir.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_path(logs_dir, role, role_id), encoding="utf-8"))
    if logs_dir is None or not _stderr_is(log_path(logs_dir, role, role_id)):
        handlers.append(logging.StreamHandler(sys.stderr))
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    logging.captureWarnings(True)


def visible(text: str, kept: str = "\n") -> str:
    """`text` with everything escaped that a terminal could obey: control characters, and those that turn text round.

    `kept`: characters that stay nevertheless.
    """
    if text.isprintable():
        return text
    return "".join(c if harmless(c) or c in kept else c.encode("unicode_escape").decode() for c in text)


def harmless(c: str) -> bool:
    """Whether a terminal only shows this character, as the spaces of every script."""
    return c.isprintable() or unicodedata.category(c) == "Zs"


def log_path(logs_dir: Path, role: str, role_id: str) -> Path:
    return logs_dir / f"{role}-{role_id}.log"


def log_end(path: Path) -> str:
    """The non-empty lines of the last 64 KiB of a log; '' when it cannot be read."""
    return "\n".join(last_lines(path, 1 << 16))


def last_lines(path: Path, count: int, max_bytes: int = 65536) -> list[str]:
    """Up to `count` last non-empty lines of a text file; [] when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - max_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def _stderr_is(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(2), path.stat())
    except OSError:
        return False
