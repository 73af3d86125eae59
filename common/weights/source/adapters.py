"""Versions of a model that trains adapters: a node that keeps the frozen weights gets nothing but the adapters.

Another node gets both once, and keeps the frozen weights from then on. Where that fails it gets versions whole.
"""

from collections.abc import Iterable

from torch import Tensor

from common.weights.source.snapshot import Payload, Snapshot, SnapshotMaker
from common.weights.wire import flat_buffer
from common.weights.wire.layout import AdapterLayout
from common.weights.wire.messages import BOTH, FROZEN


class AdapterPayloads:
    """Makes the payloads of each version from its adapters and the frozen weights."""

    def __init__(self, dtype: str, frozen: Snapshot, factor: float) -> None:
        """`frozen`: the weights before the first step; `factor`: alpha / rank."""
        self._maker = SnapshotMaker(dtype)
        self._frozen = frozen
        self._factor = factor

    def copy(self, snapshot: Snapshot, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the adapters of the version. Raises ValueError when names or shapes changed."""
        snapshot.adapters = self._maker.make(snapshot.version, named, None)
        snapshot.adapter_layout = AdapterLayout(snapshot.adapters.layout, self._factor)

    def prepare(self, snapshot: Snapshot, bucket_bytes: int) -> None:
        """Give `snapshot` its checksums and payloads.

        A node without the frozen weights gets a version that equals them whole, and keeps it as these.
        """
        snapshot.add_checksums(bucket_bytes)
        if not self._frozen.checksum:
            self._frozen.add_checksums(0)
        snapshot.frozen = self._frozen.checksum
        if snapshot.adapters is None:
            return
        flat = snapshot.adapters.flat
        checksums, _ = flat_buffer.all_checksums(flat, bucket_bytes)
        snapshot.deltas = {FROZEN: Payload(flat, bucket_bytes, checksums, FROZEN)}
        if snapshot.checksum != snapshot.frozen:
            snapshot.deltas[BOTH] = Payload(flat, 0, [], BOTH, before=self._frozen.flat)
