"""The delta codec: every bit comes back, no stream is larger than the buffer, damage is refused or seen."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from common.weights.wire import delta
from common.weights.wire.delta import WrongDelta

HEADER = 16
# zeros, infinities, NaNs, subnormals
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x8001]


def flat(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words, np.uint16).view(np.uint8).copy())


def applied(old: torch.Tensor, stream: torch.Tensor, block_bytes: int) -> torch.Tensor:
    result = old.clone()
    delta.apply(stream, result, block_bytes)
    return result


def round_trip(old: np.ndarray, new: np.ndarray, block_bytes: int) -> torch.Tensor:
    """The stream between two arrays of words, which gives every bit back and is no larger than the buffer."""
    stream = delta.encode(flat(old), flat(new), block_bytes)
    assert torch.equal(applied(flat(old), stream, block_bytes), flat(new))
    total = flat(new).numel()
    assert stream.numel() <= total + HEADER * -(-total // block_bytes)
    return stream


words = st.integers(0, 65535) | st.sampled_from(SPECIAL)
buffers = st.integers(1, 400).flatmap(
    lambda n: st.tuples(arrays.arrays(np.uint16, n, elements=words), arrays.arrays(np.uint16, n, elements=words))
)


@given(pair=buffers, block=st.sampled_from([2, 6, 64, 256, 4096]))
def test_any_two_buffers_come_back_bit_for_bit(pair: tuple[np.ndarray, np.ndarray], block: int) -> None:
    round_trip(*pair, block)


@given(
    old=arrays.arrays(np.uint16, 3000, elements=words, fill=st.just(0x3F80)),
    changes=st.dictionaries(st.integers(0, 2999), st.integers(-300, 300) | st.integers(-32768, 32767), max_size=600),
    block=st.sampled_from([512, 2048, 6000]),
)
@settings(max_examples=60, deadline=None)
def test_steps_and_gaps_of_every_width_come_back_bit_for_bit(
    old: np.ndarray, changes: dict[int, int], block: int
) -> None:
    new = old.copy()
    for place, step in changes.items():
        new[place] = (int(new[place]) + step) % 65536
    round_trip(old, new, block)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.015, 0.12, 0.5, 1.0])
@pytest.mark.parametrize("reach", [1, 8, 100, 30000])
def test_every_form_of_a_block_is_exact(share: float, reach: int) -> None:
    rng = np.random.default_rng(3)
    old = rng.integers(0, 65536, 50_000, np.uint16)
    step = np.where(rng.random(len(old)) < share, rng.integers(1, reach + 1, len(old)), 0) * rng.choice(
        [-1, 1], len(old)
    )
    new = (old + step).astype(np.uint16)
    round_trip(old, new, 20_000)


def test_few_small_steps_take_a_hundredth_of_the_buffer() -> None:
    rng = np.random.default_rng(1)
    old = rng.integers(0x3C00, 0x3E00, 1 << 20, np.uint16)
    new = old.copy()
    places = rng.random(len(old)) < 0.015
    new[places] += rng.choice(np.array([1, 0xFFFF], np.uint16), int(places.sum()))
    stream = delta.encode(flat(old), flat(new), 1 << 20)
    assert stream.numel() < 0.0105 * 2 * len(old)


def test_the_stream_does_not_depend_on_the_threads_and_is_a_header_per_block_where_nothing_changed() -> None:
    rng = np.random.default_rng(2)
    old = rng.integers(0, 65536, 40_000, np.uint16)
    new = old + (rng.random(40_000) < 0.05)
    one = delta.encode(flat(old), flat(new), 4096)
    assert torch.equal(delta.encode(flat(old), flat(new), 4096, threads=3), one)
    assert delta.encode(flat(old), flat(old), 4096, threads=3).numel() == HEADER * 20
    assert delta.encode(flat(old[:0]), flat(new[:0]), 4096, threads=3).numel() == 0


@given(pair=buffers, noise=st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_damaged_stream_is_refused_or_seen_in_the_checksum(
    pair: tuple[np.ndarray, np.ndarray], noise: list[tuple[int, int]]
) -> None:
    old, new = map(flat, pair)
    stream = delta.encode(old, new, 256)
    damaged = stream.clone()
    for place, bits in noise:
        damaged[place % len(damaged)] ^= bits
    with contextlib.suppress(WrongDelta):
        assert len(applied(old, damaged, 256)) == len(old)  # the checksum judges its content


@pytest.mark.parametrize("cut", [1, 15, 16, 40])
def test_a_stream_that_ends_early_or_late_is_refused_and_says_where(cut: int) -> None:
    new = np.arange(512)
    new[::3] += 1
    stream = delta.encode(flat(np.arange(512)), flat(new), 512)
    with pytest.raises(WrongDelta) as short:
        delta.apply(stream[:-cut].clone(), flat(np.arange(512)), 512)
    with pytest.raises(WrongDelta) as long:
        delta.apply(torch.cat([stream, torch.zeros(cut, dtype=torch.uint8)]), flat(np.arange(512)), 512)
    assert str(short.value).startswith("block 1: ") and str(len(stream) - cut) in str(short.value)
    assert str(long.value).startswith(f"{cut} bytes are left over")


def test_sizes_that_do_not_fit_and_unknown_kinds_are_refused() -> None:
    stream = delta.encode(flat(np.arange(64)), flat(np.arange(64)), 128)
    stream[0] = 3
    with pytest.raises(WrongDelta) as unknown:
        delta.apply(stream, flat(np.arange(64)), 128)
    assert str(unknown.value).startswith("block 0: kind 3")
    four, six = torch.zeros(4, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8)
    wrong = [(four, six, 4, 6), (four[:3], four[:3], 4, 3), *((four, four, block, block) for block in (0, 3, -2))]
    for old, new, block, size in wrong:
        with pytest.raises(ValueError, match=f" {size} bytes"):
            delta.encode(old, new, block)
