"""Records of a delta stream written by hand, from the format alone: what each says, and which ones are refused."""

import struct

import numpy as np
import pytest
import torch

from common.weights.wire import delta
from common.weights.wire.delta import WrongDelta

OLD = np.arange(100, 108, dtype=np.uint16)
BUCKET = OLD.nbytes


def record(kind: int, gap_bits: int, step_bits: int, counts: tuple[int, int, int], body: bytes = b"") -> bytes:
    """`counts`: changed words, gap codes, steps that did not fit."""
    return struct.pack("<BBBxIII", kind, gap_bits, step_bits, *counts) + body


def applied(stream: bytes, words: np.ndarray = OLD) -> list[int]:
    flat = torch.from_numpy(words.view(np.uint8).copy())
    delta.apply(torch.frombuffer(bytearray(stream), dtype=torch.uint8), flat, words.nbytes)
    return flat.numpy().view(np.uint16).tolist()


def encoded(new: list[int], words: np.ndarray = OLD) -> bytes:
    old, wanted = (torch.from_numpy(one.view(np.uint8).copy()) for one in (words, np.array(new, np.uint16)))
    return delta.encode(old, wanted, words.nbytes).numpy().tobytes()


def words_of(*values: int) -> bytes:
    return np.array(values, "<u2").tobytes()


@pytest.mark.parametrize(
    ("stream", "new"),
    [
        (record(0, 0, 0, (0, 0, 0)), [100, 101, 102, 103, 104, 105, 106, 107]),
        (record(1, 0, 0, (0, 0, 0), words_of(*range(8))), list(range(8))),
        (  # a bitmap; the steps +1, -1 and one that does not fit
            record(2, 1, 2, (3, 0, 1), bytes([0b1000_0011, 0b11_01_00]) + words_of(9000)),
            [101, 100, 102, 103, 104, 105, 106, 9000],
        ),
        (  # gaps of 4 bits: 0, then 6 unchanged words; steps of 4 bits: +7 is 12, -7 is 13
            record(2, 4, 4, (2, 2, 0), bytes([0x60, 0xDC])),
            [107, 101, 102, 103, 104, 105, 106, 100],
        ),
        (  # a gap of 8 bits; a step of 8 bits: -100 is 199
            record(2, 8, 8, (1, 1, 0), bytes([5, 199])),
            [100, 101, 102, 103, 104, 5, 106, 107],
        ),
        (record(2, 16, 16, (1, 1, 0), words_of(7, 1)), [100, 101, 102, 103, 104, 105, 106, 1]),
    ],
)
def test_a_record_means_what_the_format_says(stream: bytes, new: list[int]) -> None:
    assert applied(stream) == new


def test_the_highest_gap_code_passes_words_without_a_changed_one() -> None:
    old = np.zeros(40, np.uint16)
    body = bytes([0x1F, 0x00]) + words_of(5, 6)  # 15 unchanged, then 1 more before the first changed word; none between
    assert applied(record(2, 4, 16, (2, 3, 0), body), old) == [*[0] * 16, 5, 6, *[0] * 22]


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, (0, 0, 0, 16)),
        ({6: 1}, (2, 4, 2, 18)),
        ({6: -1}, (2, 4, 2, 18)),
        ({6: 2}, (2, 4, 2, 18)),
        ({6: -2}, (2, 4, 4, 18)),
        ({6: 7}, (2, 4, 4, 18)),
        ({6: -8}, (2, 4, 8, 18)),
        ({6: 128}, (2, 4, 8, 18)),
        ({6: 129}, (2, 4, 16, 19)),
        ({n: 1 for n in range(0, 64, 3)}, (2, 1, 2, 16 + 8 + 6)),
        ({n: 1 for n in range(0, 64, 4)}, (2, 1, 2, 16 + 8 + 4)),
        ({n: 1 for n in range(0, 64, 5)}, (2, 4, 2, 16 + 7 + 4)),
        ({n: 1 if n else 99 for n in range(0, 64, 5)}, (2, 4, 2, 16 + 7 + 4 + 2)),
        ({n: 9000 + n for n in range(64)}, (1, 0, 0, 16 + 128)),
        ({n: 9000 + n for n in range(60)}, (1, 0, 0, 16 + 128)),
        ({n: 9000 + n for n in range(59)}, (2, 1, 16, 16 + 126)),
    ],
)
def test_the_smallest_form_of_a_bucket_is_chosen(changes: dict[int, int], form: tuple[int, int, int, int]) -> None:
    old = np.arange(100, 164, dtype=np.uint16)
    new = [int(word) + changes.get(n, 0) for n, word in enumerate(old)]
    stream = encoded(new, old)
    assert (*stream[:3], len(stream)) == form
    assert applied(stream, old) == new


