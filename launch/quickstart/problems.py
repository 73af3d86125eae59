"""Problems and demonstrations of the two quickstart tasks, made from a seed; standard library only.

Addition: `Q: 384+519=? A: 4+9=13, 8+1+1=10, 3+5+1=9 =903`: column sums, least significant first, then the answer.
The warm start learns clean demonstrations first and then sloppy ones: half of them guess at once, and carries are
forgotten. So reinforcement learning starts from a policy that can do the task but mostly does not.

Number guessing: a part of the demonstrated games bisects, the rest guesses anywhere.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Pair = tuple[int, int]


@dataclass(frozen=True)
class AdditionPlan:
    """How much addition data, and of what kind.

    Without `median_digits` numbers are drawn uniformly below 10**digits. With it the number of digits is log-normal
    around it, at most `digits`, which gives answers of long-tailed length. Problems and demonstrations are disjoint.
    """

    digits: int = 3
    median_digits: float | None = None
    spread: float = 0.0  # standard deviation of the logarithm of the number of digits
    train: int = 4096
    held_out: int = 512
    clean: int = 19200  # demonstrations
    sloppy: int = 1920  # demonstrations, behind the clean ones
    blurted: float = 0.5  # share of sloppy demonstrations that guess at once
    forgotten: float = 0.3  # probability that a sloppy demonstration forgets a carry


@dataclass(frozen=True)
class GuessingPlan:
    """The number game: numbers 1..highest, `guesses` turns, and how the demonstrated games are played."""

    highest: int = 31
    guesses: int = 5
    games: int = 6400
    bisected: float = 0.3


def addition_pairs(plan: AdditionPlan, rng: random.Random) -> tuple[list[Pair], list[Pair], Iterator[Pair]]:
    """Held-out problems, training problems, and an endless stream of others for demonstrations."""
    problems: dict[Pair, None] = {}
    while len(problems) < plan.held_out + plan.train:
        problems[_draw(plan, rng)] = None
    drawn = list(problems)
    others = (pair for pair in iter(lambda: _draw(plan, rng), None) if pair not in problems)
    return drawn[: plan.held_out], drawn[plan.held_out :], others


def _draw(plan: AdditionPlan, rng: random.Random) -> Pair:
    if plan.median_digits is None:
        return rng.randrange(10**plan.digits), rng.randrange(10**plan.digits)
    drawn = round(plan.median_digits * rng.lognormvariate(0.0, plan.spread))
    digits = min(max(drawn, 2), plan.digits)
    low, high = 10 ** (digits - 1), 10**digits
    return rng.randrange(low, high), rng.randrange(low, high)


def addition_problem(pair: Pair) -> Row:
    """The dataset row that rollout_fleet.environments.builtin.addition reads."""
    return {"question": f"{pair[0]}+{pair[1]}", "answer": str(sum(pair))}


def addition_demonstration(pair: Pair, rng: random.Random, blurted: float = 0.0, forgotten: float = 0.0) -> Row:
    """A warm-start row; wrong with the given probabilities."""
    prompt = f"Q: {pair[0]}+{pair[1]}=? A:"
    if rng.random() < blurted:
        return {"prompt": prompt, "completion": f" ={rng.randrange(2 * 10 ** len(str(max(pair))))}"}
    return {"prompt": prompt, "completion": _scratchpad(pair, rng, forgotten)}


def _scratchpad(pair: Pair, rng: random.Random, forgotten: float) -> str:
    columns: list[str] = []
    digits = ""
    carry = 0
    for column in range(len(str(max(pair)))):
        x, y = (number // 10**column % 10 for number in pair)
        if carry and rng.random() < forgotten:
            carry = 0
        total = x + y + carry
        columns.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        digits = str(total % 10) + digits
        carry = total // 10
    if carry and rng.random() >= forgotten:
        digits = "1" + digits
    return f" {', '.join(columns)} ={int(digits)}"


def addition_demonstrations(plan: AdditionPlan, pairs: Iterator[Pair], rng: random.Random) -> Iterator[Row]:
    for _ in range(plan.clean):
        yield addition_demonstration(next(pairs), rng)
    for _ in range(plan.sloppy):
        yield addition_demonstration(next(pairs), rng, plan.blurted, plan.forgotten)


def guessing_demonstrations(plan: GuessingPlan, rng: random.Random) -> Iterator[Row]:
    """Games as segments: [text, 1] is an action to imitate (it ends with the end token), [text, 0] is read only."""
    for _ in range(plan.games):
        yield {"segments": _game(plan, rng.randint(1, plan.highest), rng.random() < plan.bisected, rng)}


def _game(plan: GuessingPlan, number: int, bisect: bool, rng: random.Random) -> list[list[str | int]]:
    low, high = 1, plan.highest
    segments: list[list[str | int]] = [[f"Guess {low}-{high}\n", 0]]
    for made in range(1, plan.guesses + 1):
        guess = (low + high) // 2 if bisect else rng.randint(1, plan.highest)
        segments.append([str(guess), 1])
        if guess == number or made == plan.guesses:
            break
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        segments.append([f" {'higher' if guess < number else 'lower'} {low}-{high}\n", 0])
    return segments
