"""A node as a source for other nodes: its staging buffer, handed out for as long as it holds a version whole."""

import contextlib
import logging

import torch
import zmq

from common.weights.collectives import local_address
from common.weights.messages import Serve, Serving
from common.weights.transports.relay_server import RelayServer

logger = logging.getLogger(__name__)


class Shelf:
    """A relay server that is started when the learner first asks for it; calls come one at a time."""

    def __init__(self) -> None:
        self._servers: dict[bool, RelayServer] = {}  # by whether it wants keys

    def put(self, serve: Serve, flat: torch.Tensor, node_id: str) -> Serving:
        """Offer `flat` as the learner asked; the answer says where, or why not."""
        secured = bool(serve.client_public)
        try:
            if secured not in self._servers:
                host, _, port = serve.reach.rpartition(":")
                self._servers[secured] = RelayServer(local_address(host.strip("[]"), int(port)), secured)
        except (OSError, ValueError, zmq.ZMQError) as error:
            logger.warning("this node cannot serve weights to others: %s", error)
            return Serving(node_id, serve.key, reason=str(error)[:500])
        server = self._servers[secured]
        server.offer(serve.key, flat, serve.timeout_s, serve.client_public)
        return Serving(node_id, serve.key, server.address, server.public)

    def clear(self) -> None:
        """The buffer is about to be written."""
        for server in self._servers.values():
            server.withdraw()

    def close(self) -> None:
        """Serve nobody any more."""
        for server in self._servers.values():
            with contextlib.suppress(RuntimeError):
                server.close()
        self._servers.clear()
