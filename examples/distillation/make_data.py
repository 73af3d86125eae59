"""Sums of two digits, clean demonstrations for a teacher, sloppy ones for its student, and two random models."""

import random
from pathlib import Path

from launch.quickstart.assets import (
    PRESETS,
    AdditionPlan,
    addition_demonstrations,
    addition_pairs,
    addition_problem,
    build_model,
    write_rows,
)

rng = random.Random(0)
plan = AdditionPlan(digits=2, train=2048, held_out=256, clean=8000, sloppy=1600, blurted=0.8, forgotten=0.5)
held_out, train, others = addition_pairs(plan, rng)


write_rows(Path("held_out.jsonl"), map(addition_problem, held_out))
write_rows(Path("train.jsonl"), map(addition_problem, train))
rows = list(addition_demonstrations(plan, others, rng))
write_rows(Path("teacher.jsonl"), rows[: plan.clean])
write_rows(Path("student.jsonl"), rows)
build_model(PRESETS["tiny"].model, seed=1, folder=Path("student-model"))
build_model(PRESETS["tiny"].model, seed=2, folder=Path("teacher-model"))
