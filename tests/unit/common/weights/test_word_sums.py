"""The checksum that a device computes: against whole numbers of Python, in pieces, and of bytes that changed."""

import random
import struct

import pytest
import torch

from common.weights.wire import flat_buffer
from common.weights.wire.flat_buffer import LANES, WordSums


def words_of(data: bytes) -> list[int]:
    """Signed 32-bit words, the last one filled up with zeros."""
    whole = data + bytes(-len(data) % 4)
    return list(struct.unpack(f"<{len(whole) // 4}i", whole))


def shifted(number: int, bits: int) -> int:
    """Shift right a 64-bit pattern, its sign with it."""
    signed = number - (1 << 64) if number >> 63 else number
    return (signed >> bits) % (1 << 64)


def mixed(number: int, mix: int) -> int:
    number = (number ^ shifted(number, 32)) * mix % (1 << 64)
    return (number ^ shifted(number, 29)) | 1


def expected(data: bytes, chunk: int) -> str:
    """The same sums by whole numbers of Python."""
    sums = []
    for (spread, mix), (other_spread, other_mix) in zip(LANES, reversed(LANES), strict=True):
        total = 0
        for place, word in enumerate(words_of(data)):
            number = mixed((place % chunk + 1) * spread % (1 << 64), mix)
            total += word * number * mixed(place // chunk * other_spread % (1 << 64), other_mix)
        sums.append(total % (1 << 64))
    return "".join(f"{one:016x}" for one in sums)


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def of(*pieces: tuple[torch.Tensor, int]) -> str:
    sums = WordSums()
    for data, offset in pieces:
        sums.add(data, offset)
    return sums.hexdigest()


@pytest.fixture(params=[7, 1 << 20])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Words with numbers of their own."""
    monkeypatch.setattr(flat_buffer, "CHUNK_WORDS", request.param)
    return int(request.param)


@pytest.mark.parametrize("size", [4, 5, 28, 29, 1000, 4099])
def test_the_sums_are_those_of_whole_numbers(size: int, chunk: int) -> None:
    data = random.Random(size).randbytes(size)
    assert of((tensor(data), 0)) == expected(data, chunk)
    assert of() == of((tensor(bytes(size)), 0)) == "0" * 32


@pytest.mark.usefixtures("chunk")
def test_pieces_count_in_any_order_and_form() -> None:
    flat = torch.randn(40, 6).to(torch.bfloat16)
    whole = of((flat, 0))
    rows = [(flat[i], i * 12) for i in range(40)]
    assert of(*reversed(rows)) == whole
    odd = torch.randn(41, 3).to(torch.bfloat16)[1:]  # begins in the middle of a word
    assert of((odd, 64)) == of((odd.clone(), 64))
    assert of((flat.t().contiguous().t(), 0)) == whole
    assert of((flat, 4)) != whole


@pytest.mark.usefixtures("chunk")
def test_every_changed_bit_and_every_swap_changes_the_sums() -> None:
    data = bytearray(random.Random(3).randbytes(96))
    whole = of((tensor(bytes(data)), 0))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert of((tensor(bytes(data)), 0)) != whole
        data[bit // 8] ^= 1 << bit % 8
    words = tensor(bytes(data)).view(torch.int32)
    for i in range(len(words)):
        for j in range(i):
            order = list(range(len(words)))
            order[i], order[j] = j, i
            assert of((words[order], 0)) != whole
