"""Every key of a run in Redis. All begin with `slipstream:{RUN}:`, so one ACL pattern covers them and a Redis Cluster
keeps them in one slot.

    slipstream:{RUN}:head       hash    term, leader, seq (of the last record), about (About as JSON)
    slipstream:{RUN}:leader     string  Leader as JSON; expires unless the leader renews its term
    PREFIX log                  list    batches of records since the last snapshot, which is the first batch
    PREFIX history              list    records of finished tasks
    PREFIX p:TERM:SEQ           string  payload of a group

PREFIX is slipstream:{RUN}:STORE:
"""

from urllib.parse import quote

import msgspec


class About(msgspec.Struct, frozen=True):
    """Which store a run has, and whose run it is."""

    store: str
    run_dir: str


class Leader(msgspec.Struct, frozen=True):
    """A broker that leads or would like to. Equal names are one process."""

    name: str
    address: str  # where its clients connect
    run_dir: str  # another folder is another run, even under the same name
    host: str
    pid: int
    machine: str  # boot and process namespace, in which `pid` means something


def run_prefix(run: str) -> str:
    """The prefix of a run's keys; other characters than letters, digits and `_.-~` are percent-encoded."""
    return f"slipstream:{{{quote(run, safe='')}}}:"
