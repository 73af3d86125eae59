"""slipstream logs RUN|ADDRESS [ROLE]: the end of a role's log, whichever machine it is on.

The broker asks the role with its next answer to it, and the role sends the text with its next message.
"""

import argparse
import re
import time

from broker.contract import BrokerStatus
from broker.messaging.client_methods import ObserverBroker
from common.config.loading import nearest
from common.config.schema import BrokerConfig
from common.errors import SlipstreamError, UsageError
from launch.observe.observation import ask, observe
from launch.resolve_target import find_target, handed_out

PATIENCE_S = 5.0  # beyond the time between two heartbeats
ASK_EVERY_S = 0.2


def command(args: argparse.Namespace) -> int:
    """Print the end of one role's log, or without ROLE the roles."""
    job, role = find_target(args), args.role
    seen = observe(job)
    if not seen.live:
        raise SlipstreamError(f"{seen.note}; RUN/logs of each machine has the logs of its roles")
    roles = roles_of(seen.status)
    if role is None:
        print("\n".join(f"{name}: {where}" for name, where in roles.items()))
        return 0
    whose = re.sub(r"^learner-\d{1,5}$", "learner", role)
    if whose not in roles or args.lines < 1:
        near = nearest(role, roles) or ", ".join(roles)[:500]
        raise UsageError(f"expected a ROLE and --lines of at least 1, found {role!r} and {args.lines}; nearest: {near}")
    broker = handed_out(seen.status.run.config, seen.status.address).broker
    wait_s = PATIENCE_S + (broker.heartbeat_s if isinstance(broker, BrokerConfig) else 0.0)
    text = ask(job, lambda client: fetch(client, role, wait_s))
    if not text:
        why = "has no log there, or an empty one" if text == "" else f"did not answer within {wait_s:g} s"
        raise SlipstreamError(f"{role} ({roles[whose]}) {why}" if whose == role else f"{role} {why}")
    for line in text.splitlines()[-args.lines :]:
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
