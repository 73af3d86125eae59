"""The one thing that machines of a preflight do together: each gives a value, and gets the values of all."""

from contextlib import suppress
from itertools import count
from threading import Event
from time import monotonic
from typing import Any

import msgspec
import zmq
from msgspec import Struct, msgpack

from common.errors import SlipstreamError, UsageError

SLACK_S = 5.0  # beyond a limit, until the meeting host itself counts as gone
# From a machine: number of the exchange, value, and seconds after the first such message at which this one is too late.
Value = tuple[int, msgspec.Raw, float]


class Values(Struct, frozen=True, forbid_unknown_fields=True):
    """To each machine."""

    values: dict[str, msgspec.Raw] = {}
    lost: dict[str, str] = {}
    elapsed_s: float = 0.0  # since all machines were there
    refused: str = ""


class Exchange:
    """A machine's side, on a ZeroMQ socket. Calls are collective: every machine makes the same ones."""

    def __init__(self, connection: Any) -> None:
        self.lost: dict[str, str] = {}  # machines that take no part any more, with the reason
        self.elapsed_s = 0.0  # the same on every machine
        self._connection = connection
        self._serials = count()

    def __call__(self, value: Any, kind: Any, limit_s: float) -> dict[str, Any]:
        """The values of all machines by name, each of type `kind`.

        Raises UsageError when there is no preflight for this machine, SlipstreamError when it was lost or cut off.
        """
        serial = next(self._serials)
        self._connection.send(msgpack.encode((serial, value, limit_s)))
        if not self._connection.poll(int((limit_s + SLACK_S) * 1000)):
            why = "it has ended, or is cut off, or this machine takes part twice"
            raise SlipstreamError(f"the meeting host is silent: {why}")
        try:
            got = msgpack.decode(self._connection.recv(), type=Values)
        except msgspec.DecodeError:
            raise UsageError("a job's broker listens there; stop the job, or --meet elsewhere") from None
        if got.refused:
            raise (SlipstreamError if serial else UsageError)(got.refused)
        self.lost = got.lost
        self.elapsed_s = got.elapsed_s
        return {name: msgpack.decode(raw, type=kind) for name, raw in got.values.items()}

    def part(self, host: bool) -> None:
        """The last exchange: a machine that has all its answers goes; the host closes when the others have gone."""
        if host:
            self(None, None, SLACK_S)
            return
        self._connection.setsockopt(zmq.LINGER, int(SLACK_S * 1000))
        with suppress(zmq.ZMQError):  # the host has ended
            self._connection.send(msgpack.encode((next(self._serials), None, SLACK_S)), zmq.NOBLOCK)


def pass_on(router: "zmq.Socket[bytes]", machines: int, wait_s: float, stop: Event) -> None:
    """The meeting host's side: wait for all machines, then pass values on until `stop`. Closes the socket.

    The routing id of a connection is the name of its machine.
    """
    begun = 0.0
    there: set[str] = set()
    lost: dict[str, str] = {}
    for serial in count():
        values: dict[str, msgspec.Raw] = {}
        refused = ""
        end = float("inf") if serial else monotonic() + wait_s
        while len(values) < (len(there) if serial else machines) and monotonic() < end:
            if stop.is_set():
                return router.close(linger=1000)
            if router.poll(100):
                who, *_, data = router.recv_multipart()
                try:
                    name, (number, value, limit_s) = who.decode(), msgpack.decode(data, type=Value)
                except (msgspec.DecodeError, UnicodeDecodeError):  # a node of an earlier job looks for its broker
                    continue
                if serial == 0 or (name in there and number == serial):
                    values[name] = value
                    end = min(end, monotonic() + limit_s) if serial else end
                else:
                    why = lost.get(name, f"{machines} machines were there already (--machines)")
                    _send(router, name, Values(refused=f"{name} takes no part: {why}"))
        lost |= {name: "it ended, or was cut off" for name in there - values.keys()}
        begun = begun or monotonic()
        there = set(values)
        if serial == 0 and len(there) < machines:
            refused = f"{len(there)} of {machines} machines came within {wait_s:g} s: {', '.join(sorted(there))}"
        reply = Values(dict(sorted(values.items())), lost, monotonic() - begun, refused)
        for name in sorted(there):
            _send(router, name, reply)


def _send(router: "zmq.Socket[bytes]", name: str, values: Values) -> None:
    with suppress(zmq.ZMQError):  # its connection ended: it will be missed at the next exchange
        router.send_multipart([name.encode(), msgpack.encode(values)], zmq.NOBLOCK)
