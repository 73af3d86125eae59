"""Sums of two digits, clean demonstrations for a teacher, sloppy ones for its student, and two random models."""

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
plan = AdditionPlan(digits=2, train=2048, held_out=256, clean=8000, sloppy=1600, blurted=0.8, forgotten=0.5)
held_out, train, others = addition_pairs(plan, rng)


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


write("held_out.jsonl", map(addition_problem, held_out))
write("train.jsonl", map(addition_problem, train))
rows = list(addition_demonstrations(plan, others, rng))
write("teacher.jsonl", rows[: plan.clean])
write("student.jsonl", rows)
build_model(PRESETS["tiny"].model, seed=1, folder=Path("student-model"))
build_model(PRESETS["tiny"].model, seed=2, folder=Path("teacher-model"))
