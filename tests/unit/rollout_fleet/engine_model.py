"""vLLM's scheduler in small, for tests of what steers its load: blocks, first come first served, the last in is out.

A step takes a time for itself, for each request in it and for each token of a prompt. The first two are about those of
the engine of bench/adaptive_concurrency.py; a prompt's token costs several times as much here, so that thrashing hurts.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rollout_fleet.engine.scheduler_stats import StepClock
from rollout_fleet.episode.concurrency import AdaptiveLimit
from rollout_fleet.episode.sampler_protocol import EngineCounters

STEP_S, REQUEST_S, TOKEN_S = 2.3e-3, 8.5e-5, 8.5e-5
BLOCK, MOST, BATCH = 128, 128, 8192  # tokens; requests and prompt tokens of one step


@dataclass(eq=False)
class Request:
    prompt: int
    answer: int
    done: int = 0
    blocks: int = 0
    thrown_out: bool = False

    @property
    def needs(self) -> int:
        return -(-(self.prompt + self.done + 1) // BLOCK)


class ModelEngine:
    """Runs `lengths`, (prompt, answer) tokens of one request after another, as fast as places allow."""

    def __init__(self, blocks: int, lengths: Iterator[tuple[int, int]]) -> None:
        self.blocks = self.free = blocks
        self.now, self.sampled, self.counters = 0.0, 0, EngineCounters()
        self._lengths = lengths
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._clock = StepClock(lambda: self.now)

    def fixed(self, places: int, seconds: float) -> float:
        """Tokens per second of the last two thirds."""
        return self._run(seconds, lambda: places)

    def adaptive(self, adapt: AdaptiveLimit, seconds: float) -> float:
        """The same while `adapt` looks once a second."""
        looks = itertools.count(1)
        due = next(looks)

        def limit() -> int:
            nonlocal due
            if self.now >= due:
                due = next(looks)
                self.counters.running, self.counters.waiting = len(self._running), len(self._waiting)
                self.counters.kv_cache_usage = 1 - self.free / self.blocks
                adapt.look(self.counters, self.now, len(self._running) + len(self._waiting))
            return adapt.limit

        return self._run(seconds, limit)

    def _run(self, seconds: float, limit) -> float:
        counted_from = None
        while self.now < seconds:
            places = limit()
            while len(self._running) + len(self._waiting) < places:
                self._waiting.append(Request(*next(self._lengths)))
            self._step()
            if counted_from is None and self.now > seconds / 3:
                counted_from = self.now, self.sampled
        assert counted_from is not None
        return (self.sampled - counted_from[1]) / (self.now - counted_from[0])

    def _step(self) -> None:
        prompts, again = (0, 0) if self._make_room() else self._let_in()
        self.now += STEP_S + REQUEST_S * len(self._running) + TOKEN_S * prompts
        self.sampled += len(self._running)
        for request in self._running:
            request.done += 1
        for request in [r for r in self._running if r.done >= r.answer]:
            self._running.remove(request)
            self._give_back(request)
            self.counters.requests += 1
        self.counters.recompute_s += self._clock.step(len(self._running), again)

    def _make_room(self) -> bool:
        """Give each request that needs one a further block; returns whether a request was preempted for it."""
        thrown_out = False
        i = 0
        while i < len(self._running):
            request = self._running[i]
            while request.needs - request.blocks > self.free:
                last = self._running.pop()
                self._give_back(last)
                last.thrown_out = thrown_out = True
                self._waiting.appendleft(last)
                if last is request:
                    return True
            self._take(request)
            i += 1
        return thrown_out

    def _let_in(self) -> tuple[int, int]:
        """Tokens that are computed for those who were let in; those of them that had been computed before."""
        prompts = again = 0
        while self._waiting and len(self._running) < MOST and prompts < BATCH and self._waiting[0].needs <= self.free:
            request = self._waiting.popleft()
            self._take(request)
            self._running.append(request)
            prompts += request.prompt + request.done
            again += request.prompt + request.done if request.thrown_out else 0
        return prompts, again

    def _take(self, request: Request) -> None:
        self.free -= request.needs - request.blocks
        request.blocks = request.needs

    def _give_back(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = 0
