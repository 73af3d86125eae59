"""Environments that misbehave, for processes of their own; `problem["how"]` says in which way."""

import asyncio
import importlib
import itertools
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rollout_fleet.environments.protocol import Action, Chat, StepResult


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(3600)


def eat() -> None:
    held = []
    while True:
        held.append(bytearray(256 << 20))


def flood_stdout() -> None:
    while True:
        os.write(1, b"x" * 65536)


def fork_bomb() -> None:
    """Harmless where the limits do not work: it stops by itself at 500."""
    for _ in range(500):
        try:
            if os.fork() == 0:
                os.setsid()
                time.sleep(3600)
        except BlockingIOError:  # the kernel refuses more
            time.sleep(0.01)
    time.sleep(3600)


def fork_and_leave() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(0.01)
    os._exit(0)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def fill_disk() -> None:
    with open("endless", "wb") as file:
        while True:
            file.write(b"x" * (1 << 20))


def fill_folder() -> None:
    for number in itertools.count():
        os.makedirs(f"{number % 50}/x", exist_ok=True)
        with open(f"{number % 50}/x/{number}", "w") as file:
            file.write("x" * 1000)


WAYS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (spin, sleep, eat, flood_stdout, fork_bomb, fork_and_leave, crash, fill_disk)
}


class Wild:
    """Asks once, then does `how`; 'tell' answers with what the process can see."""

    def __init__(self, problem: dict[str, Any], *, seed: int, group_seed: int) -> None:
        self.how, self.seed, self.group_seed = problem["how"], seed, group_seed
        self.turn = 0

    async def reset(self) -> Any:
        if self.how.endswith("_library"):
            importlib.import_module(self.how)
        if self.how == "talk":
            return Chat((("user", "hi"),), (("enable_thinking", False),), "[]")
        if self.how == "dicts":
            chat = Chat(())
            vars(chat)["messages"] = [{"role": "user", "content": "hi"}]
            return chat
        if self.how == "half_a_token":
            return [103, 2.7]
        if self.how == "token_array":
            return array("l", [103, 111])
        return "go"

    async def step(self, action: Action) -> StepResult:
        self.turn += 1
        if self.how in WAYS:
            WAYS[self.how]()
        if self.how == "raise":
            raise RuntimeError("not today")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "flood":
            return StepResult("x" * 100_000_000, done=False)
        if self.how == "tell" and self.turn == 1:
            await asyncio.sleep(0)
            told: Any = Fraction(1, 4)  # as a number of numpy or torch: JSON has no word for it
            return StepResult("\n".join(["", *sorted(os.environ), *descriptors()]), told, done=False, trained=False)
        return StepResult(reward=float(self.seed * 100 + self.group_seed), metrics={"turns": float(self.turn)})


def descriptors() -> list[str]:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [f"fd {os.path.basename(path)} {os.readlink(path)}" for path in paths if os.path.lexists(path)]
