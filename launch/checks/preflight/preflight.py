"""slipstream preflight CONFIG, on each machine of a job before it starts: one page, one verdict, and repairs.

The machine that has the meeting address (broker.address, or --meet) listens there, and the others connect to it.
Exit codes, the same on every machine: 0 all well (warnings may be there), 1 something has to be repaired, 2 bad usage.
"""

import argparse
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import zmq

from broker.sockets import bind_router, bindable, connect_dealer
from common.config.checks import resolve_paths
from common.config.loading import load_config
from common.config.network_checks import is_loopback, is_wildcard, split_address
from common.errors import EXIT_FAILED, UsageError
from common.process.lifecycle import leaving_after
from common.security.credentials import Role, curve_credentials, load_credential, load_server
from common.security.curve import CurveGate, KeyRing
from launch.checks.findings import exit_code, show
from launch.checks.preflight.exchange import Exchange, pass_on
from launch.checks.preflight.facts import facts_of
from launch.checks.preflight.stages import examine
from launch.checks.preflight.verdict import judge, verdict
from launch.cluster.interface import routed
from launch.up.ranks import slurm_machines

MOST_BYTES = 4 << 20
MOST_S = 180.0  # the stages have deadlines of their own, 150 s together
HANGS = "a disk, a network file system, or a device does not answer"
ROLES: tuple[Role, ...] = ("learner", "node", "observer", "broker")


def command(args: argparse.Namespace) -> int:
    """Take part; the meeting host prints the page, the others the verdict."""
    config = resolve_paths(load_config(Path(args.config), args.overrides))
    machines = args.machines or slurm_machines() or config.learner.machines
    wait_s = args.wait_s
    if machines < 1 or wait_s <= 0:
        raise UsageError(f"expected positive numbers, found --machines {machines} and --wait-s {wait_s:g}")
    address = meeting_address(args.meet or config.broker.addresses[0], machines)
    host = split_address(address)[0]
    name = socket.gethostname()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    keys = curve_credentials(config.broker.credentials)
    with leaving_after(MOST_S, EXIT_FAILED, HANGS):
        own = facts_of(config, args.role, address)
    leads = is_loopback(host) or routed(host).address == host
    with zmq.Context[Any]() as context, ExitStack() as at_end:
        if leads:
            address = _listen(context, address, keys, machines, wait_s, at_end)
        credential = load_credential(keys, "broker" if leads else "observer") if keys is not None else None
        dealer, handshakes = connect_dealer(context, address, name.encode(), MOST_BYTES, credential)
        at_end.callback(dealer.close)
        at_end.callback(handshakes.close)
        end = time.monotonic() + wait_s
        while not dealer.poll(100, zmq.POLLOUT):
            if refusal := handshakes.refusal():
                raise UsageError(refusal)
            if time.monotonic() > end:
                hint = "run the same command on that machine"
                raise UsageError(f"no preflight listens at {address} after {wait_s:g} s; {hint}")
        with leaving_after(wait_s + MOST_S, EXIT_FAILED, HANGS):
            exchange = Exchange(dealer)
            report = examine(name, own, exchange, wait_s)
            exchange.part(leads)
    findings = judge(report)
    headline = f"preflight of {len(report.machines)} machines at {address}: {verdict(findings)}"
    if args.json:
        print(msgspec.json.encode({"verdict": headline, "findings": findings, "report": report}).decode())
    else:
        print(headline)
        if leads:
            show(findings)
    return exit_code(findings)


def meeting_address(word: str, machines: int) -> str:
    """tcp://IP:PORT; raises UsageError for one that so many machines cannot all connect to."""
    address = bindable(word, authenticated=True)
    host, port = split_address(address)
    if not host or is_wildcard(host) or (machines > 1 and (not port or is_loopback(host))):
        found = word if word == address else f"{word}, here {address}"
        expected = f"tcp://HOST:PORT that all of {machines} machines can connect to"
        hint = "change it, or meet elsewhere with --meet tcp://HOST:PORT"
        raise UsageError(f"broker.address: expected {expected}, found {found}; {hint}")
    return address


def _listen(context: Any, address: str, keys: str | None, machines: int, wait_s: float, at_end: ExitStack) -> str:
    """Start the thread that passes values on; returns its address."""
    curve = CurveGate(context, load_server(keys), KeyRing(keys, ROLES)) if keys is not None else None
    if curve is not None:
        at_end.callback(curve.close)
    router = bind_router(context, [address], MOST_BYTES, curve)
    stop = threading.Event()
    router.setsockopt(zmq.ROUTER_HANDOVER, 0)  # a second machine of the same name does not replace the first one
    hub = threading.Thread(target=pass_on, args=(router, machines, wait_s, stop))
    hub.start()
    at_end.callback(hub.join)
    at_end.callback(stop.set)
    return router.getsockopt_string(zmq.LAST_ENDPOINT)
