"""The engine of bench/simulate.py, and the speeds of a job's parts."""

import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Curve = tuple[tuple[int, float], ...]
NEARLY = 1e-6  # tokens


@dataclass(frozen=True)
class Speeds:
    """Seconds, as in bench/simulate.py; `*_shared`: how many times longer work takes while the other side works."""

    step_s: Curve  # (requests, seconds) of an engine step, by requests; linear between these, and beyond
    call_s: float
    train_s: float
    train_token_s: float
    deliver_s: float
    train_pair_s: float = 0.0
    flip_s: float = 0.0
    prefill_s: float = 0.0
    context_s: float = 0.0
    engine_shared: float = 1.0
    learner_shared: float = 1.0

    def train_seconds(self, lengths: Sequence[int]) -> float:
        """Seconds of a step on episodes of so many tokens."""
        pairs = sum(length**2 for length in lengths)
        return self.train_s + self.train_token_s * sum(lengths) + self.train_pair_s * pairs


def straight(step_s: float, request_s: float) -> Curve:
    """An engine step of `step_s` seconds, and `request_s` for each request."""
    return (0, step_s), (1, step_s + request_s)


@lru_cache(4096)
def seconds_at(curve: Curve, requests: int) -> float:
    above = min(max(bisect_left(curve, (requests,)), 1), len(curve) - 1)
    (low, low_s), (high, high_s) = curve[above - 1], curve[above]
    return low_s + (high_s - low_s) * (requests - low) / (high - low)


def fit_positive(rows: list[list[float]], measured: list[float]) -> list[float]:
    """Factors of the columns, none negative, by least squares of the relative errors.

    A column that would be negative is left out, the most negative one first.
    """
    design = np.array(rows, dtype=float) / np.array(measured)[:, None]
    columns = list(range(design.shape[1]))
    factors = np.zeros(design.shape[1])
    while columns:
        scale = np.abs(design[:, columns]).max(axis=0)
        found = np.linalg.lstsq(design[:, columns] / scale, np.ones(len(design)), rcond=None)[0]
        if found.min() >= 0:
            factors[columns] = found / scale
            break
        del columns[int(found.argmin())]
    return [float(factor) for factor in factors]


class Node:
    """An engine that shares its time evenly: all running requests advance one token an engine step."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        # end on the token clock, tie, [serial, turn, sample], context less the clock at its start
        self._calls: list[tuple[float, int, list[int], float]] = []
        self._ties = itertools.count()
        self._tokens = 0.0  # The clock: tokens of a request that runs since time 0.
        self._behind = 0.0  # Context of all running requests, less the clock for each.
        self._debt_s = 0.0  # work that comes before the next token: calls and flips
        self._at = 0.0
        self.slower = 1.0  # times as long as alone; `advance` before a change
        self.unfinished = 0  # episodes that run or wait for a place
        self.taken = 0  # places
        self.queue: deque[tuple[int, int]] = deque()  # (serial, sample) that wait for a place
        self.version = 0

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    def _pace(self) -> tuple[float, float]:
        """(seconds of the next engine step, how much longer each one is than the one before)."""
        speeds, requests = self._speeds, len(self._calls)
        context = self._behind + requests * self._tokens
        return seconds_at(speeds.step_s, requests) + speeds.context_s * context, speeds.context_s * requests

    def advance(self, now: float) -> None:
        passed, self._at = now - self._at, now
        worked = passed / self.slower
        paid = min(worked, self._debt_s)
        self._debt_s -= paid
        if self._calls:
            step_s, growth_s = self._pace()
            left = worked - paid
            self._tokens += 2 * left / (step_s + math.sqrt(step_s**2 + 2 * growth_s * left))

    def start(self, tokens: int, call: list[int], context: int = 0) -> None:
        """A call of the model with so many sampled tokens before it; `advance` first."""
        self._debt_s += self._speeds.call_s + (0.0 if self._debt_s else self._speeds.prefill_s)
        behind = context - self._tokens
        self._behind += behind
        heapq.heappush(self._calls, (self._tokens + tokens, next(self._ties), call, behind))

    def stand_still(self, seconds: float) -> None:
        self._debt_s += seconds

    def next_end(self) -> float | None:
        """When the next call ends if nothing changes."""
        if not self._calls:
            return None
        step_s, growth_s = self._pace()
        tokens = max(0.0, self._calls[0][0] - self._tokens)
        return self._at + self.slower * (self._debt_s + tokens * (step_s + growth_s * tokens / 2))

    def ended(self) -> list[list[int]]:
        out: list[list[int]] = []
        while self._calls and self._calls[0][0] <= self._tokens + NEARLY:
            _, _, call, behind = heapq.heappop(self._calls)
            self._behind -= behind
            out.append(call)
        if not self._calls:
            self._behind = 0.0  # rounding does not add up
        return out
