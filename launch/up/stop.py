"""slipstream stop RUN|ADDRESS: every role of a job leaves, as on SIGTERM; the same commands continue the job.

The request is repeated until no role is left. So a broker that is killed and started again, or that stood by, gets it.

slipstream resume RUN: a job that a watch rule paused or stopped may continue; docs/watch.md.
"""

import argparse
import time

from broker.contract import BrokerStatus
from common.errors import SlipstreamError, UsageError
from common.process.lock_file import is_locked
from common.process.logs import visible
from common.process.run_dir import write_json
from common.run_reader import read_recent
from launch.observe.observation import ask
from launch.resolve_target import Target, config_of, find_run, find_target, handed_out

ASK_EVERY_S = 0.3
TAKEOVER_S = 15.0  # a standby broker leads within this time


def command(args: argparse.Namespace) -> int:
    """Stop the job and wait until all have left. Raises SlipstreamError, naming those who are left, after a while."""
    job = find_target(args)
    status = None
    left = "the broker"
    heard = time.monotonic()
    end = heard + args.timeout_s
    supervised = False
    while time.monotonic() < end:
        try:
            status = ask(job, lambda client: client.stop(), role="learner")
            heard = time.monotonic()
            before = left
            left = ", ".join(status.present) or "the broker"
            if left != before:
                print(f"waiting for {visible(left)}", flush=True)
        except SlipstreamError as error:
            if status is None and isinstance(error, UsageError):
                raise
            running = job.run is not None and is_locked(job.run.up_lock)  # which restarts a killed broker
            supervised |= running
            if not running and (supervised or over(job, status, time.monotonic() - heard)):
                print("stopped; the same commands continue the job" if status else f"nothing to stop: {error}")
                return 0
        time.sleep(ASK_EVERY_S)
    raise SlipstreamError(f"still there after {args.timeout_s:g} s: {left}; `slipstream logs {args.run}` may say why")


def over(job: Target, last: BrokerStatus | None, silent_s: float) -> bool:
    """Whether a broker that does not answer, and said `last`, has ended, and no other one follows it."""
    if last is None:
        return not job.broker()[0]
    alone = len(handed_out(last.run.config, last.address).broker.addresses) == 1
    return not last.present and (alone or silent_s > TAKEOVER_S)


def resume(args: argparse.Namespace) -> int:
    """Say up to which step and evaluation rules have been answered. A paused learner looks about once a second."""
    run = find_run(args.run)
    if (config := config_of(run)) is not None and not config.watch:
        hint = f"a job that was stopped continues with `slipstream up {run.config}`"
        raise UsageError(f"{run.path} has no watch rules, so none has paused it; {hint}")
    tail = read_recent(run.metrics)
    answered = {"step": tail.last.step} if tail.last else {}
    if tail.evaluations:
        answered["evaluation"] = tail.evaluations[-1].step
    if not answered:
        raise UsageError(f"{run.path} has trained no step: no rule can have acted")
    write_json(run.resume_json, answered)
    upto = ", ".join(f"{kind} {number}" for kind, number in answered.items())
    print(f"rules that acted up to {upto} no longer pause or stop {run.path}; start the job if it has ended")
    return 0
