"""The frozen weights at a node, beside which a learner's adapters become versions."""

import logging
from collections.abc import Callable

import torch

from common.weights.wire import flat_buffer
from common.weights.wire.adapters import merge_version
from common.weights.wire.failures import Mismatch
from common.weights.wire.layout import AdapterLayout, Layout
from common.weights.wire.messages import Publish, Welcome

logger = logging.getLogger(__name__)


class FrozenWeights:
    """Those of one learner incarnation. One thread at a time uses `merge` and `keep`."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._adapters: AdapterLayout | None = None
        self._flat: torch.Tensor | None = None  # [total_bytes] uint8, in host memory; in layout order
        self._checksum = ""  # that `_flat` has

    def welcome(self, message: Welcome) -> "FrozenWeights":
        """Those for the learner that sent `message`: the same weights, if it trains adapters for the same layout."""
        new = FrozenWeights()
        new._layout = message.layout
        new._adapters = message.adapters
        if self._layout is not None and self._layout.digest == message.layout.digest and message.adapters is not None:
            new._flat, new._checksum = self._flat, self._checksum
        return new

    def check(self, publish: Publish) -> None:
        """Raises Mismatch when adapters cannot become a version here."""
        name = f"version {publish.version}"
        if self._adapters is None or self._layout is None:
            raise Mismatch(f"{name} comes as adapters, which were not announced")
        expected = self._adapters.layout.total_bytes
        if publish.encoding == "both":
            expected += self._layout.total_bytes
        elif self._checksum != publish.frozen:
            here = self._checksum or "no frozen weights"
            raise Mismatch(f"{name} stands beside the frozen weights {publish.frozen}, here are {here}")
        if publish.payload_bytes != expected:
            raise Mismatch(f"{name} comes in {publish.payload_bytes} bytes, expected {expected}")

    def merge(self, publish: Publish, payload: torch.Tensor, into: torch.Tensor, given_up: Callable[[], bool]) -> None:
        """Make the version in `into` [total_bytes] uint8. Raises as merge_version, and Mismatch for frozen weights that
        are not the published ones.

        A payload with frozen weights stays in memory: they are kept from then on.
        """
        assert self._adapters is not None and self._layout is not None
        if publish.encoding == "both":
            size = self._layout.total_bytes
            flat, payload = payload[:size], payload[size:]
            found = flat_buffer.version_checksum(flat, self._layout)
            if found != publish.frozen:
                raise Mismatch(f"the frozen weights arrived as {found}, published were {publish.frozen}")
            self._flat, self._checksum = flat, found
        assert self._flat is not None
        merge_version(self._flat, self._layout, payload, self._adapters, into, given_up=given_up)

    def keep(self, publish: Publish, flat: torch.Tensor) -> None:
        """Copy a version that is the frozen weights. Without room for a copy the next version comes with them."""
        if publish.frozen == publish.checksum != self._checksum:
            try:
                self._flat, self._checksum = flat.clone(), publish.frozen
            except (MemoryError, RuntimeError) as error:
                logger.warning("no copy of the frozen weights is kept: %s", error)
