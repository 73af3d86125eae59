"""Problems, sloppy demonstrations for a warm start, and a random model of 0.3 M parameters."""

import random
from pathlib import Path

from launch.quickstart.assets import PRESETS, build_model, write_rows

rng = random.Random(0)


def demonstration(sloppy):
    """A sloppy one exchanges two digits, or gives them as they are."""
    digits = rng.choices("0123456789", k=4)
    answer = sorted(digits)
    if sloppy and rng.random() < 0.4:
        answer = digits
    elif sloppy and rng.random() < 0.5:
        a, b = rng.sample(range(4), 2)
        answer[a], answer[b] = answer[b], answer[a]
    return {"prompt": f"Sort {''.join(digits)}: ", "completion": "".join(answer)}


write_rows(Path("problems.jsonl"), [{"digits": 4}] * 256)
write_rows(Path("warm_start.jsonl"), [demonstration(sloppy=n >= 8000) for n in range(9600)])
build_model(PRESETS["tiny"].model, seed=1, folder=Path("model"))
