"""Questions about prices, sloppy demonstrations for a warm start, and a random model with a chat template."""

import json
import random
from pathlib import Path

from launch.quickstart.assets import PRESETS, build_model, build_tokenizer, write_rows

# A real model's template shows the tools; `<tool_call>` says in which format its calls are parsed.
TEMPLATE = """
{%- for m in messages %}
{%- if m.role == "assistant" %}A: {{ m.content }}<eos>
{% elif m.role == "tool" %}T: {{ m.content }}
{% else %}Q: {{ m.content }}
{% endif %}{% endfor %}
{%- if add_generation_prompt %}A: {% endif %}{# <tool_call> #}"""
ITEMS = ("pear", "plum", "leek", "kale", "rice", "milk", "salt", "corn")
rng = random.Random(0)


def problem():
    prices = {item: str(rng.randint(10, 99)) for item in ITEMS}
    item = rng.choice(ITEMS)
    return {"question": f"{item}?", "answer": prices[item], "prices": prices}


def demonstration(row, sloppy):
    """Segments: the policy says those with 1, and reads those with 0. A sloppy one guesses the price."""
    asked = [f"Q: {row['question']}\nA: ", 0]
    if sloppy and rng.random() < 0.7:
        return {"segments": [asked, [str(rng.randint(10, 99)), 1]]}
    call = json.dumps({"name": "price", "arguments": {"item": row["question"][:-1]}})
    told = [f"\nT: {row['answer']}\nA: ", 0]
    return {"segments": [asked, [f"<tool_call>{call}</tool_call>", 1], told, [row["answer"], 1]]}


write_rows(Path("train.jsonl"), [problem() for _ in range(512)])
write_rows(Path("held_out.jsonl"), [problem() for _ in range(128)])
write_rows(Path("warm_start.jsonl"), [demonstration(problem(), sloppy=n >= 5600) for n in range(6400)])
build_model(PRESETS["tiny"].model, seed=1, folder=Path("model"))
tokenizer = build_tokenizer()
tokenizer.chat_template = TEMPLATE
tokenizer.save_pretrained("model")
