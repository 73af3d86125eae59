"""The rows of the JSONL files that a config names."""

from pathlib import Path

import msgspec

from common.errors import UsageError


def read_rows(path: Path, key: str) -> list[tuple[int, bytes]]:
    """(line number from 1, line) of a JSONL file, each checked to be a JSON object; blank lines are skipped.

    Raises:
        UsageError: naming `key`, the file and the line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{key}: cannot read {path}: {error.strerror or error}") from None
    rows: list[tuple[int, bytes]] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise UsageError(f"{key}: {path} line {number} is not JSON: {error}") from None
        except RecursionError:
            raise UsageError(f"{key}: {path} line {number} is nested too deeply to be read") from None
        if not isinstance(value, dict):
            raise UsageError(f"{key}: {path} line {number}: expected a JSON object, found {type(value).__name__}")
        rows.append((number, text))
    if not rows:
        raise UsageError(f"{key}: {path} has no rows")
    return rows
