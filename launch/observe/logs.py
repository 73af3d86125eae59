"""slipstream logs RUN|ADDRESS [ROLE]: the end of a role's log, whichever machine it is on.

The broker asks the role with its next answer to it, and the role sends the text with its next message. Without a broker
the files in RUN/logs are read.
"""

import argparse
import re
import time
from collections.abc import Mapping
from pathlib import Path

from broker.contract import BrokerStatus
from broker.messaging.client_methods import ObserverBroker
from common.config.loading import nearest
from common.config.schema import BrokerConfig
from common.errors import SlipstreamError, UsageError
from common.process.logs import log_end
from common.process.run_dir import RunDir
from launch.observe.observation import ask, observe
from launch.resolve_target import Target, find_target, handed_out

PATIENCE_S = 5.0  # beyond the time between two heartbeats
ASK_EVERY_S = 0.2


def command(args: argparse.Namespace) -> int:
    """Print the end of one role's log, or without ROLE the roles."""
    job = find_target(args)
    try:
        seen = observe(job)
    except SlipstreamError:
        if job.run is None:
            raise
        seen = None
    if seen is not None and seen.live:
        return from_roles(job, seen.status, args.role, args.lines)
    assert job.run is not None, "without a folder the broker has answered"
    return from_files(job.run, args.role, args.lines)


def from_roles(job: Target, status: BrokerStatus, role: str | None, count: int) -> int:
    """The last lines that a role of a running job sends."""
    roles = roles_of(status)
    if role is None:
        return list_roles(roles)
    whose = re.sub(r"^learner-\d{1,5}$", "learner", role)
    check(whose, count, roles)
    broker = handed_out(status.run.config, status.address).broker
    wait_s = PATIENCE_S + (broker.heartbeat_s if isinstance(broker, BrokerConfig) else 0.0)
    text = ask(job, lambda client: fetch(client, role, wait_s))
    if not text:
        why = "has no log there, or an empty one" if text == "" else f"did not answer within {wait_s:g} s"
        raise SlipstreamError(f"{role} ({roles[whose]}) {why}" if whose == role else f"{role} {why}")
    return show(text, count)


def from_files(run: RunDir, role: str | None, count: int) -> int:
    """The last lines of a file in RUN/logs, for a job that has ended or does not answer."""
    files = {role_of(path.stem): str(path) for path in sorted(run.logs.glob("*.log"))}
    if not files:
        raise SlipstreamError(f"no broker of this run answers, and there are no logs in {run.logs}")
    if role is None:
        return list_roles(files)
    role = "learner" if role == "learner-0" else role
    check(role, count, files)
    return show(log_end(Path(files[role])), count)


def role_of(stem: str) -> str:
    """The role that writes RUN/logs/STEM.log; the learner's other ranks are learner-1 and so on."""
    return stem.removeprefix("rollout-") if stem.startswith("rollout-") else stem.removesuffix("-0")


def list_roles(roles: Mapping[str, str]) -> int:
    print("\n".join(f"{name}: {where}" for name, where in roles.items()))
    return 0


def check(role: str, count: int, roles: Mapping[str, str]) -> None:
    """Raise UsageError for a role that is not there, and for less than one line."""
    if role not in roles or count < 1:
        near = nearest(role, roles) or ", ".join(roles)[:500]
        raise UsageError(f"expected a ROLE and --lines of at least 1, found {role!r} and {count}; nearest: {near}")


def show(text: str, count: int) -> int:
    for line in text.splitlines()[-count:]:
        print("".join(c if c.isprintable() or c == "\t" else "?" for c in line))  # a hostile node commands no terminal
    return 0


def roles_of(status: BrokerStatus) -> dict[str, str]:
    """The broker's address; state and host of the others."""
    learner = [("learner", status.learner.state, status.learner.host)] if status.learner else []
    nodes = [(n.report.node_id, n.report.state if n.alive else "gone", n.report.host) for n in status.nodes]
    return {"broker": status.address} | {name: f"{state} on {host}" for name, state, host in [*learner, *nodes]}


def fetch(client: ObserverBroker, role: str, wait_s: float) -> str | None:
    """The end of the log, None when the role does not send it within `wait_s`."""
    end = time.monotonic() + wait_s
    while (text := client.log(role)) is None and time.monotonic() < end:
        time.sleep(ASK_EVERY_S)
    return text
