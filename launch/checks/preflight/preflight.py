"""slipstream preflight CONFIG, on each machine of a job before it starts: one page, one verdict, and repairs.

The machine that has the meeting address (broker.address, or --meet) listens there, and the others connect to it.
Exit codes, the same on every machine: 0 all well (warnings may be there), 1 something has to be repaired, 2 bad usage.
"""

import argparse
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from msgspec import structs

from broker.sockets import bind_router, bindable, connect_dealer
from common.config.checks import resolve_paths
from common.config.loading import load_config
from common.config.network_checks import is_loopback, is_wildcard, split_address
from common.errors import EXIT_FAILED, UsageError
from common.process.lifecycle import leaving_after
from common.security.credentials import Role, curve_credentials, load_credential, load_server
from common.security.curve import CurveGate, KeyRing
from launch.checks.findings import Finding, Level, exit_code, few, fine, show
from launch.checks.preflight.facts import Facts, Link, facts_of
from launch.checks.preflight.stages import Exchange, Report, examine, learners_of, pass_on
from launch.cluster.interface import routed
from launch.up.ranks import slurm_machines

# ---------------------------------------------------------------- verdict


SKEW_S = 1.0
ADVICE = {  # by check: why it matters, and the repair
    "machine": ("every rank waits for it", "read its output; check its cable and firewall"),
    "clock": ("times in logs do not fit together, and certificates may not be valid", "chrony or systemd-timesyncd"),
    "config": ("each role computes what its own config says", "one file with the same overrides on every machine"),
    "versions": ("a library refuses or misreads what another version of it sends", "launch/setup.sh from one commit"),
    "settings": ("ranks that differ hang in their first collective", "export the same everywhere; learner.interface"),
    "interface": ("packets get lost between the networks", "one network and one MTU; --meet and /etc/hosts choose it"),
    "links": ("collectives wait for the slowest link", "check cable, port, route, firewall and MTU between them"),
    "all-reduce": ("training needs one in each step", "launch/setup.sh learner; learner.interface; firewalls"),
    "shared folder": ("a learner that moves to other machines finds no checkpoint", "share learner.checkpoint.dir"),
}
DOUBTFUL = ("MTU", "python", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")  # may differ on purpose
T = TypeVar("T")


def judge(report: Report) -> list[Finding]:
    """All findings, problems first."""
    found = [*_machines(report), *_agreement(report.machines), *_links(report), *_together(report)]
    own = _grouped((name, finding) for name, facts in report.machines.items() for finding in facts.findings)
    found += [structs.replace(finding, what=f"{few(names)}: {finding.what}") for finding, names in own.items()]
    return sorted(found, key=lambda finding: ("problem", "warning", "fine").index(finding.level))


def verdict(findings: Sequence[Finding]) -> str:
    bad = [f"{finding.check}: {finding.what}" for finding in findings if finding.level == "problem"]
    return "; ".join([f"{len(bad)} to repair", *bad]) if bad else "all well"


def _wrong(check: str, code: str, what: str, level: Level = "problem") -> Finding:
    why, fix = ADVICE[check]
    return Finding(level=level, check=check, code=code, what=what, why=why, fix=fix)


def _machines(report: Report) -> Iterator[Finding]:
    for name, why in report.lost.items():
        yield _wrong("machine", "lost", f"{name} left early: {why}")
    first = next(iter(report.machines))
    ahead = {first: 0.0} | {link.target: link.ahead_s for link in report.links if link.source == first}
    middle_s = statistics.median_low(ahead.values())  # with two machines, the first one counts as right
    for name, facts in report.machines.items():
        off_s = ahead.get(name, middle_s) - middle_s
        if abs(off_s) > SKEW_S:
            yield _wrong("clock", "skewed", f"{name} is {off_s:+.1f} s off")
        rates = ""
        if report.links:  # a machine alone has none
            rates = f", sends {_rate(_usual(link for link in report.links if link.source == name))}"
            rates += f", receives {_rate(_usual(link for link in report.links if link.target == name))}"
        disk = ", ".join(f"{speed / (1 << 20):,.0f} MiB/s to {folder}" for folder, speed in facts.writes.items())
        network = f"{facts.interface.name} {facts.interface.address}{rates}"
        yield fine("machine", f"{name}, {facts.role}: {network}; clock {off_s * 1e3:+.1f} ms; writes {disk}")


def _agreement(machines: Mapping[str, Facts]) -> Iterator[Finding]:
    nccl = any(facts.agree["config"]["weights.transport"] == "nccl" for facts in machines.values())
    for kind in ("config", "versions", "settings", "interface"):
        shown = {key: value for facts in machines.values() for key, value in facts.agree[kind].items() if value}
        differing = [*_differing(machines, kind, nccl)]
        yield from differing
        if not differing:
            values = "".join(f", {key} {value}" for key, value in shown.items() if kind != "config")
            yield fine(kind, f"the same{values}")


def _differing(machines: Mapping[str, Facts], kind: str, nccl: bool) -> Iterator[Finding]:
    """Differences of this kind between machines that must agree; with `nccl` learner and nodes share its versions."""
    for key in sorted({key for facts in machines.values() for key in facts.agree[kind]}):
        everywhere = kind in ("config", "interface") or key == "slipstream"
        joined = ["learner rollout"] if nccl and "nccl" in key.lower() else ["learner", "rollout", "broker"]
        for group in ["learner rollout broker"] if everywhere else joined:
            of = ((n, f.agree[kind].get(key) or "none") for n, f in machines.items() if f.role in group.split())
            if len(values := _grouped(of)) > 1:
                what = "; ".join(f"{value} on {few(names)}" for value, names in values.items())
                yield _wrong(kind, key, f"{key}: {what}", "warning" if key in DOUBTFUL else "problem")


def _links(report: Report) -> Iterator[Finding]:
    links = [link for link in report.links if not {link.source, link.target} & report.lost.keys()]
    good = [link for link in links if not link.error]
    typical = _usual(links)
    for link in links:
        way = f"{link.source} to {link.target}"
        if link.error and link.latency_s:
            yield _wrong("links", "stalls", f"{way}: small packets pass, large ones stall (MTU?): {link.error}")
        elif link.error:
            yield _wrong("links", "broken", f"{way}: {link.error}")
        elif link.bytes_per_s < typical / 2:
            slow = f"{_rate(link.bytes_per_s)}, less than half of the median {_rate(typical)}"
            yield _wrong("links", "slow", f"{way}: {slow}")
    missing = len(report.machines) * (len(report.machines) - 1) - len(report.links)
    if missing and not report.lost:
        yield _wrong("links", "unmeasured", f"{missing} were not measured, because time was up", "warning")
    if good:
        worst = min(good, key=lambda at: at.bytes_per_s)
        trips = [link.latency_s * 1e3 for link in good]
        slowest = f"slowest {worst.source} to {worst.target}: {_rate(worst.bytes_per_s)}"
        trip = f"round trip {statistics.median(trips):.2f} ms, longest {max(trips):.2f} ms"
        yield fine("links", f"{len(good)} work, median {_rate(typical)}, {slowest}; {trip}")


def _together(report: Report) -> Iterator[Finding]:
    """All-reduce and shared folder of the learner's machines."""
    learners = learners_of(report.machines, report.lost)
    if len(learners) < 2:
        return
    if without := [name for name in learners if not report.machines[name].agree["versions"]["torch"]]:
        yield _wrong("all-reduce", "no_torch", f"not tried on {few(without)}, which have no torch", "warning")
    errors = _grouped((name, result) for name, result in report.reduced.items() if isinstance(result, str))
    for error, names in errors.items():
        yield _wrong("all-reduce", "failed", f"{few(names)}: {error}")
    rates = [result for result in report.reduced.values() if not isinstance(result, str)]
    if rates and not errors:
        of = zip(("gloo", "NCCL"), zip(*rates, strict=True), strict=False)
        shown = ", ".join(f"{library} {_rate(min(found))}" for library, found in of)
        yield fine("all-reduce", f"right on {len(rates)} machines, bus bandwidth {shown}")
    folder = report.canary.rpartition("/")[0]
    if not folder:
        yield _wrong("shared folder", "unwritable", "its first file cannot be written")
    elif report.blind:
        yield _wrong("shared folder", "not_shared", f"a file in {folder} is not there on {few(report.blind)}")
    else:
        yield fine("shared folder", f"{folder} is shared")


def _grouped(values: Iterable[tuple[str, T]]) -> dict[T, list[str]]:
    groups: dict[T, list[str]] = {}
    for name, value in values:
        groups.setdefault(value, []).append(name)
    return groups


def _usual(links: Iterable[Link]) -> float:
    """The median bandwidth of those that work; 0 without any."""
    return statistics.median([link.bytes_per_s for link in links if not link.error] or [0.0])


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.0f} Mbit/s"


# ---------------------------------------------------------------- command

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