@pytest.mark.parametrize(("gap", "bits", "codes"), [(14, 4, 1), (15, 4, 2), (30, 8, 1), (254, 8, 1), (510, 16, 1)])
def test_a_gap_is_written_with_the_fewest_bytes(gap: int, bits: int, codes: int) -> None:
    old = np.zeros(2 * gap + 100, np.uint16)
    new = old.copy()
    new[gap] = 1
    _, gap_bits, _, changed, gap_codes, _ = struct.unpack_from("<BBBxIII", encoded(new.tolist(), old))
    assert (gap_bits, changed, gap_codes) == (bits, 1, codes)


FITTING = bytes([0b0000_0001, 0b00])  # a bitmap with the first word; +1


@pytest.mark.parametrize(
    "stream",
    [
        record(3, 1, 2, (1, 0, 0), FITTING),  # no kind
        record(2, 2, 2, (1, 4, 0), FITTING),  # no width of gaps
        record(2, 1, 1, (1, 0, 0), FITTING),  # no width of steps
        record(2, 1, 2, (0, 0, 0), b"\0"),  # nothing changed
        record(2, 1, 16, (9, 0, 0), b"\xff" + words_of(*range(9))),  # more than the bucket has
        record(2, 1, 2, (1, 0, 2), FITTING + words_of(1, 2)),  # more did not fit than changed
        record(2, 1, 2, (2, 0, 0), FITTING),  # the bitmap has one word
        record(2, 4, 2, (1, 2, 0), bytes([0x00, 0])),  # the gap codes are two words
        record(2, 4, 2, (1, 1, 0), bytes([8, 0])),  # behind the last word
        record(2, 4, 2, (2, 2, 0), bytes([0x70, 0])),  # the second one is behind the last word
        record(2, 1, 2, (1, 0, 1), FITTING + words_of(1)),  # every step fits
        record(2, 1, 2, (1, 0, 0), bytes([1, 0b11])),  # a step that does not fit is missing
        record(1, 0, 0, (0, 0, 0), words_of(*range(7))),
        b"\2\1",
    ],
)
def test_a_record_that_contradicts_itself_or_the_buffer_is_refused_and_changes_nothing(stream: bytes) -> None:
    flat = torch.from_numpy(OLD.view(np.uint8).copy())
    with pytest.raises(WrongDelta):
        delta.apply(torch.frombuffer(bytearray(stream), dtype=torch.uint8), flat, BUCKET)
    assert flat.numpy().view(np.uint16).tolist() == OLD.tolist()
    assert applied(record(2, 1, 2, (1, 0, 0), FITTING))[0] == 101


def test_records_follow_each_other_and_the_largest_stream_is_a_header_more_per_bucket() -> None:
    two = record(0, 0, 0, (0, 0, 0)) + record(1, 0, 0, (0, 0, 0), words_of(1, 2))
    flat = torch.from_numpy(OLD[:6].view(np.uint8).copy())
    delta.apply(torch.frombuffer(bytearray(two), dtype=torch.uint8), flat, 8)
    assert flat.numpy().view(np.uint16).tolist() == [100, 101, 102, 103, 1, 2]
    assert [delta.largest(total, 8) for total in (0, 2, 8, 10, 16)] == [0, 18, 24, 42, 48]
