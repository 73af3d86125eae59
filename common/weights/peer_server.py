"""A node as a source for other nodes: it serves its staging buffer while the buffer contains a whole version."""

import contextlib
import logging

import torch
import zmq

from common.weights.collectives import local_address
from common.weights.messages import Serve, Serving
from common.weights.transports.relay_server import RelayServer

logger = logging.getLogger(__name__)


class PeerServer:
    """Relay servers that are started when the learner first asks for them; calls come one at a time."""

    def __init__(self) -> None:
        self._servers: dict[bool, RelayServer] = {}  # by whether it wants keys

    def offer(self, serve: Serve, flat: torch.Tensor, node_id: str) -> Serving:
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

    def withdraw(self) -> None:
        """Stop serving the buffer, which is about to be written."""
        for server in self._servers.values():
            server.withdraw()

    def close(self) -> None:
        """Stop for good."""
        for server in self._servers.values():
            with contextlib.suppress(RuntimeError):
                server.close()
        self._servers.clear()
