"""Exact deltas between two flat buffers: which 16-bit words changed, and by how much, block by block.

After one RL step 1 to 15 % of the bfloat16 weights differ, nearly all by one or two units in the last place. So
positions travel as gaps, and new values as small steps of the word read as an integer, modulo 2^16. A float32 element
is two words. A block travels in the smallest of its forms; the whole block is one of them.

A stream is one record per block, in order, without gaps:

    header   16 bytes: kind, bits per gap, bits per step, 0, changed words, gap codes, steps that did not fit (u32 each)
    positions  BITMAP: one bit a word; else gap codes of `gap_bits` (4, 8 or 16): unchanged words before each changed
             one; the highest code c means "c unchanged words and no changed one"
    steps    codes of `step_bits` (2, 4, 8): +1, -1, +2, -2, ... are 0, 1, 2, 3, ..., the highest code a step that did
             not fit; or the new words themselves (16)
    rest     the new words (u16) of the steps that did not fit

Widths of 4 and 2 bits fill bytes from their low end. Everything is little-endian. A block's record is checked before
the block is written. Only a checksum of the result shows whether the base was the right one.
"""

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.weights.wire.failures import Damaged

SAME, FULL, SPARSE = 0, 1, 2  # kinds of a block
BITMAP = 1  # as "bits per gap"
GAP_BITS, STEP_BITS = (4, 8, 16), (2, 4, 8)
RAW = 16  # as "bits per step"
WORD_BYTES = 2
BLOCK_BYTES = 4 << 20  # the size that learner and nodes encode with
_HEADER = struct.Struct("<BBBxIII")

Words = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


class WrongDelta(Damaged):
    """A stream that no encoder made for this buffer, or one that was damaged on its way."""


def encode(old: torch.Tensor, new: torch.Tensor, block_bytes: int, threads: int = 1) -> torch.Tensor:
    """The stream [m] uint8 that turns `old` into `new`, at most n + 16 bytes per block.

    Args:
        old, new: [n] uint8 on the CPU, n even; ValueError when the sizes do not fit.
        block_bytes: even; bytes that are encoded at a time. A thread's working memory is about 12 times this.
        threads: the stream does not depend on their number.
    """
    if old.numel() != new.numel():
        raise ValueError(f"a delta from {old.numel()} to {new.numel()} bytes; both must follow one layout")
    before, after = _words(old), _words(new)
    step = _block_words(block_bytes)
    blocks = [slice(at, at + step) for at in range(0, len(after), step)]
    with ThreadPoolExecutor(threads, "encode-weights") as pool:
        records = pool.map(_encode_block, [before[one] for one in blocks], [after[one] for one in blocks])
        stream = bytearray(b"".join(part for parts in records for part in parts))
    return torch.frombuffer(stream, dtype=torch.uint8) if stream else torch.zeros(0, dtype=torch.uint8)


def apply(stream: torch.Tensor, flat: torch.Tensor, block_bytes: int) -> None:
    """Turn `flat` [n] uint8, in place, from the stream's old buffer into its new one; `block_bytes` is the encoder's.

    Raises WrongDelta when the stream does not fit the buffer or itself; blocks before the wrong one are changed then.
    """
    words, data = _words(flat), _array(stream)
    step = _block_words(block_bytes)
    at = 0
    for start in range(0, len(words), step):
        try:
            at = _apply_block(data, at, words[start : start + step])
        except WrongDelta as error:
            raise WrongDelta(f"block {start // step}: {error}") from None
    if at != len(data):
        raise WrongDelta(f"{len(data) - at} bytes are left over behind the last block")


