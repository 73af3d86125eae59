"""RUN/transcripts/failed-*: nodes send them with groups whose samples all failed. The broker has no tokenizer."""

import time
from pathlib import Path

import msgspec

from common.config.schema import TelemetryConfig
from common.process.run_dir import RunDir
from common.segments import LineThread, SegmentWriter
from common.transcripts import FAILED_BYTES, SentTranscript, Transcript

SPARE_BYTES = 4096  # the line that is written may be a little longer than the one that came


def failed_transcripts(run_dir: Path, telemetry: TelemetryConfig) -> LineThread[SentTranscript] | None:
    """The thread that checks and writes them, with a quarter of the limit; None: telemetry.transcripts is off."""
    writer = SegmentWriter(RunDir(run_dir).transcripts, "failed", (telemetry.transcripts_mib << 20) // 4)
    return LineThread("transcripts", writer, lambda: line_of) if telemetry.transcripts != "none" else None


def line_of(sent: SentTranscript) -> bytes:
    """The line, with what the broker knows better than the node; raises ValueError for what is no Transcript."""
    serial, node_id, data = sent
    own = {"serial": serial, "node_id": node_id, "time_s": time.time(), "why": ["failed"], "step": None}
    line = msgspec.json.encode(msgspec.structs.replace(msgspec.json.decode(data, type=Transcript), **own)) + b"\n"
    if len(line) > FAILED_BYTES + SPARE_BYTES:
        raise ValueError(f"a transcript of {len(line)} bytes, the limit is {FAILED_BYTES}")
    return line
