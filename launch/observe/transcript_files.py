"""Reads RUN/transcripts, also while it is written and pruned; lines that are torn, foreign or too long are passed over.

read(run, step, task, newest, limit) -> transcripts one by one; find(run, serial, sample) -> the newest of one episode.
"""

import heapq
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from common.process.run_dir import RunDir
from common.segments import segments
from common.transcripts import Transcript

PREFIXES = ("steps", "failed")  # whose writers are the learner and the broker
LONGEST_LINE = 4 << 20  # a writer's are shorter
CHUNK = 1 << 20


def read(
    run: RunDir, step: int | None = None, task: int | None = None, newest: bool = True, limit: int | None = None
) -> Iterator[Transcript]:
    """The transcripts of a step, of a task (its serial), or all of them, the newest first or the oldest.

    A step that was trained again after a crash shows once.
    """
    found = (_prefix(run.transcripts, prefix, step, task, newest) for prefix in PREFIXES)
    merged = heapq.merge(*found, key=lambda transcript: transcript.time_s, reverse=newest)
    return islice(_once(merged), limit)


def find(run: RunDir, serial: int, sample: int) -> Transcript | None:
    """The newest transcript of an episode; None when it was not kept, or was pruned."""
    return next((found for found in read(run, task=serial) if found.sample == sample), None)


def _once(found: Iterator[Transcript]) -> Iterator[Transcript]:
    seen: set[tuple[int, int, int]] = set()
    for transcript in found:
        if transcript.step is not None:
            key = transcript.serial, transcript.sample, transcript.step
            if key in seen:
                continue
            seen.add(key)
        yield transcript


def _prefix(folder: Path, prefix: str, step: int | None, task: int | None, newest: bool) -> Iterator[Transcript]:
    marks = [] if step is None else [b'"step":%d,' % step]  # quotes inside of texts are escaped
    marks += [] if task is None else [b'"serial":%d,' % task]
    decoder = msgspec.json.Decoder(Transcript)
    paths = segments(folder, prefix)
    for path in reversed(paths) if newest else paths:
        for line in _lines(path, newest):
            if not all(mark in line for mark in marks):
                continue  # decoding takes much longer
            try:
                transcript = decoder.decode(line)
            except ValueError:
                continue
            if step in (None, transcript.step) and task in (None, transcript.serial):
                yield transcript


def _lines(path: Path, newest: bool) -> Iterator[bytes]:
    try:
        file = path.open("rb")
    except FileNotFoundError:  # pruned
        return
    with file:
        spans = list(_spans(file))
        for start, end in reversed(spans) if newest else spans:
            file.seek(start)
            yield file.read(end - start)


def _spans(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Where the whole lines are that are not too long; at most CHUNK bytes are in memory."""
    start = position = 0
    while chunk := file.read(CHUNK):
        at = chunk.find(b"\n")
        while at >= 0:
            end = position + at
            if 0 < end - start <= LONGEST_LINE:
                yield start, end
            start = end + 1
            at = chunk.find(b"\n", at + 1)
        position += len(chunk)
