"""Hours, what a careless policy and a judge learn first, and two random models of 0.3 M parameters."""

import json
import random
from pathlib import Path

from rewards import fits

from launch.quickstart.assets import PRESETS, build_model, build_tokenizer

GREETINGS = ("good morning", "good evening", "hey", "what now")
JUDGE = "At {hour}:00 somebody says: {completion}\nVerdict:"  # as in config.yaml
rng = random.Random(0)


def greeted():
    """The careless policy learns to say this."""
    return {"prompt": f"{rng.randrange(24)}:00 ", "completion": rng.choice(GREETINGS)}


def judged():
    row, said = {"hour": rng.randrange(24)}, rng.choice(GREETINGS)
    return {"prompt": JUDGE.format(**row, completion=said), "completion": " good" if fits(said, row) else " bad"}


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


write("hours.jsonl", [{"hour": hour} for hour in range(24)])
write("warm_start.jsonl", [greeted() for _ in range(1920)])
write("judge.jsonl", [judged() for _ in range(6400)])
build_model(PRESETS["tiny"].model, seed=1, folder=Path("model"))
build_model(PRESETS["tiny"].model, seed=2, folder=Path("judge-model"))
tokenizer = build_tokenizer()
tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
tokenizer.save_pretrained("judge-model")
