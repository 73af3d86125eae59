"""The store where ranks of several machines meet."""

import datetime
import socket


class Store:
    """A rendezvous store that listens on one interface only."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of `address` (host name or IP); raises OSError when it cannot be bound."""
        from common.weights.collectives import dist  # late: torch takes seconds, and a base installation has none

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        limit = datetime.timedelta(seconds=30)
        with socket.create_server((address, 0), family=family, backlog=128) as listener:
            self.port: int = listener.getsockname()[1]
            # TCPStore binds every interface by itself; a listening socket handed over keeps it on this one.
            fd = listener.detach()
            self._server = dist.TCPStore(
                address, self.port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=fd
            )
