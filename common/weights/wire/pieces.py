"""A part of a version in pieces: sealed by its source, checked before they count, passed on as they came.

Sealing is AES-256-GCM under a key of the part alone; the nonce is the piece's number. Every node of the fleet has the
key, so a tag alone would let a node forge pieces. The digests of the pieces do not: they come over the authenticated
control socket. They are of opened pieces, so that a source seals nothing before it is asked for. Under one key and
number no other sealed piece opens to the same bytes. Without credentials pieces travel as they are, and the digests
find accidents only.
"""

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import xxhash
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import structs

from common.weights.wire.failures import Damaged
from common.weights.wire.layout import DEPTH_SHARE
from common.weights.wire.messages import Part

SMALLEST, USUAL, LARGEST = 16 << 10, 1 << 20, 16 << 20  # bytes of a piece
MOST_PIECES = 16384  # for a version below 256 GiB: every announcement has their digests
PIECE_S = 0.001  # that a piece takes on a link at least, so that the work per piece does not count
TAG_BYTES = 16
RECENT = 32  # sealed pieces that a buffer keeps, for those who are right behind
OPENED_AT_ONCE = max(2, min(8, (os.cpu_count() or 1) // 4))  # pieces that a node checks and opens
THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))  # that seal; the next step computes meanwhile


def piece_bytes(size: int, nodes: int, rate: float) -> int:
    """How large the pieces of `size` bytes for a chain of `nodes` are; `rate`: bytes/s that a link has, 0 if unknown.

    The last of N nodes has everything N pieces after the first. Small pieces keep that short; work per piece bounds it.
    """
    wanted = max(size / (DEPTH_SHARE * max(nodes, 1)), rate * PIECE_S)
    usual = min(max(wanted, SMALLEST), USUAL)
    return int(min(max(usual, size / MOST_PIECES), LARGEST)) // 64 * 64


class PartBuffer:
    """A part in memory; its first `arrived` pieces are there. Any thread may call its methods."""

    def __init__(self, part: Part, payload: torch.Tensor, arrived: int | None = None) -> None:
        """`payload` [n] uint8 contains or gets the part; `arrived`: None for all. Raises ValueError if it cannot."""
        if not (0 <= part.start <= part.start + part.size <= payload.numel()) or part.piece_bytes < 1:
            raise ValueError(f"part {part.start} + {part.size} of a payload of {payload.numel()} bytes")
        self.part = part
        self.count: int = -(-part.size // part.piece_bytes)
        self.arrived = self.count if arrived is None else arrived
        self._ahead: set[int] = set()  # pieces that are there before an earlier one
        self._progress: Callable[[], None] = lambda: None
        self._memory: np.ndarray[Any, Any] = payload[part.start : part.start + part.size].numpy()
        self._cipher = AESGCM(part.key) if part.key else None
        self._digest_bytes = len(part.digests) // max(self.count, 1)
        self._recent: deque[tuple[int, Any]] = deque(maxlen=RECENT)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def arrived_bytes(self) -> int:
        return min(self.arrived * self.part.piece_bytes, self.part.size)

    def take_in(self, number: int, sealed: Any) -> None:
        """Check and open a piece; raises Damaged when it is not what the source sent. One that is there stays."""
        with self._lock:
            if number < self.arrived or number in self._ahead:
                return  # others read it
        room = self._room(number)
        try:
            self._open(number, memoryview(sealed), room)
        except (Damaged, InvalidTag, ValueError) as error:
            room[:] = 0  # it must not look like a version
            raise Damaged(f"piece {number} of {self.count}: {error or 'it does not open'}") from error
        with self._lock:
            self._recent.append((number, sealed))
            self._ahead.add(number)
            while self.arrived in self._ahead:
                self._ahead.remove(self.arrived)
                self.arrived += 1
        self._progress()

    def _open(self, number: int, sealed: memoryview, room: "np.ndarray[Any, Any]") -> None:
        """Everything that takes time lets other threads run. Raises InvalidTag, ValueError or Damaged."""
        opened: Any = room
        if self._cipher is not None:
            self._cipher.decrypt_into(nonce(number), sealed, None, opened)
        elif len(sealed) != len(room):
            raise ValueError(f"{len(sealed)} bytes, not {len(room)}")
        else:
            np.copyto(room, np.frombuffer(sealed, np.uint8))
        at = number * self._digest_bytes
        expected = self.part.digests[at : at + self._digest_bytes]
        if digest(opened, self._cipher is not None) != expected:
            raise Damaged("checksum mismatch")

    def watch(self, progress: Callable[[], None]) -> None:
        """Call `progress` after every piece that is taken in."""
        self._progress = progress

    def piece(self, number: int) -> Any:
        """Piece `number` as it travels; None once the buffer is closed, because the memory may be written again.

        Pieces that are still on their way then may be other bytes, which the receiver's digest refuses.
        """
        with self._lock:
            if self._closed:
                return None
            for kept, sealed in reversed(self._recent):
                if kept == number:
                    return sealed
            sealed = self.sealed(number)
            if self._cipher is not None:
                self._recent.append((number, sealed))
            return sealed

    def sealed(self, number: int) -> Any:
        """Piece `number`, made from the memory; without a key it is that memory."""
        room: Any = self._room(number)
        if self._cipher is None:
            return memoryview(room)
        sealed: Any = np.empty(len(room) + TAG_BYTES, np.uint8)  # `encrypt` would fill it with zeros before
        self._cipher.encrypt_into(nonce(number), room, None, sealed)
        return memoryview(sealed)

    def digest_of(self, number: int) -> bytes:
        """The digest of piece `number`, from the memory."""
        return digest(self._room(number), self._cipher is not None)

    def close(self) -> None:
        """The memory is about to be written: no piece comes from here any more."""
        with self._lock:
            self._closed = True
            self._recent.clear()

    def _room(self, number: int) -> "np.ndarray[Any, Any]":
        start = number * self.part.piece_bytes
        return self._memory[start : start + self.part.piece_bytes]


def new_part(payload: torch.Tensor, start: int, size: int, *, piece: int, origin: str, secured: bool) -> Part:
    """The part of `payload` [n] uint8 from `start`, in pieces of `piece` bytes, with their digests."""
    key = secrets.token_bytes(32) if secured else b""
    part = Part(secrets.token_hex(16), origin, start, size, piece, b"", key)
    buffer = PartBuffer(part, payload)
    with ThreadPoolExecutor(THREADS, "seal-weights") as pool:
        digests = pool.map(buffer.digest_of, range(buffer.count))
        return structs.replace(part, digests=b"".join(digests))


def nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def digest(piece: Any, secured: bool) -> bytes:
    """32 bytes that cannot be forged, or 16 that find accidents."""
    return blake3(piece).digest() if secured else xxhash.xxh3_128_digest(piece)
