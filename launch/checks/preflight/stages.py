"""The stages of a preflight. Every machine runs them together; each has a deadline, all together take at most 150 s."""

import datetime
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from threading import Event
from time import monotonic
from typing import Any

import msgspec
import zmq
from msgspec import Struct, msgpack

from common.errors import SlipstreamError, UsageError
from launch.checks.preflight.facts import Facts, Link, measure

# ---------------------------------------------------------------- exchange


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


# ---------------------------------------------------------------- stages

LINK_S = 8.0
LINKS_S = 35.0  # for all links
CANARY_S = 8.0
SEEN_S = 5.0  # a network file system may take as long to show a file
IMPORT_S = 60.0
REDUCE_S = 15.0
BULK_S = (0.1, 0.4)  # bulk data of one link: with many machines, and with few
REDUCED_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}


class Report(Struct):
    """Everything that was found out; the verdict is made from this alone."""

    machines: dict[str, Facts]
    links: list[Link] = []
    canary: str = ""  # a file that the first learner machine wrote
    blind: list[str] = []  # learner machines that do not see it
    reduced: dict[str, list[float] | str] = {}  # bus bandwidth of gloo, then NCCL, in bytes per second; or an error
    lost: dict[str, str] = {}  # why a machine left before the end


def examine(name: str, own: Facts, exchange: Exchange, wait_s: float) -> Report:
    """All stages on this machine; the others come within `wait_s`. Raises as `Exchange`."""
    report = Report(exchange(own, Facts, wait_s))
    report.links = _links(name, report.machines, exchange)
    learners = learners_of(report.machines, exchange.lost)
    if len(learners) > 1:
        report.canary, report.blind = _canary(name, learners, own.folder, exchange)
    ranks = {name: report.machines[name] for name in learners if report.machines[name].agree["versions"]["torch"]}
    if len(ranks) > 1:
        report.reduced = _all_reduce(name, ranks, exchange)
    report.lost = exchange.lost
    return report


def learners_of(machines: Mapping[str, Facts], lost: Mapping[str, str]) -> list[str]:
    """Names of the learner's machines that are still there."""
    return sorted(name for name, facts in machines.items() if facts.role == "learner" and name not in lost)


def rounds(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """A round-robin tournament there and back: each ordered pair once, and no machine in two pairs of a round."""
    ring = [*names, *([""] * (len(names) % 2))]
    for _ in range(len(ring) - 1):
        pairs = [(a, b) for a, b in zip(ring[: len(ring) // 2], reversed(ring), strict=False) if a and b]
        yield from (pairs, [(b, a) for a, b in pairs])
        ring[1:] = [ring[-1], *ring[1:-1]]


def _links(name: str, machines: dict[str, Facts], exchange: Exchange) -> list[Link]:
    plan = [*rounds(sorted(machines))]
    links: list[Link] = []
    seconds = min(max(BULK_S[0], LINKS_S / 4 / max(1, len(plan))), BULK_S[1])
    for pairs in plan:
        if exchange.elapsed_s >= LINKS_S:  # the same on every machine
            break
        target = dict(pairs).get(name)
        link = None
        if target is not None and target not in exchange.lost:
            at = machines[target]
            link = measure(
                name,
                machines[name].interface.address,
                target,
                at=(at.interface.address, at.port),
                token=at.token,
                seconds=seconds,
            )
        links += [found for found in exchange(link, Link | None, LINK_S).values() if found is not None]
    return links


def _canary(name: str, learners: Sequence[str], folder: str, exchange: Exchange) -> tuple[str, list[str]]:
    """The file that the first machine wrote, and the machines that do not see it."""
    path = ""
    with ExitStack() as at_end:
        if name == learners[0]:
            with suppress(OSError):
                path = at_end.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-")).name
        path = exchange(path, str, CANARY_S).get(learners[0], "")
        end = time.monotonic() + SEEN_S
        while not (sees := name not in learners or os.path.exists(path)) and time.monotonic() < end:
            time.sleep(0.1)
        return path, [machine for machine, seen in exchange(sees, bool, CANARY_S).items() if not seen]


def _all_reduce(name: str, ranks: dict[str, Facts], exchange: Exchange) -> dict[str, list[float] | str]:
    """The result of each rank, one a machine; only ranks import torch."""
    first = next(iter(ranks))
    store = None
    result: list[float] | str = ""
    if name in ranks:
        import torch.distributed  # noqa: F401 - this takes long on a slow machine: the other ranks must not wait for it

        ranks[name].interface.use()
        store = ranks[name].interface.listen() if name == first else None
    port = exchange(store.port if store is not None else 0, int, IMPORT_S).get(first, 0)
    if name in ranks and not ranks.keys() & exchange.lost.keys():
        try:
            result = _rank((ranks[first].interface.address, port), [*ranks].index(name), [*ranks.values()])
        except Exception as error:  # the verdict names it
            result = str(error).partition("\n")[0] or type(error).__name__
    return {rank: got for rank, got in exchange(result, list[float] | str, REDUCE_S + LINK_S).items() if got}


def _rank(store: tuple[str, int], rank: int, ranks: Sequence[Facts]) -> list[float]:
    """Over gloo, and over NCCL where all ranks have devices. Raises RuntimeError when one does not come in time."""
    import torch

    from common.weights.transports.groups import dist

    limit = datetime.timedelta(seconds=REDUCE_S)
    world = len(ranks)
    rates: list[float] = []
    devices = ["cpu", *(["cuda"] if all(facts.gpus for facts in ranks) else [])]
    meeting = dist.TCPStore(*store, is_master=False, wait_for_workers=False, timeout=limit)
    backend = ",".join(["cpu:gloo", "cuda:nccl"][: len(devices)])
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world, timeout=limit)
    for device in [*devices, *devices]:  # the first time makes the connections
        value = torch.full((REDUCED_BYTES[device] // 4,), rank + 1.0, device=device)
        begun = time.perf_counter()
        dist.all_reduce(value)
        if wrong := int((value != world * (world + 1) / 2).sum()):  # waits for the device
            raise SlipstreamError(f"{wrong:,} of {len(value):,} sums are wrong on {device}")
        rates.append(2 * (world - 1) / world * REDUCED_BYTES[device] / (time.perf_counter() - begun))
    return rates[len(devices) :]
