"""Tiny chat models for supervised tuning, and conversations to train them on.

usage: sft_assets.py FOLDER: FOLDER/dense and FOLDER/moe with a character tokenizer and a chat template.
"""

import json
import random
from pathlib import Path
from typing import Any

VOCABULARY = 128
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


def build(folder: Path, kind: str, layers: int = 2) -> Any:
    """Write the model and its tokenizer; returns the model, in float32."""
    import torch
    import transformers

    from launch.quickstart.assets import build_tokenizer

    transformers.utils.logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    base: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=layers)
    base |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1)
    base |= dict(head_dim=16, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, attn_implementation="sdpa")
    base |= dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    if kind == "moe":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**base, **experts))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**base, tie_word_embeddings=True))
    model = model.float()
    model.save_pretrained(folder)
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder)
    return model
