"""Where the ranks of a learner meet: a store of torch on one address, for machines whose order is known before.

torchrun's own rendezvous, c10d, finds the order through a pickled value in a store that anybody may write to. Here
the broker has said the order, or there is one machine. Each agent is told its place, and the values are text.
"""

import datetime
import socket
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from common.weights.transports.groups import dist

BACKEND = "known-order"
ALONE = "127.0.0.1:0"  # the endpoint of an agent without others
LIMIT_S = 300
PORT = "port"  # key of the meeting's store; the value is the port of the ranks' store


def listen(address: str, timeout_s: float) -> Any:
    """A TCPStore on a free port of this address alone; raises OSError. Waits in it have this limit."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    limit = datetime.timedelta(seconds=timeout_s)
    with socket.create_server((address, 0), family=family, backlog=128) as listener:
        port = listener.getsockname()[1]
        options = {"timeout": limit, "wait_for_workers": False}
        # TCPStore binds every interface by itself; a listening socket handed over keeps it on this one.
        return dist.TCPStore(address, port, is_master=True, master_listen_fd=listener.detach(), **options)


class KnownOrder(StaticTCPRendezvous):
    """The first agent serves the ranks' store on its own address; its port is in the store at the endpoint."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        meeting = None
        if self.world_size > 1:
            endpoint = dist.TCPStore(self.master_addr, self.master_port, is_master=False, timeout=self.timeout)
            meeting = dist.PrefixStore(self.run_id, endpoint)
        if self.rank == 0:
            store: Any = listen(self.master_addr, self.timeout.total_seconds())
            self.master_port = store.port
            if meeting is not None:
                meeting.set(PORT, str(store.port))
        else:
            assert meeting is not None
            self.master_port = int(meeting.get(PORT))
            store = dist.TCPStore(self.master_addr, self.master_port, is_master=False, timeout=self.timeout)
        self._store = store
        return super().next_rendezvous()  # it makes no store where there is one


def create_handler(parameters: RendezvousParameters) -> KnownOrder:
    """For `--rdzv-conf rank=N,timeout=S`: this agent's place, and the limit of each wait in seconds."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
    rank, limit = (int(parameters.get(name, default)) for name, default in (("rank", 0), ("timeout", LIMIT_S)))
    return KnownOrder(host, port, rank, parameters.max_nodes, parameters.run_id, limit)
