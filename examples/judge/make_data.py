"""Hours, what a careless policy and a judge learn first, and two random models of 0.3 M parameters."""

import random
from pathlib import Path

from rewards import fits

from launch.quickstart.assets import PRESETS, build_model, build_tokenizer, write_rows

GREETINGS = ("good morning", "good evening", "hey", "what now")
JUDGE = "At {time} they say: {completion}\nVerdict:"  # as in config.yaml
TIMES = [f"{hour:02}:00" for hour in range(24)]
rng = random.Random(0)


def greeted():
    """The careless policy learns to say this: it looks at the clock in three of ten cases."""
    row = {"time": rng.choice(TIMES)}
    fitting = [said for said in GREETINGS if fits(said, row)]
    return {"prompt": f"{row['time']} ", "completion": rng.choice(fitting if rng.random() < 0.3 else GREETINGS)}


def misspelt(text):
    """One place of it is lost, repeated or another letter; a judge that has not seen this would be fooled."""
    at = rng.randrange(len(text))
    other = rng.choice(("", text[at] * 2, text[at:] + " " + text[at:], rng.choice("abcdefghijklmnopqrstuvwxyz ")))
    return text[:at] + other + text[at + 1 :]


def judged():
    row, said = {"time": rng.choice(TIMES)}, rng.choice(GREETINGS)
    said = misspelt(said) if rng.random() < 0.4 else said
    return {"prompt": JUDGE.format(**row, completion=said), "completion": " good" if fits(said, row) else " bad"}


write_rows(Path("hours.jsonl"), [{"time": time} for time in TIMES])
write_rows(Path("warm_start.jsonl"), [greeted() for _ in range(4800)])
write_rows(Path("judge.jsonl"), [judged() for _ in range(12800)])
build_model(PRESETS["tiny"].model, seed=1, folder=Path("model"))
build_model(PRESETS["tiny"].model, seed=2, folder=Path("judge-model"))
tokenizer = build_tokenizer()
tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
tokenizer.save_pretrained("judge-model")
