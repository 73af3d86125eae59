"""Frames of the log, byte by byte: where one may end, what a scan passes over, and what it calls torn or damaged."""

import struct

import pytest
import xxhash

from broker.journal.segments import BLOCK, HEAD_BYTES, find_frames, head, padded, read_frame, scan

SEED = 7


def frame(seq: int, body: bytes = b"body", payload: bytes = b"", synced: int = 0) -> bytes:
    digest = xxhash.xxh3_64_intdigest(payload, SEED) if payload else 0
    return head(seq, synced, body, len(payload), digest, SEED) + body + payload


def block(*frames: bytes) -> bytes:
    """A write: frames, and zeros up to the next block."""
    data = b"".join(frames)
    return data + bytes(padded(len(data)) - len(data))


def found(data: bytes) -> tuple[list[int], int, bool]:
    """Sequence numbers, the end of the good part, and whether damage was found behind it."""
    seen = scan(data, SEED)
    return [one.seq for one in seen.frames], seen.end, seen.damaged


def test_a_head_is_written_as_the_format_says() -> None:
    fields = struct.pack("<4sIQQQQ", b"SLS1", 4, 3, 9, 8, 77)
    made = head(9, 8, b"body", 3, 77, SEED)
    assert made == fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields + b"body", SEED))
    assert len(made) == HEAD_BYTES == 48


def test_a_frame_may_end_with_the_data_and_not_one_byte_behind_it() -> None:
    data = bytes(5) + frame(3, b"abc", b"payload", synced=2)
    one = read_frame(data, 5, SEED)
    assert one is not None and one.end == len(data)
    assert (one.seq, one.synced, one.body, one.payload_offset, one.payload_bytes) == (3, 2, b"abc", 56, 7)
    for cut in (1, 7, 8, 11, 12, len(data) - 5):
        assert read_frame(data[:-cut], 5, SEED) is None
    empty = read_frame(frame(1, b""), 0, SEED)
    assert empty is not None and empty.end == HEAD_BYTES
    assert read_frame(data, 4, SEED) is None and read_frame(data, 5, SEED + 1) is None


@pytest.mark.parametrize(("size", "wanted"), [(0, 0), (1, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, 2 * BLOCK)])
def test_sizes_are_rounded_up_to_blocks(size: int, wanted: int) -> None:
    assert padded(size) == wanted


def test_writes_of_several_blocks_are_read_in_order_and_their_padding_is_passed_over() -> None:
    data = block(frame(4), frame(5)) + block(frame(6, payload=b"x" * 5000)) + block(frame(7))
    assert found(data) == ([4, 5, 6, 7], len(data), False)
    seen = scan(data, SEED)
    assert (seen.torn, [one.offset for one in seen.frames]) == ("", [0, 52, BLOCK, 3 * BLOCK])
    assert found(b"") == ([], 0, False)
    assert found(data[: 3 * BLOCK + 52]) == ([4, 5, 6, 7], 3 * BLOCK + 52, False), "the last block is not filled up"


def test_damaged_padding_is_passed_over_when_the_next_record_follows() -> None:
    data = bytearray(block(frame(1)) + block(frame(2)) + block(frame(3)))
    data[BLOCK - 1] = 1
    assert found(bytes(data)) == ([1, 2, 3], len(data), False)


def test_a_record_that_is_missing_in_the_middle_was_synced_if_a_later_one_says_so() -> None:
    first, last = block(frame(1)), block(frame(3, synced=1))
    assert found(first + bytes(BLOCK) + last) == ([1], BLOCK, False)
    last = block(frame(3, synced=2))
    assert found(first + bytes(BLOCK) + last) == ([1], BLOCK, True)
    assert found(first + block(b"x" * 60) + last) == ([1], BLOCK, True)
    assert scan(first + last, SEED).torn != "", "record 3 does not follow record 1"


def test_a_beginning_that_was_synced_is_damage_and_one_that_was_not_is_torn() -> None:
    assert found(block(b"x" * 60) + block(frame(1, synced=0))) == ([], 0, True)
    assert found(block(b"x" * 60)) == ([], 0, False)


def test_only_payloads_that_nothing_says_were_synced_are_checked() -> None:
    def damaged(*synced: int) -> bytes:
        """Three records; the payload of the second one has a wrong byte."""
        frames = [frame(n, payload=b"group %d" % n, synced=s) for n, s in enumerate(synced, 1)]
        frames[1] = frames[1][:-1] + b"?"
        return b"".join(frames)

    whole = len(damaged(0, 0, 0))
    assert found(damaged(0, 1, 2)) == ([1, 2, 3], whole, False)
    assert found(damaged(0, 1, 1)) == ([1], HEAD_BYTES + 11, False)
    assert "record 2" in scan(damaged(0, 1, 1), SEED).torn
    assert found(damaged(0, 0, 1)) == ([1], HEAD_BYTES + 11, False)


def test_frames_are_found_anywhere_behind_a_place_and_none_inside_another() -> None:
    inner = frame(8)
    data = b"..SLS1.." + frame(1) + b"SLS1" + frame(2, payload=inner) + b"SLS" + frame(3)
    assert [one.seq for one in find_frames(data, 0, SEED)] == [1, 2, 3]
    assert [one.seq for one in find_frames(memoryview(data), 8, SEED)] == [1, 2, 3]
    assert [one.seq for one in find_frames(data, 9, SEED)] == [2, 3]
    assert [one.seq for one in find_frames(frame(1) + frame(2), 0, SEED)] == [1, 2]
    assert [one.seq for one in find_frames(data, data.index(inner), SEED)] == [8, 3]
