"""slipstream logs RUN|ADDRESS [ROLE]: the end of a role's log, whichever machine it is on.

The broker asks the role with its next answer to it, and the role sends the text with its next message. Without a broker
the files in RUN/logs are read.
"""

import argparse
import re
import time
from pathlib import Path

from broker.client.calls import ObserverBroker
from broker.contract import BrokerStatus
from common.errors import SlipstreamError, UsageError, nearest
from common.process.logs import harmless, log_end, visible
from common.process.run_dir import RunDir
from launch.observe.observation import ask, observe
from launch.resolve_target import Target, find_target, handed_out

PATIENCE_S = 5.0  # beyond the time between two heartbeats
ASK_EVERY_S = 0.2


def command(args: argparse.Namespace) -> int:
    job = find_target(args)
    role = args.role or ""
    status = running(job)
    if status is not None:
        whose = re.sub(r"^learner-\d{1,5}$", "learner", role)
        roles = roles_of(status)
    else:
        assert job.run is not None, "without a folder the broker has answered"
        whose = "learner" if role == "learner-0" else role
        roles = files_of(job.run)
    if args.role is None:
        print("\n".join(visible(f"{name}: {where}", kept="") for name, where in roles.items()))
        return 0
    if whose not in roles or args.lines < 1:
        near = nearest(role, roles) or ", ".join(roles)[:500]
        raise UsageError(f"expected a ROLE and --lines of at least 1, found {role!r} and {args.lines}; nearest: {near}")
    text = log_end(Path(roles[whose])) if status is None else sent(job, status, role)
    for line in text.splitlines()[-args.lines :]:
        print("".join(c if harmless(c) or c == "\t" else "?" for c in line))  # a hostile node commands no terminal
    return 0


def running(job: Target) -> BrokerStatus | None:
    """The answer of the job's broker; None when there is none and the job has a folder. Raises SlipstreamError."""
    try:
        seen = observe(job)
    except SlipstreamError:
        if job.run is None:
            raise
        return None
    return seen.status if seen.live else None


def sent(job: Target, status: BrokerStatus, role: str) -> str:
    """The end of the log that a role of a running job sends. Raises SlipstreamError when it sends none."""
    config = handed_out(status.run.config, status.address)
    wait_s = PATIENCE_S + (config.rl.broker.heartbeat_s if config.rl else 0.0)
    text = ask(job, lambda client: fetch(client, role, wait_s))
    if not text:
        where = roles_of(status).get(role)  # none for a single rank
        why = "has no log there, or an empty one" if text == "" else f"did not answer within {wait_s:g} s"
        raise SlipstreamError(f"{role} ({where}) {why}" if where else f"{role} {why}")
    return text


def roles_of(status: BrokerStatus) -> dict[str, str]:
    """The broker's address; state and host of the others."""
    learner = [("learner", status.learner.state, status.learner.host)] if status.learner else []
    nodes = [(n.report.node_id, n.report.state if n.alive else "gone", n.report.host) for n in status.nodes]
    services = [(service.name, service.state, service.host) for service in status.services]
    others = [*learner, *nodes, *services]
    return {"broker": status.address} | {name: f"{state} on {host}" for name, state, host in others}


def files_of(run: RunDir) -> dict[str, str]:
    """The files in RUN/logs by role; the learner's other ranks are learner-1 and so on. Raises SlipstreamError."""
    stems = {path.stem: str(path) for path in sorted(run.logs.glob("*.log"))}
    if not stems:
        raise SlipstreamError(f"no broker of this run answers, and there are no logs in {run.logs}")
    nodes = {stem.removeprefix("rollout-"): file for stem, file in stems.items() if stem.startswith("rollout-")}
    return {stem.removesuffix("-0"): file for stem, file in stems.items() if not stem.startswith("rollout-")} | nodes


def fetch(client: ObserverBroker, role: str, wait_s: float) -> str | None:
    """The end of the log, None when the role does not send it within `wait_s`."""
    end = time.monotonic() + wait_s
    while (text := client.log(role)) is None and time.monotonic() < end:
        time.sleep(ASK_EVERY_S)
    return text
