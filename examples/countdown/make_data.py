"""Problems, searches for a warm start, and a random model of 1.2 M parameters.

A search writes attempts such as `7+4=11*2=22`, and below them the answer: `7 4 2 = 26`, then `7+4=11*2=22 7*4=28-2=26`,
then `7*4-2`. Some give up: their answer is the last attempt, though it missed the target.
"""

import operator
import random
from pathlib import Path

from launch.quickstart.assets import build_model, dense, write_rows

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
HELD_OUT, TRAIN, PATIENT, SLOPPY = 256, 1024, 38400, 4800
NUMBERS, TARGETS, LARGEST = range(1, 11), range(10, 100), 100  # LARGEST: of any value within an attempt
HIT, GIVEN_UP = 0.5, 0.7  # shares of attempts that are a solution, and of misses after which a sloppy search ends


def attempt(numbers, rng):
    """(text, answer, value) of the numbers in a random order, from left to right."""
    while True:
        first, *rest = rng.sample(numbers, len(numbers))
        value, text, answer, loose = first, str(first), str(first), False
        for number in rest:
            sign = rng.choice("+-*")
            value = OPERATORS[sign](value, number)
            answer = f"({answer})" if sign == "*" and loose else answer
            text, answer, loose = f"{text}{sign}{number}={value}", f"{answer}{sign}{number}", sign != "*"
            if not 1 <= value <= LARGEST:
                break
        else:
            return text, answer, value


def drawn(rng):
    """(problem, an attempt that solves it)."""
    while True:
        numbers = rng.choices(NUMBERS, k=3)
        found = attempt(numbers, rng)
        if found[2] in TARGETS:
            return {"numbers": numbers, "target": found[2]}, found


def key(problem):
    """The order of the numbers makes no other problem."""
    return *sorted(problem["numbers"]), problem["target"]


def search(problem, solution, rng, given_up=0.0):
    """Attempts until one hits, at most three; a miss ends the search with the probability `given_up`."""
    lines = []
    while True:
        hits = len(lines) == 2 or rng.random() < HIT
        text, answer, value = solution if hits else attempt(problem["numbers"], rng)
        lines.append(text)
        if value == problem["target"] or rng.random() < given_up:
            break
    prompt = f"{' '.join(map(str, problem['numbers']))} = {problem['target']}\n"
    return {"prompt": prompt, "completion": f"{' '.join(lines)}\n{answer}"}


def main():
    rng, problems = random.Random(0), {}
    while len(problems) < HELD_OUT + TRAIN:
        problem, _ = drawn(rng)
        problems[key(problem)] = problem
    rows = list(problems.values())
    write_rows(Path("held_out.jsonl"), rows[:HELD_OUT])
    write_rows(Path("train.jsonl"), rows[HELD_OUT:])
    others = (found for found in iter(lambda: drawn(rng), None) if key(found[0]) not in problems)
    patient = [search(*next(others), rng) for _ in range(PATIENT)]
    sloppy = [search(*next(others), rng, GIVEN_UP) for _ in range(SLOPPY)]
    write_rows(Path("warm_start.jsonl"), patient + sloppy)
    build_model(dense(192, 512, 3, 6, 0.036), seed=1, folder=Path("model"))


if __name__ == "__main__":
    main()
