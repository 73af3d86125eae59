"""The command of a watch rule, in a process of its own, which no step waits for."""

import logging
import os
import signal
import subprocess
import threading
import time
from contextlib import closing, suppress

import msgspec

from common.config.observing import WatchRule
from common.json_lines import EventFile
from common.process.run_dir import RunDir
from learner.loop.watch import Firing

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 1 << 16  # reach RUN/logs/watch.log from one command
LOG_BYTES = 1 << 22  # a longer log becomes watch.log.1


class WatchCommand(threading.Thread):
    """Runs a command with the facts as JSON on its standard input and as variables SLIPSTREAM_WATCH_*."""

    def __init__(self, rule: WatchRule, firing: Firing, run: RunDir) -> None:
        super().__init__(name=f"{firing.rule}-command", daemon=True)
        self._rule, self._firing, self._run_dir = rule, firing, run
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        began = time.monotonic()
        try:
            code, output = self._finish()
            self._log(code, output)
            with closing(EventFile(self._run_dir.events, "learner")) as events:
                seconds = round(time.monotonic() - began, 3)
                events.add("watch_command", rule=self._firing.rule, step=self._firing.step, exit_code=code, s=seconds)
        except OSError as error:  # no such command, or a full disk
            logger.error("%s: the command %s: %s", self._firing.rule, self._rule.command[0], error)

    def kill(self) -> None:
        """End the command and what it started."""
        if self._child is not None and self._child.poll() is None:
            logger.error("%s: the command %s was killed", self._firing.rule, self._rule.command[0])
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def _finish(self) -> tuple[int, bytes]:
        """(exit code, the beginning of its output). Raises OSError."""
        facts = {**msgspec.structs.asdict(self._firing), "run": str(self._run_dir.path)}
        env = os.environ | {f"SLIPSTREAM_WATCH_{name.upper()}": str(value) for name, value in facts.items()}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self._rule.command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=env, start_new_session=True
        ) as self._child:
            timer = threading.Timer(self._rule.timeout_s, self.kill)
            timer.start()
            assert self._child.stdin is not None and self._child.stdout is not None
            with suppress(BrokenPipeError), self._child.stdin as told:
                told.write(msgspec.json.encode(facts))
            output = self._child.stdout.read(OUTPUT_BYTES)
            while self._child.stdout.read(OUTPUT_BYTES):
                pass  # more than that is dropped
            code = self._child.wait()
            timer.cancel()
        return code, output

    def _log(self, code: int, output: bytes) -> None:
        path = self._run_dir.logs / "watch.log"
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        with path.open("ab") as log:
            log.write(f"{self._firing.text}: {self._rule.command}: exit code {code}\n".encode() + output)
