"""Parts in pieces: how they are sealed, what is refused, and which parts are a payload."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import structs

from common.weights.transports.relay import check_parts
from common.weights.wire.failures import Damaged, Mismatch
from common.weights.wire.messages import Part, Publish
from common.weights.wire.pieces import (
    LARGEST,
    MOST_PIECES,
    RECENT,
    SMALLEST,
    TAG_BYTES,
    USUAL,
    PartBuffer,
    digest,
    new_part,
    nonce,
    piece_bytes,
)

PIECE = 100
PAYLOAD = torch.randint(0, 256, (PIECE * (RECENT + 5) + 11,), dtype=torch.uint8)
ORIGIN = "tcp://127.0.0.1:9"


@pytest.fixture(params=[False, True], ids=["open", "sealed"])
def source(request: pytest.FixtureRequest) -> PartBuffer:
    return PartBuffer(new_part(PAYLOAD, 0, len(PAYLOAD), piece=PIECE, origin=ORIGIN, secured=request.param), PAYLOAD)


@pytest.fixture
def sealed() -> PartBuffer:
    return PartBuffer(new_part(PAYLOAD, 0, len(PAYLOAD), piece=PIECE, origin=ORIGIN, secured=True), PAYLOAD)


def empty(part: Part) -> PartBuffer:
    return PartBuffer(part, torch.zeros_like(PAYLOAD), arrived=0)


def test_pieces_are_small_for_long_chains_and_never_outside_of_the_bounds() -> None:
    assert piece_bytes(1, 1, 0.0) == piece_bytes(0, 0, 0.0) == SMALLEST
    assert piece_bytes(1 << 30, 1, 0.0) == piece_bytes(1, 1, 1e12) == USUAL
    assert piece_bytes(1 << 36, 9, 0.0) == (1 << 36) // MOST_PIECES, "digests go with every announcement"
    assert piece_bytes(1 << 40, 1, 0.0) == LARGEST
    sizes = [piece_bytes(1 << 28, nodes, 1e6) for nodes in (16, 100, 200, 5000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2] > sizes[3] == SMALLEST
    assert all(size % 64 == 0 for size in sizes)
    assert piece_bytes(1 << 20, 1, 3e8) == 300_000 // 64 * 64, "on a fast link the work per piece counts"


def test_what_was_taken_in_is_the_payload_and_travels_on_as_it_came(source: PartBuffer) -> None:
    there = empty(source.part)
    seen: list[int] = []
    there.watch(lambda: seen.append(there.arrived_bytes))
    came = [source.piece(number) for number in range(source.count)]
    for number, piece in enumerate(came):
        there.take_in(number, piece)
    assert torch.equal(torch.as_tensor(there._memory), PAYLOAD)
    assert seen == [*range(PIECE, len(PAYLOAD), PIECE), len(PAYLOAD)]
    assert there.piece(source.count - 1) is came[-1], "who is right behind gets the very bytes"
    assert [there.piece(number) for number in range(source.count)] == came, "the others the same, sealed once more"


def test_sealed_pieces_are_not_the_payload_and_open_only_with_the_key(sealed: PartBuffer) -> None:
    piece = sealed.piece(0)
    assert len(piece) == PIECE + TAG_BYTES and bytes(PAYLOAD[:8].tolist()) not in bytes(piece)
    with pytest.raises(Damaged):
        empty(structs.replace(sealed.part, key=bytes(32))).take_in(0, piece)


def test_a_piece_that_somebody_with_the_key_forged_is_refused_and_the_true_one_is_taken(sealed: PartBuffer) -> None:
    forged = AESGCM(sealed.part.key).encrypt(nonce(0), bytes(PIECE), None)
    there = empty(sealed.part)
    with pytest.raises(Damaged):
        there.take_in(0, forged)
    assert there.arrived == 0 and not there._memory.any()
    there.take_in(0, sealed.piece(0))
    assert there.arrived == 1


def test_a_piece_out_of_its_place_is_refused_also_where_the_digests_are_in_that_order(sealed: PartBuffer) -> None:
    second = sealed.piece(1)
    with pytest.raises(Damaged):
        empty(sealed.part).take_in(0, second)
    digests = sealed.part.digests[32:64] + sealed.part.digests[32:]
    with pytest.raises(Damaged):
        empty(structs.replace(sealed.part, digests=digests)).take_in(0, second)


def test_without_a_key_damage_and_a_wrong_length_are_found() -> None:
    source = PartBuffer(new_part(PAYLOAD, 0, len(PAYLOAD), piece=PIECE, origin=ORIGIN, secured=False), PAYLOAD)
    piece = source.piece(0)
    assert piece == bytes(PAYLOAD[:PIECE].tolist()) and len(source.part.digests) == 16 * source.count
    with pytest.raises(Damaged):
        empty(source.part).take_in(0, bytes([piece[0] ^ 1]) + piece[1:])
    short = structs.replace(source.part, digests=digest(piece[1:], False) + source.part.digests[16:])
    with pytest.raises(Damaged):
        empty(short).take_in(0, piece[1:])


def test_two_parts_have_names_and_keys_of_their_own_and_the_digests_of_what_they_contain() -> None:
    one, two = (new_part(PAYLOAD, 0, PIECE, piece=PIECE, origin=ORIGIN, secured=True) for _ in range(2))
    assert one.name != two.name and one.key != two.key and one.digests == two.digests
    assert PartBuffer(one, PAYLOAD).sealed(0) != PartBuffer(two, PAYLOAD).sealed(0)
    assert one.digests == blake3(bytes(PAYLOAD[:PIECE].tolist())).digest()


def test_pieces_that_come_before_an_earlier_one_count_when_that_is_there_and_are_not_written_again(
    sealed: PartBuffer,
) -> None:
    there = empty(sealed.part)
    there.take_in(2, sealed.piece(2))
    there.take_in(1, sealed.piece(1))
    assert there.arrived == 0
    forged = AESGCM(sealed.part.key).encrypt(nonce(2), bytes(PIECE), None)
    there.take_in(2, forged)
    there.take_in(0, sealed.piece(0))
    assert there.arrived == 3
    assert torch.equal(torch.as_tensor(there._memory)[: 3 * PIECE], PAYLOAD[: 3 * PIECE])


def test_many_threads_take_pieces_in_at_once(source: PartBuffer) -> None:
    there = empty(source.part)
    order = torch.randperm(source.count, generator=torch.Generator().manual_seed(0)).tolist()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: there.take_in(number, source.piece(number)), order))
    assert there.arrived == source.count and torch.equal(torch.as_tensor(there._memory), PAYLOAD)


@pytest.mark.parametrize(("start", "size"), [(0, 0), (0, 1), (7, PIECE), (7, 3 * PIECE + 1), (len(PAYLOAD) - 5, 5)])
def test_a_part_of_any_size_arrives_and_nothing_beside_it_is_written(start: int, size: int) -> None:
    source = PartBuffer(new_part(PAYLOAD, start, size, piece=PIECE, origin=ORIGIN, secured=True), PAYLOAD)
    flat = torch.zeros_like(PAYLOAD)
    there = PartBuffer(source.part, flat, arrived=0)
    for number in range(source.count):
        there.take_in(number, source.piece(number))
    assert there.arrived_bytes == size
    expected = torch.zeros_like(PAYLOAD)
    expected[start : start + size] = PAYLOAD[start : start + size]
    assert torch.equal(flat, expected)


def test_a_closed_shipment_has_no_pieces_because_its_memory_may_be_written(source: PartBuffer) -> None:
    there = empty(source.part)
    there.take_in(0, source.piece(0))
    there.close()
    assert there.piece(0) is None


@pytest.mark.parametrize("bounds", [(-1, 5, 1), (0, len(PAYLOAD) + 1, 1), (5, -1, 1), (0, 5, 0)])
def test_a_part_outside_of_its_payload_is_refused(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        PartBuffer(Part("n", ORIGIN, *bounds, b""), PAYLOAD)


def publish_of(*bounds: tuple[int, int], sources: int = 2) -> Publish:
    parts = [Part(str(start), ORIGIN, start, size, PIECE, b"") for start, size in bounds]
    return Publish(0, 7, 1, "", 64, [], "", 8.0, parts=parts, sources=[ORIGIN] * sources)


def test_parts_are_a_payload_in_any_order_if_they_have_each_of_its_bytes_once() -> None:
    check_parts(publish_of((0, 60), (60, 40)), 100)
    check_parts(publish_of((60, 40), (0, 60)), 100)
    check_parts(publish_of((0, 100), sources=1), 100)
    wrong = [
        publish_of((0, 60), (59, 41)), publish_of((0, 60), (61, 39)), publish_of((1, 59), (60, 40)),
        publish_of((0, 60), (60, 39)), publish_of((0, 60), (60, 40), sources=1), publish_of(sources=0),
        publish_of((0, 100), (0, 100)),
    ]  # fmt: skip
    for publish in wrong:
        with pytest.raises(Mismatch):
            check_parts(publish, 100)
