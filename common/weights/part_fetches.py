"""The parts of one publish on their way to a node: all of them at once, each from a source of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from common.weights.messages import Publish
from common.weights.pieces import Shipment
from common.weights.transports.relay import Fetch, RelayServer, Stall


class PartFetches:
    """`run` in one thread; the rest from any."""

    def __init__(self, publish: Publish, password: str) -> None:
        self._publish, self._password = publish, password
        self._lock = threading.Lock()
        self._fetches: list[Fetch] = []
        self._sources = list(publish.sources)
        self._closed = False

    @property
    def stalls(self) -> dict[int, Stall]:
        """The parts that wait for another source."""
        return {number: stall for number, fetch in enumerate(self._fetches) if (stall := fetch.stall) is not None}

    def run(self, payload: torch.Tensor, server: RelayServer | None, note_share: Callable[[float], None]) -> None:
        """Every part into `payload` [n] uint8, while `server` lets other nodes fetch what is here already.

        `note_share` is called with the share that arrived, 0 to 1. Raises ValueError when the parts are not the
        payload, RuntimeError when it was closed or did not arrive in time.
        """
        check_parts(self._publish, payload.numel())
        shipments = [Shipment(part, payload, arrived=0) for part in self._publish.parts]
        with self._lock:
            if self._closed:
                raise RuntimeError("given up for another transfer")
            self._fetches = [Fetch(*pair, self._password) for pair in zip(shipments, self._sources, strict=True)]
            for shipment in shipments if server is not None else ():
                server.offer(shipment)  # type: ignore[union-attr]

        def note() -> None:
            note_share(sum(shipment.arrived_bytes for shipment in shipments) / max(payload.numel(), 1))

        def fetch(one: Fetch) -> None:
            try:
                one.run(self._publish.timeout_s, note)
            except BaseException:
                self.close()  # the rest alone is of no use
                raise

        with ThreadPoolExecutor(len(shipments), "fetch-weights") as pool:
            running = [pool.submit(fetch, one) for one in self._fetches]
        failures = [error for one in running if (error := one.exception()) is not None]
        if failures and server is not None:
            server.withdraw(*shipments)
        if failures:
            raise next((error for error in failures if "given up" not in str(error)), failures[0])

    def reroute(self, part: int, source: str) -> None:
        """Fetch the rest of a part from `source`; a part that the publish does not have is ignored."""
        with self._lock:
            if part < len(self._sources):
                self._sources[part] = source
            if part < len(self._fetches):
                self._fetches[part].reroute(source)

    def close(self) -> None:
        """Let `run` end soon."""
        with self._lock:
            self._closed = True
            for fetch in self._fetches:
                fetch.close()


def check_parts(publish: Publish, size: int) -> None:
    """Raises ValueError when the parts of `publish` are not the `size` bytes of its payload, each of them once."""
    parts = sorted(publish.parts, key=lambda part: part.start)
    ends = [part.start + part.size for part in parts]
    if len(parts) != len(publish.sources) or [p.start for p in parts] != [0, *ends[:-1]] or ends[-1:] != [size]:
        raise ValueError(f"version {publish.version} comes in parts that are not its {size} bytes")