def largest(total_bytes: int, block_bytes: int) -> int:
    """Bytes that no stream for a buffer of `total_bytes` exceeds."""
    return total_bytes + _HEADER.size * -(-total_bytes // block_bytes)


def _encode_block(before: Words, after: Words) -> list[bytes]:
    differs = before != after
    changed = np.flatnonzero(differs)
    if not len(changed):
        return [_HEADER.pack(SAME, 0, 0, 0, 0, 0)]
    gaps = np.diff(changed, prepend=-1) - 1
    gap_bytes, gap_bits, gap_codes = _best_gaps(gaps, len(after))
    steps = (after[changed] - before[changed]).view(np.int16).astype(np.int32)  # modulo 2^16, never 0
    codes = np.where(steps > 0, 2 * steps - 2, -2 * steps - 1)
    step_bytes, step_bits, rest = _best_steps(codes)
    if gap_bytes + step_bytes >= WORD_BYTES * len(after):
        return [_HEADER.pack(FULL, 0, 0, 0, 0, 0), after.tobytes()]
    if gap_bits == BITMAP:
        positions = np.packbits(differs, bitorder="little").tobytes()
    else:
        positions = _pack(_gap_codes(gaps, gap_bits), gap_bits)
    header = _HEADER.pack(SPARSE, gap_bits, step_bits, len(changed), gap_codes, rest)
    if step_bits == RAW:
        return [header, positions, after[changed].tobytes()]
    highest = (1 << step_bits) - 1
    unfit = after[changed][codes >= highest]
    return [header, positions, _pack(np.minimum(codes, highest).astype(np.uint16), step_bits), unfit.tobytes()]


def _apply_block(data: Bytes, at: int, words: Words) -> int:
    """Apply the record at `at` of `data` to `words`; returns where the next one begins."""
    header, at = _take(data, at, _HEADER.size)
    kind, gap_bits, step_bits, count, gap_codes, rest = _HEADER.unpack(header.tobytes())
    if kind == SAME:
        return at
    if kind == FULL:
        body, at = _take(data, at, WORD_BYTES * len(words))
        words[:] = body.view(np.uint16)
        return at
    known = gap_bits in (BITMAP, *GAP_BITS) and step_bits in (RAW, *STEP_BITS)
    if kind != SPARSE or not known or not 0 < count <= len(words) or rest > count:
        raise WrongDelta(f"kind {kind}, {gap_bits} and {step_bits} bits, {count} of {len(words)} words, {rest} unfit")
    bits = len(words) if gap_bits == BITMAP else gap_codes * gap_bits
    positions, at = _take(data, at, -(-bits // 8))
    if gap_bits == BITMAP:
        changed = np.flatnonzero(np.unpackbits(positions, count=len(words), bitorder="little"))
    else:
        codes = _unpack(positions, gap_codes, gap_bits)
        ends = codes != (1 << gap_bits) - 1
        changed = np.cumsum(codes + ends, dtype=np.int64)[ends] - 1
    if len(changed) != count or int(changed[-1]) >= len(words):
        raise WrongDelta(f"positions of {len(changed)} words instead of {count}, within {len(words)}")
    body, at = _take(data, at, -(-count * step_bits // 8))
    if step_bits == RAW:
        words[changed] = body.view(np.uint16)
        return at
    codes = _unpack(body, count, step_bits)
    highest = (1 << step_bits) - 1
    unfit = codes == highest
    if int(np.count_nonzero(unfit)) != rest:
        raise WrongDelta(f"{int(np.count_nonzero(unfit))} steps that did not fit instead of {rest}")
    body, at = _take(data, at, WORD_BYTES * rest)
    half = (codes >> 1) + np.uint16(1)
    result = words[changed] + np.where(codes & 1, -half, half).astype(np.uint16)
    result[unfit] = body.view(np.uint16)
    words[changed] = result
    return at


def _best_gaps(gaps: NDArray[np.int64], words: int) -> tuple[int, int, int]:
    """(bytes, bits per gap, gap codes) of the smallest form."""
    forms = [(-(-words // 8), BITMAP, 0)]
    for bits in GAP_BITS:
        codes = len(gaps) + int((gaps // ((1 << bits) - 1)).sum())
        forms.append((-(-codes * bits // 8), bits, codes))
    return min(forms)


def _best_steps(codes: NDArray[np.int32]) -> tuple[int, int, int]:
    """(bytes, bits per step, steps that do not fit) of the smallest form."""
    forms = [(WORD_BYTES * len(codes), RAW, 0)]
    for bits in STEP_BITS:
        rest = int(np.count_nonzero(codes >= (1 << bits) - 1))
        forms.append((-(-len(codes) * bits // 8) + WORD_BYTES * rest, bits, rest))
    return min(forms)


def _gap_codes(gaps: NDArray[np.int64], bits: int) -> Words:
    """Gap g as g // highest times the highest code and then the remainder."""
    highest = (1 << bits) - 1
    ends = np.cumsum(gaps // highest + 1)
    codes = np.full(int(ends[-1]), highest, np.uint16)
    codes[ends - 1] = gaps % highest
    return codes


def _pack(codes: Words, bits: int) -> bytes:
    """`codes` below 2^bits, several to a byte from its low end."""
    if bits == 16:
        return codes.tobytes()
    per_byte = 8 // bits
    padded = np.zeros(-(-len(codes) // per_byte) * per_byte, np.uint8)
    padded[: len(codes)] = codes
    out = padded[0::per_byte].copy()
    for i in range(1, per_byte):
        out |= padded[i::per_byte] << (i * bits)
    return out.tobytes()


def _unpack(data: Bytes, count: int, bits: int) -> Words:
    """[count] codes; `data` has just the bytes that `_pack` makes of them."""
    if bits == 16:
        return data.view(np.uint16)
    per_byte = 8 // bits
    highest = (1 << bits) - 1
    out = np.empty(len(data) * per_byte, np.uint16)
    for i in range(per_byte):
        out[i::per_byte] = (data >> (i * bits)) & highest
    return out[:count]


def _take(data: Bytes, at: int, size: int) -> tuple[Bytes, int]:
    if at + size > len(data):
        raise WrongDelta(f"the stream ends at byte {len(data)}, {at + size} were announced")
    return data[at : at + size].copy() if at % WORD_BYTES else data[at : at + size], at + size


def _block_words(block_bytes: int) -> int:
    if block_bytes <= 0 or block_bytes % WORD_BYTES:
        raise ValueError(f"blocks of {block_bytes} bytes; a positive even number is needed")
    return block_bytes // WORD_BYTES


def _words(flat: torch.Tensor) -> Words:
    if flat.numel() % WORD_BYTES:
        raise ValueError(f"a buffer of {flat.numel()} bytes has no whole 16-bit words")
    return _array(flat).view(np.uint16)


def _array(flat: torch.Tensor) -> Bytes:
    shared: Any = flat.numpy()  # the same memory; raises unless it is contiguous and on the CPU
    return shared
