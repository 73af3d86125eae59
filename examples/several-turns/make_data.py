"""Starts and goals, careless walks that a warm start imitates, and a random model of 0.3 M parameters."""

import asyncio
import random
from pathlib import Path

from walk import MOVES, Walk

from launch.quickstart.assets import PRESETS, build_model, write_rows
from rollout_fleet.environments.protocol import Action

rng = random.Random(0)
fields = [[x, y] for x in range(4) for y in range(4)]
problems = [{"start": start, "goal": goal} for start in fields for goal in fields if start != goal]
rng.shuffle(problems)


def distance(walk, move):
    return sum(abs(at + by - to) for at, by, to in zip(walk.place, MOVES[move], walk.goal, strict=True))


async def careless_walk():
    """Segments for the warm start: the policy says those with 1, and reads those with 0."""
    walk = Walk(rng.choice(problems[48:]), seed=0)
    segments, done = [[await walk.reset(), 0]], False
    while not done:
        moves = rng.sample(list(MOVES), 4)
        move = min(moves, key=lambda move: distance(walk, move)) if rng.random() < 0.5 else moves[0]
        result = await walk.step(Action(move, tokens=(), ended=True))
        segments, done = [*segments, [move, 1], [result.observation, 0]], result.done
    return {"segments": segments[:-1]}


write_rows(Path("held_out.jsonl"), problems[:48])
write_rows(Path("train.jsonl"), problems[48:])
write_rows(Path("warm_start.jsonl"), [asyncio.run(careless_walk()) for _ in range(9600)])
build_model(PRESETS["tiny"].model, seed=1, folder=Path("model"))
