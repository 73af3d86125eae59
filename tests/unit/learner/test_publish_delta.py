"""Which versions are encoded against which, and what is kept for it."""

import pytest
import torch

from common.weights import delta, packing
from common.weights.layout import Layout
from learner.publish_delta import Deltas
from learner.publish_snapshot import BufferPool, Snapshot

LAYOUT = Layout.of([("a", "bfloat16", (4096,))])
BUCKET = 1024


class Versions:
    """Snapshots of a model of which one element in a hundred changes per version."""

    def __init__(self, deltas: Deltas) -> None:
        self.deltas, self.pool = deltas, BufferPool()
        self.weights = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()

    def next(self, version: int, sent: bool = True, others: bool = False) -> Snapshot:
        flat = self.pool.acquire(LAYOUT.total_bytes)
        self.weights[version % 100 :: 100] *= 1.01
        if others:
            self.weights = torch.randn(4096).bfloat16()
        snapshot = Snapshot(version, LAYOUT, packing.pack([("a", self.weights)], LAYOUT, flat), None, self.pool)
        snapshot.seal(BUCKET)
        self.deltas.encode(snapshot, BUCKET)
        snapshot.sent = sent
        return snapshot


def test_a_version_goes_as_a_delta_to_the_nodes_that_hold_the_one_before() -> None:
    versions = Versions(Deltas("delta", 0))
    first, second = versions.next(1), versions.next(2)
    payload = second.payload_for({1}, True)
    assert (payload.encoding, payload.base_version) == ("delta", 1)
    assert payload.flat.numel() < second.flat.numel() / 20
    assert payload.bucket_checksums == packing.part_checksums(payload.flat, BUCKET)
    result = first.flat.clone()
    delta.apply(payload.flat, result, delta.BUCKET_BYTES)
    assert packing.checksum(result) == second.checksum


@pytest.mark.parametrize(
    ("held", "first_attempt"), [({-1}, True), ({0}, True), ({1, -1}, True), ({1}, False), (set(), True)]
)
def test_newcomers_others_and_second_attempts_get_the_whole_version(held: set[int], first_attempt: bool) -> None:
    versions = Versions(Deltas("delta", 0))
    versions.next(1)
    second = versions.next(2)
    assert second.payload_for(held, first_attempt) is second.full


def test_versions_that_were_skipped_do_not_make_the_next_one_travel_whole() -> None:
    versions = Versions(Deltas("delta", 0))
    versions.next(1)
    for version in (2, 3):
        versions.next(version, sent=False)
    fourth = versions.next(4)
    assert fourth.payload_for({1}, True).base_version == 1, "what the nodes hold while 2 and 3 are skipped"
    assert fourth.payload_for({3}, True).base_version == 3, "or 3, had it begun to travel meanwhile"
    assert fourth.payload_for({2}, True) is fourth.full


def test_at_most_two_earlier_versions_are_kept() -> None:
    deltas = Deltas("delta", 0)
    versions = Versions(deltas)
    for version in range(1, 9):
        snapshot = versions.next(version, sent=version in (1, 2, 5))
        snapshot.release()  # as the control thread does when a newer one comes
        assert deltas.kept_bytes <= 2 * LAYOUT.total_bytes
    assert len(versions.pool._free) + 2 <= 4, "buffers are used again"
    deltas.close()
    assert deltas.kept_bytes == 0


def test_every_nth_version_travels_whole() -> None:
    versions = Versions(Deltas("delta", 3))
    made = [versions.next(v) for v in range(7)]
    assert [bool(s.deltas) for s in made] == [False, True, True, False, True, True, False]


def test_a_delta_that_is_no_smaller_than_the_version_is_not_used() -> None:
    versions = Versions(Deltas("delta", 0))
    versions.next(1)
    assert not versions.next(2, others=True).deltas


def test_full_keeps_and_encodes_nothing() -> None:
    deltas = Deltas("full", 3)
    versions = Versions(deltas)
    assert not any(versions.next(v).deltas for v in range(3)) and deltas.kept_bytes == 0
