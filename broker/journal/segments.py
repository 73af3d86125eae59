"""How records lie in a file: [head][body][payload], any number of them, then zeros up to the next block.

    head: magic, bytes of body, bytes of payload, sequence number, synced, checksum of payload, checksum of the head
    and the body

`synced` is the sequence number up to which everything had been synced when this frame was written. It separates a torn
tail, which was never acknowledged, from damage to older records, which is an error. Checksums are xxh3, seeded per
store, so that no payload can pass for a frame.
"""

import contextlib
import errno
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

MAGIC = b"SLS1"
BLOCK = 4096
_FIELDS = struct.Struct("<4sIQQQQ")
_DIGEST = struct.Struct("<Q")
HEAD_BYTES = _FIELDS.size + _DIGEST.size

Buffer = bytes | bytearray | memoryview | mmap.mmap
checksum = xxhash.xxh3_64_intdigest


class Frame(NamedTuple):
    """One record as it was found; `offset` is where its head begins."""

    offset: int
    seq: int
    synced: int
    body: bytes
    payload_offset: int
    payload_bytes: int
    payload_checksum: int

    @property
    def end(self) -> int:
        return self.payload_offset + self.payload_bytes


class Scan(NamedTuple):
    """Frames from the start of a file; `end` is where the good part ends, `torn` why it does, '' at the file's end."""

    frames: list[Frame]
    end: int
    torn: str
    damaged: bool  # the torn bytes had been synced


def head(seq: int, synced: int, body: bytes, payload_bytes: int, payload_checksum: int, seed: int) -> bytes:
    """The HEAD_BYTES that go before `body` and the payload."""
    fields = _FIELDS.pack(MAGIC, len(body), payload_bytes, seq, synced, payload_checksum)
    return fields + _DIGEST.pack(checksum(fields + body, seed))


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def read_frame(data: Buffer, offset: int, seed: int) -> Frame | None:
    """The frame that begins at `offset`, its payload unchecked; None when there is none, or it is cut or damaged."""
    start = offset + HEAD_BYTES
    if start > len(data):
        return None
    magic, body_bytes, payload_bytes, seq, synced, payload_checksum = _FIELDS.unpack_from(data, offset)
    if magic != MAGIC or start + body_bytes + payload_bytes > len(data):
        return None
    body = bytes(data[start : start + body_bytes])
    (digest,) = _DIGEST.unpack_from(data, offset + _FIELDS.size)
    if checksum(bytes(data[offset : offset + _FIELDS.size]) + body, seed) != digest:
        return None
    return Frame(offset, seq, synced, body, start + body_bytes, payload_bytes, payload_checksum)


def scan(data: Buffer, seed: int) -> Scan:
    """All frames in order; payloads that were not known to be synced are checked too."""
    frames: list[Frame] = []
    offset = 0
    torn = ""
    expected: int | None = None
    while offset < len(data):
        frame = read_frame(data, offset, seed)
        if frame is not None and expected in (None, frame.seq):
            frames.append(frame)
            offset = frame.end
            expected = frame.seq + 1
            continue
        block = padded(offset)
        if block != offset and not any(data[offset : min(block, len(data))]):
            offset = block
            continue
        following = next(find_frames(data, offset, seed), None)
        if following is not None and following.seq == expected:
            offset = following.offset  # only what fills a block up is damaged
            continue
        torn = _reason(data, offset, frame, expected)
        break
    damaged = bool(torn) and any(f.synced >= (expected or 0) for f in find_frames(data, offset, seed))
    return _without_bad_payloads(data, seed, Scan(frames, offset, torn, damaged))


def find_frames(data: Buffer, start: int, seed: int) -> Iterator[Frame]:
    """Frames that begin anywhere at or after `start`, in order of their offset."""
    whole = data if isinstance(data, bytes | bytearray | mmap.mmap) else bytes(data)
    position = whole.find(MAGIC, start)
    while position >= 0:
        frame = read_frame(data, position, seed)
        if frame is not None:
            yield frame
        position = whole.find(MAGIC, position + 1 if frame is None else frame.end)


def _without_bad_payloads(data: Buffer, seed: int, found: Scan) -> Scan:
    """Cut before the first payload that is not whole, among those that nothing says were synced."""
    synced = max((f.synced for f in found.frames), default=-1)
    for i, frame in enumerate(found.frames):
        if frame.seq <= synced or not frame.payload_bytes:
            continue
        payload = bytes(data[frame.payload_offset : frame.end])
        if checksum(payload, seed) != frame.payload_checksum:
            reason = f"the payload of record {frame.seq} is not whole"
            return Scan(found.frames[:i], frame.offset, reason, found.damaged)
    return found


def _reason(data: Buffer, offset: int, frame: Frame | None, expected: int | None) -> str:
    if frame is not None:
        return f"record {frame.seq} stands where record {expected} belongs"
    if not any(data[offset : offset + BLOCK]):
        return f"zeros where record {expected} belongs"
    return f"record {expected} is cut off or damaged"


STAGE_BYTES = 4 << 20


class SegmentFile:
    """`size` is where the next write begins; a write that fails leaves it where it was and may be repeated.

    Set it back to write the same bytes again.
    """

    def __init__(self, path: Path, stage: mmap.mmap) -> None:
        """Create `path`, empty; `stage` is an aligned buffer of STAGE_BYTES for one file at a time. Raises OSError."""
        self.path = path
        self.size = self._end = 0
        self._direct = True
        self._handle = self._open(os.O_CREAT | os.O_TRUNC)
        self._stage = stage

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Append the concatenation of `parts` and zeros up to the next block. Raises OSError, changing nothing."""
        begun = self.size
        filled = 0
        offset = begun
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    room = min(len(view), STAGE_BYTES - filled)
                    self._stage[filled : filled + room] = view[:room]
                    filled = filled + room
                    view = view[room:]
                    if filled == STAGE_BYTES:
                        self._flush(STAGE_BYTES, offset)
                        offset = offset + STAGE_BYTES
                        filled = 0
            if filled:
                end = padded(filled)
                self._stage[filled:end] = bytes(end - filled)
                self._flush(end, offset)
                offset += end
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, max(begun, self._end))  # bytes that are written again stay
            raise
        self.size = offset
        self._end = max(self._end, offset)

    def sync(self) -> None:
        """Wait until everything written is on the disk. Raises OSError."""
        os.fdatasync(self._handle)

    def close(self) -> None:
        os.close(self._handle)

    def _open(self, flags: int) -> int:
        common = os.O_RDWR | os.O_CLOEXEC | flags
        try:
            return os.open(self.path, common | (os.O_DIRECT if self._direct else 0), 0o666)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        self._direct = False
        return os.open(self.path, common, 0o666)

    def _flush(self, count: int, offset: int) -> None:
        assert count % BLOCK == 0
        with memoryview(self._stage) as view:
            done = 0
            while done < count:
                try:
                    written = os.pwrite(self._handle, view[done:count], offset + done)
                except OSError as error:
                    if not (self._direct and error.errno == errno.EINVAL):
                        raise
                    written = 0
                done += written
                if self._direct and (written % BLOCK or not written):  # the page cache takes any length
                    self._direct = False
                    old = self._handle
                    self._handle = self._open(0)
                    os.close(old)
