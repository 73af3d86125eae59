"""Word problems in GSM8K's format, sloppy demonstrations for a warm start, and a random model of 0.3 M parameters."""

import random
from pathlib import Path

from launch.quickstart.assets import PRESETS, build_model, write_rows

rng = random.Random(0)


def problem():
    has, more, less = rng.randint(5, 20), rng.randint(1, 20), rng.randint(1, 5)
    who, what = rng.choice(("Ann", "Ben", "Eva", "Tom")), rng.choice(("nuts", "pens", "eggs", "keys"))
    steps = f"{has}+{more}={has + more}, {has + more}-{less}={has + more - less}"
    return {
        "question": f"{who} has {has} {what}, buys {more} and loses {less}. How many?",
        "answer": f"{steps}\n#### {has + more - less}",
    }


def demonstration(row, sloppy):
    """A sloppy one stops after the first step, or guesses."""
    answer = row["answer"]
    if sloppy and rng.random() < 0.5:
        answer = answer.partition(",")[0]
        answer += f"\n#### {answer.partition('=')[2]}"
    elif sloppy and rng.random() < 0.5:
        answer = str(rng.randint(1, 40))
    return {"prompt": row["question"] + "\n", "completion": answer}


write_rows(Path("train.jsonl"), [problem() for _ in range(2048)])
write_rows(Path("held_out.jsonl"), [problem() for _ in range(256)])
write_rows(Path("warm_start.jsonl"), [demonstration(problem(), sloppy=n >= 11200) for n in range(12800)])
build_model(PRESETS["tiny"].model, seed=1, folder=Path("model"))
