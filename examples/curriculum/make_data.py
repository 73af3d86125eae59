"""Sums of two and three digits, sloppy demonstrations for a warm start, and a random model of 0.3 M parameters."""

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
SIZES = {"easy": 2, "hard": 3}  # digits
clean, sloppy = [], []


for name, digits in SIZES.items():
    plan = AdditionPlan(digits=digits, train=1024, held_out=128, clean=6000, sloppy=800)
    held_out, problems, others = addition_pairs(plan, rng)
    write_rows(Path(f"{name}.jsonl"), map(addition_problem, problems))
    write_rows(Path(f"{name}_held_out.jsonl"), map(addition_problem, held_out))
    rows = list(addition_demonstrations(plan, others, rng))
    clean, sloppy = clean + rows[: plan.clean], sloppy + rows[plan.clean :]
rng.shuffle(clean)
rng.shuffle(sloppy)
write_rows(Path("warm_start.jsonl"), clean + sloppy)
build_model(PRESETS["tiny"].model, seed=1, folder=Path("model"))
