"""The store where ranks of several machines meet."""

import datetime
import socket
from typing import Any


class Store:
    """A rendezvous store that listens on one interface only."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of `address` (host name or IP); raises OSError when it cannot be bound."""
        from torch import distributed  # late: it takes seconds, and a base installation has no torch

        dist: Any = distributed  # public in use but untyped in torch
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        limit = datetime.timedelta(seconds=30)
        with socket.create_server((address, 0), family=family, backlog=128) as listener:
            self.host: str = address
            self.port: int = listener.getsockname()[1]
            # TCPStore binds every interface by itself; a listening socket handed over keeps it on this one.
            fd = listener.detach()
            self._server = dist.TCPStore(
                address, self.port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=fd
            )
