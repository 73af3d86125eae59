"""Tiny chat models for supervised tuning, and conversations to train them on."""

import json
import random
from pathlib import Path
from typing import Any

from launch.quickstart.assets import build_tokenizer
from tests.integration.megatron import tiny_models

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{{ '\n' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant: {% endif %}"
MARKED = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
MARKED += "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Short dialogues of one to three answers."""
    draw = random.Random(5)
    talks: list[list[dict[str, str]]] = []
    for _ in range(count):
        talk = [{"role": "system", "content": "Add."}] if draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 3)):
            a, b = draw.randint(0, 99), draw.randint(0, 99)
            talk.append({"role": "user", "content": f"{a}+{b}?"})
            talk.append({"role": "assistant", "content": str(a + b)})
        talks.append(talk)
    return talks


def write_rows(path: Path, count: int = 16) -> None:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in conversations(count)))


def build(folder: Path, kind: str) -> Any:
    """Write a model and a character tokenizer with a chat template; returns the model, in float32."""
    tokenizer = build_tokenizer()
    ends = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    model = tiny_models.new_model(kind, num_hidden_layers=2, initializer_range=0.1, **ends)
    model.save_pretrained(folder)
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder)
    return model
