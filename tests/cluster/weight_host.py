"""A node without an engine, or a rank of a learner that sends weights, as a process that can run on its own host.

    python -m tests.cluster.weight_host node|learner|source FOLDER NAME OPTIONS

It reads a line of JSON for each command from the FIFO FOLDER/NAME.do and writes one for each event to FOLDER/NAME.said.
That is a file, because it outlives a process that is killed. OPTIONS are JSON, too.

- A node is weight_plane_node.py: a command is [address, incarnation], OPTIONS are those of its `main`, and `id`.
- A learner takes `start`, `share`, `make`, `publish` and `close` (class Learner). It may have several publishers.
- A source is a further rank of the learner; it takes `start`, `make`, `publish` and `close` (class Source).
"""

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from common.config.schema import WeightsConfig
from common.weights.source.publisher import WeightPublisher
from common.weights.source.sources import LeadEndpoint, RemoteSource
from tests.integration.weights import weight_plane_node

LOOK_S = 0.02  # pause between two looks at a publisher's figures
VALUES = 128  # bfloat16 has all whole numbers up to this one


class Lines:
    """The rig's end as weight_plane_node.py uses it: commands come in and events go out."""

    def __init__(self, folder: Path, name: str) -> None:
        self._commands = os.open(folder / f"{name}.do", os.O_RDWR)  # as its own writer it never reads an end
        self._said = os.open(folder / f"{name}.said", os.O_WRONLY | os.O_APPEND)

    def fileno(self) -> int:
        return self._commands

    def recv_bytes(self) -> bytes:
        """The next command; waits for it."""
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._commands, 1)
        return line

    def send_bytes(self, data: bytes) -> None:
        os.write(self._said, data + b"\n")

    def say(self, event: str, **what: object) -> None:
        self.send_bytes(json.dumps({"event": event, "time": time.time(), **what}).encode())


def value(version: int) -> float:
    """The first element of a version, which nodes tell."""
    return float(version % VALUES)


def parts(size_bytes: int, sources: int) -> list[list[tuple[str, tuple[int]]]]:
    """Names and shapes of bfloat16 tensors: one for each source, of about the same size."""
    words = size_bytes // 2
    ends = [words * (i + 1) // sources for i in range(sources)]
    return [[(f"weights.{i}", (end - start,))] for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


class Rank:
    """A source's part of every version: one tensor of random bits."""

    def __init__(self, lines: Lines) -> None:
        self.say, self._words = lines.say, torch.zeros(0, dtype=torch.int16)
        self._named: list[tuple[str, torch.Tensor]] = []

    def obey(self, command: dict[str, Any]) -> None:
        getattr(self, command.pop("do"))(**command)

    def make(self, version: int, size_bytes: int, changed: float | None, number: int, sources: int) -> None:
        """Event `made`. `changed`: the share that moves by one unit since the version before; None: all is new.

        Few elements of bfloat16 weights change in a step of RL, nearly all by one unit (docs/delta.md).
        """
        ((name, (count,)),) = parts(size_bytes, sources)[number]
        chance = torch.Generator().manual_seed(version * sources + number)
        if changed is None:
            self._words = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16, generator=chance)
        else:
            at = torch.randint(1, count, (int(changed * count),), generator=chance)
            self._words[at] += 2 * torch.randint(0, 2, at.shape, dtype=torch.int16, generator=chance) - 1
        weights = self._words.view(torch.bfloat16)
        weights[0] = value(version)
        self._named = [(name, weights)]
        self.say("made", version=version)


class Learner(Rank):
    """Publishers by name. Publishing to several at once is a star: each of them sends a copy of its own."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self._publishers: dict[str, WeightPublisher] = {}
        self._told: dict[str, dict[str, Any]] = {}
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def start(self, name: str, incarnation: int, weights: dict[str, Any], credentials: str | None) -> None:
        """Event `listening`: a publisher with these keys of `weights` is up at `address`."""
        publisher = WeightPublisher(incarnation, "bfloat16", WeightsConfig(**weights), credentials=credentials)
        address = publisher.start()
        self._publishers[name] = publisher
        self.say("listening", name=name, address=address)

    def share(self, name: str, size_bytes: int, sources: int) -> None:
        """Send the first part only. Event `shared`, with what the other sources must know."""
        publisher = self._publishers[name]
        publisher.share(parts(size_bytes, sources))  # type: ignore[arg-type]
        self.say("shared", name=name, lead=msgspec.to_builtins(publisher.lead))

    def publish(self, names: list[str], version: int) -> None:
        """Event `published`; its time is the one before the first publisher got the version."""
        began = time.time()
        for name in names:
            self._publishers[name].publish(version, self._named, None)
        self.say("published", version=version, time=began, copied_s=time.time() - began)

    def close(self, names: list[str]) -> None:
        """Event `closed`."""
        for name in names:
            self._publishers.pop(name).close()
        self.say("closed", names=names)

    def _watch(self) -> None:
        """Event `stats`, whenever the figures of a publisher have changed."""
        while True:
            for name, publisher in list(self._publishers.items()):
                figures = asdict(publisher.stats())
                del figures["undelivered"]  # it changes all the time
                if figures != self._told.get(name):
                    self._told[name] = figures
                    self.say("stats", name=name, **figures)
            time.sleep(LOOK_S)


class Source(Rank):
    """A rank beside the lead."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self._remote: RemoteSource | None = None

    def start(
        self, number: int, size_bytes: int, sources: int, lead: object, weights: dict[str, Any], credentials: str | None
    ) -> None:
        """Serve part `number`; `lead` is that of `shared`. Event `started`."""
        named, told = parts(size_bytes, sources), msgspec.convert(lead, LeadEndpoint)
        options = {"dtype": "bfloat16", "weights": WeightsConfig(**weights), "credentials": credentials}
        self._remote = RemoteSource(number, named, told, **options)  # type: ignore[arg-type]
        self.say("started", incarnation=told.incarnation)

    def publish(self, version: int, names: list[str]) -> None:
        """Event `published`, with the time before."""
        assert self._remote is not None, "publish before start"
        began = time.time()
        self._remote.publish(version, self._named)
        self.say("published", version=version, time=began)

    def close(self, names: list[str]) -> None:
        """Event `closed`."""
        if self._remote is not None:
            self._remote.close()
        self._remote = None
        self.say("closed", names=names)


def main(kind: str, folder: str, name: str, options: str) -> None:
    torch.set_num_threads(1)
    lines, given = Lines(Path(folder), name), json.loads(options)
    if kind == "node":
        weight_plane_node.run(given.pop("id"), given, lines)  # type: ignore[arg-type]
    rank = {"learner": Learner, "source": Source}[kind](lines)
    lines.say("up")
    while True:
        rank.obey(json.loads(lines.recv_bytes()))


if __name__ == "__main__":
    main(*sys.argv[1:])
