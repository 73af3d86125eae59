"""RUN/transcripts/failed-*: what nodes send with groups whose samples all failed. The broker has no tokenizer."""

import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from broker.delivery.tables import FailedTranscripts
from common.config.schema import TelemetryConfig
from common.line_thread import LineThread
from common.process.run_dir import RunDir
from common.segments import SegmentWriter
from common.transcripts import FAILED_BYTES, Transcript

SPARE_BYTES = 4096  # the line that is written may be a little longer than what came


class _Item(NamedTuple):
    serial: int
    node_id: str
    data: bytes


class TranscriptFiles(FailedTranscripts):
    """Checks and writes them in a thread, with a quarter of the limit."""

    def __init__(self, run_dir: Path, telemetry: TelemetryConfig) -> None:
        self._on = telemetry.transcripts != "off"
        writer = SegmentWriter(RunDir(run_dir).transcripts, "failed", (telemetry.transcripts_mib << 20) // 4)
        self._thread: LineThread[_Item] = LineThread("transcripts of failed groups", writer, lambda: line_of)

    @property
    def dropped(self) -> int:
        return self._thread.dropped

    def put(self, serial: int, node_id: str, transcript: bytes) -> None:
        if self._on:
            self._thread.put(_Item(serial, node_id, transcript))

    def close(self) -> None:
        self._thread.close()


def line_of(item: _Item) -> bytes:
    """The line, with what the broker knows better than the node; raises ValueError for what is no Transcript."""
    sent = msgspec.json.decode(item.data, type=Transcript)
    own = {"serial": item.serial, "node_id": item.node_id, "time_s": time.time(), "why": ["failed"], "step": None}
    line = msgspec.json.encode(msgspec.structs.replace(sent, **own)) + b"\n"
    if len(line) > FAILED_BYTES + SPARE_BYTES:
        raise ValueError(f"a transcript of {len(line)} bytes, the limit is {FAILED_BYTES}")
    return line
