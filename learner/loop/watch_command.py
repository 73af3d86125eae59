"""The command of a watch rule, in a process of its own, which no step waits for."""

import logging
import os
import subprocess
from contextlib import closing, suppress

import msgspec

from common.config.observing import WatchRule
from common.json_lines import EventFile
from common.process.run_dir import RunDir
from learner.loop.watch import Firing

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 1 << 16  # reach RUN/logs/watch.log from one command
LOG_BYTES = 1 << 22  # a longer log begins anew


def run_command(rule: WatchRule, firing: Firing, run: RunDir) -> None:
    """Run the command to its end, with the facts as JSON on its standard input and as SLIPSTREAM_WATCH_* variables.

    GNU timeout ends it with its process group, also when the learner is killed meanwhile.
    """
    facts = {**msgspec.structs.asdict(firing), "run": str(run.path)}
    env = os.environ | {f"SLIPSTREAM_WATCH_{name.upper()}": str(value) for name, value in facts.items()}
    words = ["timeout", "--signal=KILL", str(rule.timeout_s), *rule.command]
    pipe, log = subprocess.PIPE, run.logs / "watch.log"
    try:
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=env) as child:
            assert child.stdin is not None and child.stdout is not None
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write(msgspec.json.encode(facts))
            output = child.stdout.read(OUTPUT_BYTES)
            while child.stdout.read(OUTPUT_BYTES):
                pass  # more than that is dropped
        with log.open("wb" if log.exists() and log.stat().st_size > LOG_BYTES else "ab") as file:
            file.write(f"{firing.text}: {rule.command}: exit code {child.returncode}\n".encode() + output)
        with closing(EventFile(run.events, "learner")) as events:
            events.add("watch_command", rule=firing.rule, step=firing.step, exit_code=child.returncode)
    except OSError as error:  # a full disk, or no timeout on this machine
        logger.error("%s: the command %s: %s", firing.rule, rule.command[0], error)
