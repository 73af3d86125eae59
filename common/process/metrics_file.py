"""The writer of RUN/metrics.jsonl."""

from pathlib import Path
from typing import Any

import msgspec

from common.json_lines import LineFile, lines_of
from common.metrics import no_file
from common.process.run_dir import write_atomic


class MetricsWriter(LineFile):
    """Appends one JSON line per step."""

    def __init__(self, path: Path, keep_before_step: int = 0) -> None:
        """Open for appending; lines of steps >= `keep_before_step` are removed first, as is a torn last line.

        A learner that resumes from step s writes its lines from s again, so the file has one per step. Lines of a
        `kind` are about a version, and those of version s stay.
        Raises UsageError when `path` is a folder, or may not be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = path.read_bytes() if path.exists() else b""
            lines = lines_of(data, dict[str, Any])
            kept = [x for x in lines if x.get("step", keep_before_step + 1) < keep_before_step + ("kind" in x)]
            if (text := b"".join(msgspec.json.encode(line) + b"\n" for line in kept)) != data:
                write_atomic(path, text)
            super().__init__(path)
        except (IsADirectoryError, PermissionError) as error:
            raise no_file(path, error) from None
