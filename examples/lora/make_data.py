"""Sums of two digits, sloppy demonstrations for a warm start, and a random model of 0.3 M parameters."""

import json
import random
from pathlib import Path

from launch.quickstart.assets import (
    PRESETS,
    AdditionPlan,
    addition_demonstrations,
    addition_pairs,
    addition_problem,
    build_model,
)

rng = random.Random(0)
plan = AdditionPlan(digits=2, train=2048, held_out=256, clean=8000, sloppy=1600)
held_out, train, others = addition_pairs(plan, rng)


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


write("held_out.jsonl", map(addition_problem, held_out))
write("train.jsonl", map(addition_problem, train))
write("warm_start.jsonl", addition_demonstrations(plan, others, rng))
build_model(PRESETS["tiny"].model, seed=1, folder=Path("model"))
