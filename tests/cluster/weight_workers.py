"""Processes of weight_host.py on hosts of their own, as a test tells and hears them."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Host, signal_to
from tests.cluster.weight_host import value
from tests.launch_rig import ROOT
from tests.waiting import LIMIT_S, until

EVERY_S = 0.002  # between two looks at a counter: 10 kB at 40 Mbit/s


class Worker:
    """A process of weight_host.py on a host."""

    def __init__(self, kind: str, name: str, host: Host, folder: Path, options: dict[str, Any]) -> None:
        """`name` is that of its files in `folder`."""
        self.name, self.host, self.events = name, host, list[dict[str, Any]]()
        commands, said, self._log = (folder / f"{name}.{end}" for end in ("do", "said", "out"))
        os.mkfifo(commands)
        self._commands, self._said = os.open(commands, os.O_RDWR), said.open("w+b")
        words = [sys.executable, "-m", "tests.cluster.weight_host", kind, str(folder), name, json.dumps(options)]
        self.process = host.start(words, self._log, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})

    def tell(self, command: object) -> None:
        os.write(self._commands, json.dumps(command).encode() + b"\n")

    def heard(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """Every event of this kind so far that has these fields."""
        while (line := self._said.readline()).endswith(b"\n"):
            self.events.append(json.loads(line))
        self._said.seek(-len(line), os.SEEK_CUR)  # a line that is not all there yet
        return [e for e in self.events if e["event"] == event and all(e[k] == v for k, v in fields.items())]

    def wait(self, event: str, **fields: object) -> dict[str, Any]:
        """The first event of this kind with these fields, also one of before."""
        what = f"{event} {fields} of {self.name}"
        return until(lambda: self.heard(event, **fields), what, told=self.told, check=self.check, every_s=EVERY_S)[0]

    def check(self) -> None:
        """Raise AssertionError when the process has ended."""
        assert self.process.poll() is None, f"{self.name} has ended\n{self.told()}"

    def told(self) -> str:
        self.heard("")
        log = self._log.read_text(errors="replace")[-3000:]
        return f"{self.name}: {json.dumps(self.events[-20:], indent=1)}\n{log}"

    def kill(self) -> None:
        """It may stand still, or have ended already."""
        if self.process.poll() is None:
            signal_to(self.process, signal.SIGKILL)
            self.process.send_signal(signal.SIGCONT)  # nsenter
            self.process.wait(LIMIT_S)

    def stop(self) -> None:
        signal_to(self.process, signal.SIGSTOP)

    def go(self) -> None:
        """Let a stopped process run again. Its nsenter stopped with it, and wakes it when it wakes itself."""
        signal_to(self.process, signal.SIGCONT)
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """After its host's end."""
        self.process.send_signal(signal.SIGKILL)  # nsenter, which may stand still
        self.process.wait(LIMIT_S)
        os.close(self._commands)
        self._said.close()


class NodeWorker(Worker):
    """A node; `id` stays when its process is replaced."""

    def __init__(self, node_id: str, name: str, host: Host, folder: Path, options: dict[str, Any]) -> None:
        super().__init__("node", name, host, folder, options | {"id": node_id})
        self.id = node_id

    def active(self, version: int, **fields: object) -> dict[str, Any]:
        """Wait until it runs the version, with its weights."""
        found = self.wait("active", version=version, **fields)
        assert found["value"] == value(version), self.told()
        return found

    def versions(self) -> list[int]:
        """All that it ever ran, in order."""
        return [event["version"] for event in self.heard("active")]
