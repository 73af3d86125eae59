"""Sums of two digits, sloppy demonstrations for a warm start, and a random model of 0.3 M parameters."""

import random
from pathlib import Path

from launch.quickstart.assets import PRESETS, AdditionPlan, build_model, write_addition

plan = AdditionPlan(digits=2, train=2048, held_out=256, clean=8000, sloppy=1600)
write_addition(plan, random.Random(0), Path(), "warm_start.jsonl")
build_model(PRESETS["tiny"].model, seed=1, folder=Path("model"))
